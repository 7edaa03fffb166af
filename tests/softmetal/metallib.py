"""Stands in for Apple's metallib tool: writes the library file that the software device loads.

    metallib.py forge.metal forge.metallib

The file is a line of magic and the hash of the text; the device compares it with the text it was
built from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msl

MAGIC = "softmetal library 1"


def write_metallib(text: Path, target: Path) -> None:
    target.write_text(f"{MAGIC}\n{msl.text_hash(text.read_bytes()):016x}\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_metallib(Path(sys.argv[1]), Path(sys.argv[2]))
