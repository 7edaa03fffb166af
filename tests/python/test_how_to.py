"""The how-to pages: their Python runs, block after block, as a reader would type it."""

import re
from pathlib import Path

import pytest
from optional import need

PAGES = Path(__file__).resolve().parents[2] / "docs"
NEEDS = {
    "jax.md": ["jax"],
    "mlx.md": ["mlx.core"],
    "pytorch.md": ["torch"],
    "transformers.md": ["torch", "transformers"],
}

pytestmark = pytest.mark.skipif(not PAGES.is_dir(), reason="the docs are not here, only the tests")


def blocks(page):
    """The code of each fenced block, with line breaks before it so that errors name its line."""
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text[: block.start(1)].count("\n") + block[1]


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("page", NEEDS)
def test_the_code_of_the_page_runs(page):
    for module in NEEDS[page]:
        need(module)
    path, names = PAGES / page, {}
    found = list(blocks(path))
    assert found
    for code in found:
        exec(compile(code, str(path), "exec"), names)
