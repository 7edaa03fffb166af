"""The source tree keeps its promises: include directions, file sizes, no unsafe math flags."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(
    not (CSRC / "core").is_dir(), reason="the source tree is not here, only its tests"
)

# A folder includes its own headers and those of folders with a lower rank.
RANK = {
    "bindings": 4,
    "dispatch": 3,
    "materialized": 2,
    "cpu": 2,
    "metal": 2,
    "core": 1,
    "shared": 0,
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
NUMPY = re.compile(r"^(pybind11/|Python\.h$|numpy/)")
METAL_CPP = re.compile(r"^(Metal|Foundation|QuartzCore|MetalKit|MetalFX|AppKit)/")
SOURCES = {".h", ".hpp", ".cpp", ".cc", ".inl", ".mm", ".m", ".metal"}


def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)


def includes(path):
    return INCLUDE.findall(path.read_text())


def name_of(path):
    return str(path.relative_to(ROOT))


def layer(path):
    return path.relative_to(CSRC).parts[0]


@pytest.mark.parametrize("path", sources(CSRC), ids=name_of)
def test_includes_run_one_way(path):
    own = layer(path)
    assert own in RANK, f"{own} has no place among the layers"
    for bracket, header in includes(path):
        if bracket == "<" and header.split("/")[0] not in RANK:
            continue
        target = header.split("/")[0]
        assert target in RANK, f"{header}: include by folder and name, from csrc/"
        assert (CSRC / header).is_file(), f"{header} is not there"
        assert target == own or RANK[target] < RANK[own], f"{own} must not include {header}"


@pytest.mark.parametrize("path", sources(CSRC), ids=name_of)
def test_foreign_headers_stay_in_their_layers(path):
    for _, header in includes(path):
        assert layer(path) == "bindings" or not NUMPY.match(header), header
        assert layer(path) == "metal" or not METAL_CPP.match(header), header


@pytest.mark.parametrize("path", sources(CSRC / "shared"), ids=name_of)
def test_shared_headers_need_nothing_but_the_standard_library(path):
    """They are shader source too."""
    assert path.suffix == ".h"
    for bracket, header in includes(path):
        assert header.startswith("shared/") or (bracket == "<" and re.fullmatch(r"[a-z_]+", header))


def all_code():
    shaders = ROOT / "shaders"
    yield from sources(CSRC)
    yield from sources(ROOT / "tests" / "cpp")
    yield from sources(shaders) if shaders.is_dir() else ()
    for folder in ("python", "tests", "examples", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))
        yield from sorted((ROOT / folder).rglob("*.pyi"))


def test_no_file_is_longer_than_400_lines():
    lengths = {name_of(path): path.read_text().count("\n") for path in all_code()}
    assert len(lengths) > 20
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_headers_are_included_once():
    for path in sources(CSRC):
        if path.suffix == ".h":
            assert re.search(r"^#pragma once$|^#ifndef \w+_H_?$", path.read_text(), re.MULTILINE), (
                name_of(path)
            )


def build_files():
    yield from (
        ROOT / name
        for name in ("pyproject.toml", "Makefile", "CMakeLists.txt", "CMakePresets.json")
    )
    yield from sorted((ROOT / "cmake").rglob("*"))
    yield from sorted((ROOT / "csrc").rglob("CMakeLists.txt"))
    yield from sorted((ROOT / "tests").rglob("CMakeLists.txt"))


UNSAFE_FLAG = re.compile(
    r"-O(?:fast)\b|-f(?:fast-math|unsafe-math\w*|finite-math-only|associative-math|reciprocal-math|no-honor-\w+)"
    r"|-ffp-contract=fast|-m(?:arch|cpu|tune)=native|/fp:fast"
)


def test_no_build_file_asks_for_unsafe_math_or_this_machine_only():
    files = [path for path in build_files() if path.is_file()]
    assert ROOT / "CMakeLists.txt" in files
    for path in files:
        text = path.read_text()
        if path.suffix != ".json":
            text = re.sub(r"#.*", "", text)
        assert not UNSAFE_FLAG.search(text), name_of(path)


def test_the_exact_kernels_are_built_without_contraction():
    cmake = "".join(path.read_text() for path in build_files() if path.is_file())
    assert "-ffp-contract=off" in cmake


def test_no_source_turns_on_unsafe_math():
    for path in all_code():
        if path.suffix in SOURCES:
            assert not re.search(
                r"fast-math|float_control|fp contract\(fast\)|FP_CONTRACT ON", path.read_text()
            ), name_of(path)
