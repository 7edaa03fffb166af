"""Check Metal shaders without Apple's compiler.

    python tests/dialect/msl_check.py [FILE.metal ...]   (none: this repository's shaders)

The text is preprocessed, checked by rules (msl_rules.py), rewritten to C++ for OpenCL
(msl_text.py), compiled by clang against declarations of Metal's standard library
(msl_library.h), and the compiler's syntax tree is checked for what OpenCL takes and Metal does
not (msl_tree.py). docs/shaders.md says what this can see.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "cmake"))

from flatten_shaders import flatten  # noqa: E402
from msl_rules import Finding, add_asserts, check_text  # noqa: E402
from msl_text import Shader  # noqa: E402
from msl_tree import check_tree  # noqa: E402

# 6.1 Namespace and Header Files. An include leaves a mark; the declarations go before the text.
HEADERS = [
    "metal_stdlib",
    *("metal_common", "metal_compute", "metal_geometric", "metal_integer", "metal_limits"),
    *("metal_math", "metal_relational", "metal_simdgroup", "metal_simdgroup_matrix"),
    "metal_type_traits",
]
MARK = "#pragma forge metal_stdlib"
LANGUAGE = ["-triple", "spir64-unknown-unknown", "-nostdsysteminc", "-nobuiltininc"]
PREPROCESS = [*LANGUAGE, "-x", "c++", "-std=c++14", "-undef", "-E"]
COMPILE = [
    *LANGUAGE,
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-single-precision-constant", "-ferror-limit", "100"),
    *("-Wall", "-Wextra", "-Werror", "-Wglobal-constructors", "-Wc++98-c++11-c++14-compat"),
    "-Wlarge-by-value-copy=128",
    # Helpers of a header are unused in one shader or another; the rest is about what we put in.
    *("-Wno-unused-function", "-Wno-unused-const-variable"),
    *("-Wno-defaulted-function-deleted", "-Wno-unknown-pragmas", "-Wno-unknown-warning-option"),
]
# What clang says -> the rule behind it. The first that matches counts.
CLANG_RULES = (
    (
        r"read-only variable|constant address space|global constructor|initialized by a const",
        "MSL 4.2 Constant Address Space",
    ),
    (r"address space|'this'|object parameter", "MSL 4 Address Spaces"),
    (r"reference to '\w+' is ambiguous", "MSL 6.1 Namespace and Header Files"),
    (r"call to '\w+' is ambiguous", "MSL 6.2 Common Functions, 6.5 Math Functions"),
    (
        r"use of overloaded operator|assigning to '\w+' \(vector|vector",
        "MSL 2.22 Implicit Type Conversions",
    ),
    (r"pointers? to functions?|function pointer", "forge: MSL 1.5.4 Restrictions"),
    (r"variadic", "forge: MSL 5.1 Functions"),
    # Apple's compiler has miscompiled calls that hand over more; a reference costs nothing.
    (r"pass-by-value", "forge: MSL 5.1 Functions"),
    (
        r"array size is not a const|variable length arr|argument is not a constant",
        "MSL 1.5 (C++14, arrays and constant expressions)",
    ),
    (r"incompatible with C\+\+ standards before C\+\+17", "MSL 1.5 (C++14 before Metal 4)"),
    (r"file not found", "MSL 1.5.4 Restrictions, 6.1 Namespace and Header Files"),
    (
        r"undeclared identifier|no member named|unknown type name|use of undeclared",
        "MSL 6.1 Namespace and Header Files",
    ),
    (r"no matching function", "MSL 4 Address Spaces, 6 Metal Standard Library"),
)
SPELLINGS = {
    "__private": "thread",
    "__local": "device",
    "__global": "threadgroup",
    "__constant": "constant",
    "__generic": "(no address space)",
}


class Problem(NamedTuple):
    """A finding with its place in the files."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} [{self.rule}]"


class Clang:
    """A clang that compiles C++ for OpenCL: the system's, 14 or later, or zig's."""

    def __init__(self, command: str | None = None) -> None:
        self._command = self._find(command or os.environ.get("FORGE_CLANG"))

    @staticmethod
    def _find(command: str | None) -> list[str]:
        if command:
            # zig has clang behind a subcommand.
            return [command, "clang"] if Path(command).name.startswith("zig") else [command]
        for name in ("clang", *(f"clang-{version}" for version in range(30, 13, -1))):
            path = shutil.which(name)
            if path:
                said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
                version = re.search(r"version (\d+)", said)
                if version and int(version[1]) >= 14:
                    return [path]
        if importlib.util.find_spec("ziglang"):
            return [sys.executable, "-m", "ziglang", "clang"]
        raise SystemExit(
            "the dialect check needs clang 14 or later: install it, or the ziglang package, or "
            "set FORGE_CLANG"
        )

    def __str__(self) -> str:
        return " ".join(self._command)

    def run(self, arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
        """Run the compiler proper on a text."""
        return subprocess.run(
            [*self._command, "-cc1", *arguments, "-"], input=text, capture_output=True, text=True
        )


class Preprocessed(NamedTuple):
    """The text without directives, and where each of its lines comes from."""

    text: str
    places: list[tuple[str, int]]
    has_library: bool


def preprocess(clang: Clang, text: str, version: float) -> tuple[Preprocessed, list[Problem]]:
    """Preprocess a shader; its Metal headers are empty."""
    digits = str(round(version * 100))
    with tempfile.TemporaryDirectory() as folder:
        for header in HEADERS:
            Path(folder, header).write_text(MARK + "\n")
        defines = [f"-D__METAL_VERSION__={digits}", "-D__METAL__=1", "-D__METAL_MACOS__=1"]
        defines.append("-DMETAL_FUNC=static inline")  # Apple's headers have it always inlined
        done = clang.run([*PREPROCESS, "-I", folder, *defines], text)
    lines = []
    places = []
    file, line = "", 0
    for row in done.stdout.split("\n"):
        marker = re.match(r'# (\d+) "([^"]*)"', row)
        if marker:
            file, line = marker[2], int(marker[1]) - 1
        places.append((file, line))
        lines.append("" if marker or row.startswith(MARK) else row)
        line += 1
    problems = [
        Problem(file, int(line), *classify(message))
        for file, line, message in re.findall(
            r"^(.*?):(\d+):\d+: .*?error: (.*)$", done.stderr, re.M
        )
    ]
    return Preprocessed("\n".join(lines), places, MARK in done.stdout), problems


def classify(message: str) -> tuple[str, str]:
    """Return the rule behind clang's message, and the message in Metal's words."""
    for opencl, metal in SPELLINGS.items():
        message = message.replace(opencl, metal)
    own = re.search(r"(MSL [^|\"]*) \| ([^\"]*)", message)
    if own:
        return own[1], own[2].strip()
    for pattern, rule in CLANG_RULES:
        if re.search(pattern, message):
            return rule, message
    return "MSL 1.5 (C++14)", message


def compile_errors(said: str, first_line: int) -> Iterator[Finding]:
    """Yield clang's errors; one inside the library is put where the text caused it."""
    waiting: list[str] = []
    for row in said.split("\n"):
        found = re.match(r"<stdin>:(\d+):\d+: (?:fatal )?(error|warning|note): (.*)", row)
        if not found:
            continue
        line, kind, message = int(found[1]) - 1 - first_line, found[2], found[3]
        if kind != "note":
            if line < 0:
                waiting.append(message)
            else:
                yield Finding(line, *classify(message))
        elif waiting and line >= 0 and "requested here" in message:
            yield from (Finding(line, *classify(each)) for each in waiting)
            waiting = []
    yield from (Finding(0, *classify(each)) for each in waiting)


def check(text: str, clang: Clang, version: float = 3.1) -> list[Problem]:
    """Return what is wrong with a shader that has no includes but Metal's."""
    source, problems = preprocess(clang, text, version)
    if problems:
        return problems
    shader = Shader(source.text)
    findings = set(check_text(shader, version))
    add_asserts(shader)
    rewritten, injected = shader.rewritten()
    library = (HERE / "msl_library.h").read_text() if source.has_library else ""
    whole = (library + rewritten).encode("ascii", "replace").decode()  # offsets count bytes
    first_line = library.count("\n")
    done = clang.run([*COMPILE, "-ast-dump=json"], whole)
    findings |= set(compile_errors(done.stderr, first_line))
    if done.returncode and not findings:
        raise RuntimeError(f"clang failed: {done.stderr}")
    if done.returncode == 0:
        first = len(library)
        moved = [range(r.start + first, r.stop + first) for r in injected]
        for line, rule, message in check_tree(json.loads(done.stdout), whole, first, moved):
            findings.add(Finding(line - first_line, rule, message))
    return sorted(
        Problem(*source.places[min(line, len(source.places) - 1)], rule, message)
        for line, rule, message in findings
    )


def main() -> int:
    """Check the files, or the shaders of this repository; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="shaders with no includes of ours")
    parser.add_argument("--clang", help="the compiler; else FORGE_CLANG, the system's or zig's")
    parser.add_argument("--std", type=float, default=3.1, help="the Metal language version")
    arguments = parser.parse_args()
    missing = [str(path) for path in arguments.files if not path.is_file()]
    if missing:
        parser.error(f"files must exist, got {', '.join(missing)}")
    clang = Clang(arguments.clang)
    texts = [f'#line 1 "{path}"\n{path.read_text()}' for path in arguments.files]
    problems = [
        problem
        for text in texts or [flatten(ROOT)]
        for problem in check(text, clang, arguments.std)
    ]
    for problem in problems:
        print(problem)
    print(f"msl_check: {len(problems)} problems, checked with {clang}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
