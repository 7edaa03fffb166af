"""The code on each page of the documentation runs, top to bottom, and pages link to what exists."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import forge
import pytest
from optional import need

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"torch", "transformers", "mlx", "jax", "mpi4py"}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def program(page):
    """The page's Python blocks as one program; its line numbers are the page's."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def imported(code):
    """Names of the packages that the code imports, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    if "forge.plot" in code:
        names.add("matplotlib")
    return names


def name_of(page):
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if program(page).strip()]


def test_the_pages_that_promise_code_have_some():
    named = {name_of(page) for page in WITH_CODE}
    how_to = {name_of(page) for page in PAGES if page.parent.name == "how-to"}
    assert how_to >= {
        f"docs/how-to/{name}.md"
        for name in ("check-your-kernel", "kv-cache", "packed-qkv", "see-attention",
                     "train-a-language-model")
    }  # fmt: skip
    assert named >= {"README.md", "docs/index.md", "docs/quickstart.md", "docs/conventions.md"}
    assert named >= how_to


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path):
    code = program(page)
    packages = {name.split(".")[0] for name in imported(code)}
    if "matplotlib" in packages:
        pytest.importorskip("matplotlib", reason="the page draws with matplotlib")
    for package in sorted(packages & FRAMEWORKS):
        need(package)
    warnings = [] if "torch" in packages else ["-W", "error"]  # torch's compiler has its own
    script = tmp_path / "page.py"  # no name of a package
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, *warnings, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MPLBACKEND": "Agg", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"{name_of(page)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"\w+:", target):
            path = target.partition("#")[0]
            assert not path or (page.parent / path).exists(), target


def test_each_make_target_in_the_documentation_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"^    make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(page)}: {target}"


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    for name in forge.__all__:
        assert re.search(rf"forge\.{name}\b", page), name
    for name in forge.kernels.__all__:
        assert f"forge.kernels.{name}\n" in page
