"""The dialect check takes valid Metal, our shaders included, and refuses what Apple refuses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from msl_check import HERE, ROOT, Clang, check, flatten

BEGIN = "#include <metal_stdlib>\nusing namespace metal;\n"


class Snippet(NamedTuple):
    """A piece of rejected_*.metal or accepted.metal."""

    name: str
    rule: str
    message: str
    text: str


def snippets(file: str) -> list[Snippet]:
    """Read the pieces of a file, each under its `////` lines."""
    found = []
    for piece in Path(HERE, file).read_text().split("\n\n////")[1:]:
        lines = piece.split("\n")
        heading = [lines[0].strip(), *(s[5:] for s in lines[1:] if s.startswith("//// "))]
        rule, _, message = heading[-1].rpartition(": ") if len(heading) > 1 else ("", "", "")
        body = "\n".join(s for s in lines[1:] if not s.startswith("////"))
        text = body if "#include <metal_stdlib>" in body else BEGIN + body
        found.append(Snippet(heading[0], rule, message, text))
    return found


REJECTED = [
    snippet
    for part in ("memory", "language", "kernels")
    for snippet in snippets(f"rejected_{part}.metal")
]
ACCEPTED = snippets("accepted.metal")


@pytest.fixture(scope="module")
def clang() -> Clang:
    """The compiler. Where it may be missing, FORGE_REQUIRE_METAL is not set."""
    try:
        return Clang()
    except SystemExit as missing:
        if os.environ.get("FORGE_REQUIRE_METAL"):
            raise
        pytest.skip(str(missing))


def show(problems: list) -> str:
    return "\n".join(map(str, problems)) or "nothing"


@pytest.mark.parametrize("snippet", REJECTED, ids=[s.name for s in REJECTED])
def test_is_rejected_by_its_rule(clang: Clang, snippet: Snippet) -> None:
    problems = check(f'#line 1 "snippet"\n{snippet.text}', clang)
    marked = [n for n, line in enumerate(snippet.text.split("\n"), 1) if line.endswith("// <-")]
    assert {p.line for p in problems} == set(marked), show(problems)
    assert any(
        p.rule.startswith(snippet.rule) and snippet.message in p.message for p in problems
    ), show(problems)


@pytest.mark.parametrize("snippet", ACCEPTED, ids=[s.name for s in ACCEPTED])
def test_is_accepted(clang: Clang, snippet: Snippet) -> None:
    problems = check(snippet.text, clang)
    assert not problems, show(problems)


def test_our_shaders_are_accepted(clang: Clang) -> None:
    problems = check(flatten(ROOT), clang)
    assert not problems, show(problems)


def test_bfloat_needs_metal_3_1(clang: Clang) -> None:
    text = BEGIN + "static float f(device const bfloat* x) { return float(x[0]); }\n"
    assert any("bfloat comes with Metal 3.1" in p.message for p in check(text, clang, 3.0))


@pytest.mark.parametrize(("body", "status"), [("x[0] = 1.0f;", 0), ("x[0] = 1.0;", 1)])
def test_the_command_names_the_place_and_fails(
    clang: Clang, tmp_path: Path, body: str, status: int
) -> None:
    file = tmp_path / "kernel.metal"
    file.write_text(BEGIN + "kernel void k(device float* x [[buffer(0)]]) {\n" + body + "\n}\n")
    command = [sys.executable, HERE / "msl_check.py", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert (f"{file}:4: 1.0 is a float" in done.stdout) == bool(status)


def test_there_are_enough_snippets() -> None:
    assert len(REJECTED) >= 30
    assert len(ACCEPTED) >= 15
    assert all(s.rule.removeprefix("forge: ").startswith("MSL ") for s in REJECTED)
    assert len({s.name for s in REJECTED + ACCEPTED}) == len(REJECTED + ACCEPTED)
