"""The list of model classes in docs/transformers.md, as try_models.py found them."""

import re
import textwrap
from collections import Counter, defaultdict

import torch
import transformers

BEGIN = "<!-- The list begins. python tests/transformers/try_models.py --write FILE renews it. -->"
END = "<!-- The list ends. -->"
WIDTH = 120

# What the words of a refusal come down to; the first that matches says it.
REFUSALS = (
    ("computes attention itself and never calls", "attention of their own, out of forge's reach"),
    ("forge has no sparse attention", "sparse attention"),
    ("on the mask that only forge's", "a mask that the model changes or adds itself"),
    ("makes no mask for", "no mask where positions matter"),
    ("where [B, heads, Tq, Tk] is expected", "a mask without four axes"),
    ("and was handed a mask [", "a mask of other sizes than the layer"),
    ("position_bias must be a tensor", "a bias without four axes"),
)


def write(page, results):
    """Put the list into a page, in the place of the one that is there."""
    text = page.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(text[:begin] + "\n" + listing(results) + "\n" + text[end:])


def read(page):
    """Return {model type or class: heading} of the list in a page."""
    text = page.read_text()
    text = text[text.index(BEGIN) : text.index(END)]
    found = {}
    for heading, names in re.findall(r"^- \*\*(.+?)\*\*[^:]*: (.+?)$", _unwrapped(text), re.M):
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = heading
    return found


def _unwrapped(text):
    return re.sub(r"\n  +", " ", text)


def heading_of(result):
    """Return under which heading a result stands."""
    if result.outcome == "refused":
        words = (short for part, short in REFUSALS if part in result.detail)
        return "Refused: " + next(words, "other")
    if result.outcome == "skipped":
        return "Not tried: " + result.detail.partition(":")[0]
    return {
        "equal": "Equal",
        "unused": "Equal, no attention in what was tried",
        "partly": "Equal, and some inputs are refused",
    }.get(result.outcome, f"FAILED: {result.outcome}")


def listing(results):
    """Return the list: types all of whose classes stand under one heading, else the classes."""
    by_type = defaultdict(list)
    for result in results:
        by_type[result.model_type].append(result)
    names, classes = defaultdict(list), Counter()
    for model_type, of_type in by_type.items():
        headings = {heading_of(result) for result in of_type}
        for result in of_type:
            classes[heading_of(result)] += 1
            if len(headings) > 1:
                names[heading_of(result)].append(result.cls)
        if len(headings) == 1:
            names[headings.pop()].append(model_type)
    version = re.sub(r"\+.*", "", torch.__version__)
    intro = (
        f"transformers {transformers.__version__}, torch {version}: {len(results)} classes of "
        f"{len(by_type)} model types. A model type stands for all of its classes; where they "
        "differ, the classes are named."
    )
    order = sorted(names, key=lambda x: (("Equal" not in x), x.startswith("Not"), x))
    parts = [
        f"- **{heading}** ({classes[heading]}): "
        + ", ".join(f"`{name}`" for name in dict.fromkeys(names[heading]))
        for heading in order
    ]
    wrapped = [
        textwrap.fill(
            part, WIDTH, subsequent_indent="  " * part.startswith("-"), break_on_hyphens=False
        )
        for part in (intro, *parts)
    ]
    return wrapped[0] + "\n\n" + "\n".join(wrapped[1:])
