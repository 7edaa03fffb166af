"""Make one self-contained text of the shaders, and a C++ source that holds it.

    flatten_shaders.py --root DIR --metal FILE [--cpp FILE --std 3.1]

Every kernel file of shaders/ comes in alphabetical order, with each `#include "..."` in the place
where it is met first. The text depends on the sources only, so its hash says which shaders it is.
"""

import argparse
import re
from pathlib import Path

INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|endif)\b")
PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
PIECE = 12_000  # bytes a string literal; compilers must take 16 KB

CPP = """// Made by cmake/flatten_shaders.py.
#include "metal/shader_source.h"

namespace forge::metal {{

// clang-format off
const char kShaderSource[] =
{literals};
// clang-format on
const unsigned kShaderLanguageVersion = ({major}u << 16) + {minor}u;

}}  // namespace forge::metal
"""


class Flattener:
    """Inlines includes, each file once; `lines` is the text so far."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._search = (root / "shaders", root / "csrc")
        self._seen: set[Path] = set()
        self.lines: list[str] = []

    def add(self, path: Path) -> None:
        """Append the file, unless it is there already."""
        if path in self._seen:
            return
        self._seen.add(path)
        name = path.relative_to(self._root).as_posix()
        self.lines.append(f'#line 1 "{name}"')
        depth = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            condition = CONDITION.match(line)
            if condition:
                depth += -1 if condition[1] == "endif" else 1
            include = INCLUDE.match(line)
            if include is None:
                self.lines.append("" if PRAGMA_ONCE.match(line) else line)
                continue
            if depth:
                # The one copy would be lost to everyone where this condition is false.
                raise SystemExit(f"{name}:{number}: an include of ours stands under a condition")
            self.add(self._find(include[1], f"{name}:{number}"))
            self.lines.append(f'#line {number + 1} "{name}"')

    def _find(self, include: str, where: str) -> Path:
        for folder in self._search:
            if (folder / include).is_file():
                return folder / include
        raise SystemExit(f'{where}: there is no "{include}" in shaders/ or csrc/')


def flatten(root: Path) -> str:
    """Return the text of all kernel files under root/shaders."""
    flattener = Flattener(root)
    for path in sorted((root / "shaders").glob("*.metal")):
        flattener.add(path)
    return "\n".join(flattener.lines) + "\n"


def as_cpp(text: str, std: str) -> str:
    """Return a C++ source that defines what csrc/metal/shader_source.h declares."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len((pieces[-1] + line).encode()) > PIECE:
            pieces.append("")
        pieces[-1] += line
    if ')msl"' in text:
        raise SystemExit('the shaders contain )msl", which ends the literals that hold them')
    major, minor = std.split(".")
    literals = "\n".join(f'R"msl({piece})msl"' for piece in pieces)
    return CPP.format(literals=literals, major=major, minor=minor)


def write_if_changed(path: Path, text: str) -> None:
    """Leave an equal file alone, so that nothing is rebuilt for it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the repository")
    parser.add_argument("--metal", type=Path, required=True, help="the text to write")
    parser.add_argument("--cpp", type=Path, help="the C++ source to write")
    parser.add_argument("--std", default="3.1", help="the Metal language version it is written in")
    args = parser.parse_args()
    text = flatten(args.root.resolve())
    write_if_changed(args.metal, text)
    if args.cpp:
        write_if_changed(args.cpp, as_cpp(text, args.std))


if __name__ == "__main__":
    main()
