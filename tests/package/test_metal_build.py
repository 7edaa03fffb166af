"""What a build for Metal does before it compiles anything: shaders, metallib, headers.

A stand-in plays Apple's xcrun, so this runs anywhere.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLATTEN = ROOT / "cmake/flatten_shaders.py"

PROJECT = f"""
cmake_minimum_required(VERSION 3.23)
project(forge LANGUAGES NONE)
include({ROOT}/cmake/shaders.cmake)
forge_flatten_shaders()
forge_build_metallib()
message(STATUS "FORGE_METALLIB='${{FORGE_METALLIB}}'")
"""

# Notes its arguments, and writes what comes after -o. {refuses} is an argument that it fails on.
XCRUN = """#!{python}
import sys
from pathlib import Path
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*arguments, file=log)
if {refuses!r} in arguments:
    sys.exit("error: cannot execute tool 'metal'")
if {writes!r}:
    output = Path(arguments[arguments.index("-o") + 1])
    output.write_text("made of " + next(a for a in arguments if a.endswith((".metal", ".air"))))
"""


def run(*command):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )


def cmake(*arguments):
    beside = Path(sys.executable).with_name("cmake")
    program = beside if beside.exists() else shutil.which("cmake")
    assert program, "the tests of the build need cmake"
    return run(program, *arguments)


class Build:
    """A build folder of the shaders alone."""

    def __init__(self, folder):
        self.folder = folder
        self.source = folder / "source"
        self.binary = folder / "build"
        self.log = folder / "xcrun.log"
        self.source.mkdir()
        (self.source / "CMakeLists.txt").write_text(PROJECT)

    def configure(self, refuses="nothing", writes=True, xcrun="xcrun"):
        tool = self.folder / "xcrun"
        tool.write_text(
            XCRUN.format(python=sys.executable, log=str(self.log), refuses=refuses, writes=writes)
        )
        tool.chmod(0o755)
        self.log.write_text("")
        done = cmake(
            "-S",
            self.source,
            "-B",
            self.binary,
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DFORGE_XCRUN={self.folder / xcrun}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def calls(self):
        return [line.split() for line in self.log.read_text().splitlines()]

    def installed(self):
        prefix = self.folder / "prefix"
        shutil.rmtree(prefix, ignore_errors=True)
        done = cmake("--install", self.binary, "--prefix", prefix)
        assert done.returncode == 0, done.stdout + done.stderr
        return {str(p.relative_to(prefix)) for p in prefix.rglob("*") if p.is_file()}


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def test_the_metallib_is_compiled_with_safe_math_and_installed_beside_the_module(build):
    output = build.configure()
    compile_call, link_call = build.calls()
    shaders = build.binary / "shaders"
    air, metallib = str(shaders / "forge.air"), str(shaders / "forge.metallib")
    assert compile_call[:3] == link_call[:3] == ["-sdk", "macosx", "metal"]
    assert set(compile_call[3:-4]) == {
        "-std=metal3.1",
        "-mmacosx-version-min=14.0",
        "-fno-fast-math",
        "-Wall",
        "-Wextra",
    }
    assert compile_call[-4:] == ["-c", str(shaders / "forge.metal"), "-o", air]
    assert link_call[3:] == [air, "-o", metallib]
    assert f"FORGE_METALLIB='{metallib}'" in output
    assert build.installed() == {"forge/forge.metallib"}
    assert (build.folder / "prefix/forge/forge.metallib").read_text() == f"made of {air}"


def test_the_text_asks_for_its_own_math_mode_before_any_function(build):
    build.configure()
    text = (build.binary / "shaders/forge.metal").read_text()
    code = min(text.index(f"\n{word} ") for word in ("FORGE_INLINE", "METAL_FUNC", "kernel"))
    for pragma in ("#pragma METAL fp math_mode(safe)", "#pragma METAL fp contract(off)"):
        assert 0 <= text.find(pragma) < code


def test_the_metallib_and_the_embedded_text_are_of_one_language_version(build):
    build.configure()
    [std] = [word for word in build.calls()[0] if word.startswith("-std=metal")]
    major, minor = std.removeprefix("-std=metal").split(".")
    embedded = (build.binary / "shaders/shader_source.cpp").read_text()
    assert f"kShaderLanguageVersion = ({major}u << 16) + {minor}u;" in embedded


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"refuses": "-c"}, "cannot execute tool 'metal'"),
        ({"refuses": "{binary}/shaders/forge.metallib"}, "cannot execute tool 'metal'"),
        ({"writes": False}, "it left no"),
        ({"xcrun": "absent/xcrun"}, "no such file"),
    ],
    ids=["does not compile", "does not link", "writes nothing", "absent"],
)
def test_a_compiler_that_fails_costs_the_metallib_and_not_the_build(build, tool, reason):
    if "refuses" in tool:
        tool = {"refuses": tool["refuses"].format(binary=build.binary)}
    output = " ".join(build.configure(**tool).split())
    assert "CMake Warning" in output
    assert reason in output
    assert "FORGE_METALLIB=''" in output
    assert build.installed() == set()
    assert "kShaderSource[]" in (build.binary / "shaders/shader_source.cpp").read_text()


def test_a_metallib_of_an_earlier_build_does_not_outlive_a_failure(build):
    build.configure()
    assert build.installed() == {"forge/forge.metallib"}
    build.configure(refuses="-c")
    assert build.installed() == set()


def literals(cpp):
    return re.findall(r'R"msl\((.*?)\)msl"', cpp, flags=re.DOTALL)


def test_the_embedded_text_is_the_flattened_one_in_pieces_that_every_compiler_takes(build):
    build.configure()
    text = (build.binary / "shaders/forge.metal").read_text()
    pieces = literals((build.binary / "shaders/shader_source.cpp").read_text())
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) < 16 * 1024
    assert '#include "' not in text
    for path in (ROOT / "shaders").glob("*.metal"):
        assert f'#line 1 "shaders/{path.name}"' in text


def flatten(root, output):
    return run(sys.executable, FLATTEN, "--root", root, "--metal", output)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "shaders").mkdir()
    (tmp_path / "csrc/shared").mkdir(parents=True)
    (tmp_path / "csrc/shared/sizes.h").write_text("#pragma once\nconstant int size = 3;\n")
    return tmp_path


def test_a_header_comes_once_where_it_is_met_first_and_lines_keep_their_names(tree):
    include = '#include "shared/sizes.h"\n'
    (tree / "shaders/b.metal").write_text(include + "kernel void b() {}\n")
    (tree / "shaders/a.metal").write_text(
        f"#include <metal_stdlib>\n{include}kernel void a() {{}}\n"
    )
    assert flatten(tree, tree / "out.metal").returncode == 0
    assert (tree / "out.metal").read_text().splitlines() == [
        '#line 1 "shaders/a.metal"',
        "#include <metal_stdlib>",
        '#line 1 "csrc/shared/sizes.h"',
        "",
        "constant int size = 3;",
        '#line 3 "shaders/a.metal"',
        "kernel void a() {}",
        '#line 1 "shaders/b.metal"',
        '#line 2 "shaders/b.metal"',
        "kernel void b() {}",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('#include "shared/absent.h"\n', 'shaders/a.metal:1: there is no "shared/absent.h"'),
        ('#ifdef X\n#include "shared/sizes.h"\n#endif\n', "shaders/a.metal:2: an include of ours"),
    ],
)
def test_an_include_that_cannot_be_inlined_is_refused(tree, text, complaint):
    (tree / "shaders/a.metal").write_text(text)
    done = flatten(tree, tree / "out.metal")
    assert done.returncode != 0
    assert complaint in done.stderr


def test_macs_and_cross_builds_take_the_same_headers():
    required = re.search(r'"mlx-metal==([\d.]+);', (ROOT / "pyproject.toml").read_text())
    fetched = re.search(
        r"^mlx-metal==([\d.]+) --hash=sha256:[0-9a-f]{64}$",
        (ROOT / "cmake/requirements-metal-cpp.txt").read_text(),
        flags=re.MULTILINE,
    )
    assert required[1] == fetched[1]


def find_metal_cpp(folder, *definitions):
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.23)\nproject(forge LANGUAGES NONE)\n"
        f"set(FORGE_METAL ON)\ninclude({ROOT}/cmake/metal_cpp.cmake)\nforge_find_metal_cpp()\n"
    )
    done = cmake("-S", folder, "-B", folder / "build", *definitions)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_folder_without_the_headers_is_refused(tmp_path):
    code, output = find_metal_cpp(tmp_path, f"-DMETAL_CPP_DIR={tmp_path}")
    assert code != 0
    assert f"METAL_CPP_DIR must be a folder with Metal/Metal.hpp in it, got {tmp_path}" in output


def test_headers_that_cannot_be_had_end_the_build_and_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code, output = find_metal_cpp(tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    assert code != 0
    for part in ("-DMETAL_CPP_DIR=", "install mlx-metal", "-DFORGE_METAL=OFF"):
        assert part in output
