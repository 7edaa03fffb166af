"""The text: the source of Python's own standard library, as a stream of character codes."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Newline, printable ASCII, and one symbol that stands for everything else.
OTHER = "\N{REPLACEMENT CHARACTER}"
SYMBOLS = "\n" + "".join(map(chr, range(32, 127))) + OTHER

# Not the library's prose: installed packages and tests, then files that are mostly tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
SKIPPED |= {"encodings", "pydoc_data"}
HELD_OUT_EVERY = 16  # one file in so many is kept for the held-out loss
PROMPT = "import os\n\n\ndef "


class NoTextError(Exception):
    """This Python comes without the source of its standard library."""


@dataclass(frozen=True)
class Corpus:
    """Two streams of character codes, uint8, from different files."""

    train: np.ndarray
    held_out: np.ndarray
    files: int


def encode(text: str) -> np.ndarray:
    """Character codes of a text: indices into SYMBOLS, uint8 [len(text)]."""
    points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
    table = np.full(128, SYMBOLS.index(OTHER), dtype=np.uint8)
    for code, symbol in enumerate(SYMBOLS[:-1]):
        table[ord(symbol)] = code
    return table[np.minimum(points, 127)]  # 127, DEL, is no symbol: it maps to OTHER


def decode(codes: np.ndarray) -> str:
    """The inverse of encode."""
    return "".join(SYMBOLS[code] for code in codes)


def read_source(path: Path) -> str:
    """The text of a Python file in the encoding it declares, whatever that is worth."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (SyntaxError, UnicodeError, LookupError):  # a false or unknown declaration
        text = path.read_bytes().decode("utf-8", "replace")
    return text.replace("\r\n", "\n").expandtabs(8)


def source_files(root: Path) -> Iterator[Path]:
    """The library's files in an order that does not depend on the file system."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts) and path.is_file():
            yield path


def load_corpus(root: Path | None = None, context: int = 256) -> Corpus:
    """Reads the standard library below `root`; each stream is longer than `context`."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    streams: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    files = 0
    for path in source_files(root):
        try:
            codes = encode(read_source(path))
        except OSError:  # unreadable: the rest is text enough
            continue
        streams[files % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(codes)
        files += 1
    train, held_out = (np.concatenate([np.zeros(0, np.uint8), *parts]) for parts in streams)
    if min(len(train), len(held_out)) <= 16 * context:
        raise NoTextError(f"{root} holds too little Python source ({files} readable .py files)")
    return Corpus(train, held_out, files)


def batch(
    stream: np.ndarray, rng: np.random.Generator, B: int, T: int
) -> tuple[np.ndarray, np.ndarray]:
    """B random pieces of a stream: (tokens, targets), both [B, T], targets one character on."""
    starts = rng.integers(0, len(stream) - T, size=B)
    pieces = stream[starts[:, None] + np.arange(T + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def snippet(stream: np.ndarray, length: int) -> np.ndarray:
    """A readable piece of a stream, codes [length]: a `def` line with few blanks in it."""
    text = decode(stream[:200_000])
    at = text.find("\n    def ")
    while at >= 0:
        piece = text[at + 1 : at + 1 + length]
        if len(piece) == length and piece.count(" ") <= length // 5 and OTHER not in piece:
            return encode(piece)
        at = text.find("\n    def ", at + 1)
    return stream[:length]
