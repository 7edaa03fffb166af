"""What the pages say of the tree is there: files, folders, and the names of architecture.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
CSRC = ROOT / "csrc"
CODE = {".h", ".cpp", ".metal", ".py", ".pyi", ".cmake", ".txt", ".inc", ".toml", ".yml"}

if not (PAGE.is_file() and CSRC.is_dir()):
    pytest.skip("the source tree is not here, only its tests", allow_module_level=True)

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LAYERS = tuple(folder.name for folder in sorted(CSRC.iterdir()))
FOLDERS = ("benchmarks", "cmake", "csrc", "docs", "examples", "python", "shaders", "tests")
QUOTED = re.compile(r"`([^`\n]+)`")
BRACES = re.compile(r"(.*)\{(.*)\}(.*)")


def code():
    """Every file that says what the project does, but pages."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CODE and path != Path(__file__):
                yield path
    yield from (ROOT / name for name in ("CMakeLists.txt", "Makefile", "pyproject.toml"))


def spelled_out(path):
    """`a.{h,cpp}` is a.h and a.cpp."""
    found = BRACES.fullmatch(path)
    if not found:
        return [path]
    before, names, after = found.groups()
    return [before + name.strip() + after for name in names.split(",")]


def is_there(path):
    """A path from the root; of C++ also from csrc, as it is included, with or without suffix."""
    return any(
        next(base.glob(pattern), None)
        for base in (ROOT, CSRC)
        for pattern in (path.rstrip("/"), path.rstrip("/") + ".*")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page):
    for quoted in QUOTED.findall(page.read_text()):
        if re.match(rf"({'|'.join((*FOLDERS, *LAYERS))})/[\w./{{}},*-]*$", quoted):
            for path in spelled_out(quoted):
                assert is_there(path), quoted


def test_pages_that_a_comment_names_are_there():
    pages = {path.name for path in PAGES} | {path.name for path in ROOT.glob("tests/**/*.md")}
    pages.add("CHANGELOG.md")
    for path in code():
        for name in re.findall(r"(?<![\w*{}\"'.-])[\w/-]+\.md\b(?![\"'])", path.read_text()):
            assert Path(name).name in pages, f"{path.relative_to(ROOT)}: {name}"


def test_names_in_architecture_are_names_in_the_code():
    texts = "\n".join(path.read_text() for path in code())
    known = set(re.findall(r"\w+", texts)) | {path.stem for path in code()}
    for quoted in QUOTED.findall(PAGE.read_text()):
        if re.fullmatch(r"[\w.]+(\(\))?", quoted):
            for name in re.findall(r"\w+", quoted):
                assert name in known, quoted


def test_architecture_has_a_line_for_every_module_and_folder():
    quoted = set(QUOTED.findall(PAGE.read_text()))
    for module in sorted((ROOT / "python" / "forge").iterdir()):
        if module.suffix in (".py", ".pyi") and module.stem != "__main__":
            assert quoted & {module.stem, module.name}, module.name
        elif module.is_dir() and module.name != "__pycache__":
            assert f"{module.name}/" in quoted, module.name
    for path in (*CSRC.iterdir(), *(ROOT / "tests").iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            assert f"{path.relative_to(ROOT)}/" in quoted, path.name


def test_the_head_dims_that_pages_promise_are_those_of_the_code():
    def limit(path, name):
        [value] = re.findall(rf"{name} = (\d+)", (CSRC / path).read_text())
        return value

    cpu = limit("cpu/attention.h", "kMaxHeadDim")
    metal = limit("shared/fused_tiling.h", "kMaxFusedHeadDim")
    row = f"| head dims | 1 to {cpu} | any | 1 to {metal} | any |"
    assert row in (ROOT / "README.md").read_text()
    assert f"(head dims to {metal})" in (ROOT / "docs" / "metal-backend.md").read_text()
