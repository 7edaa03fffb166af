"""Check that a module built for macOS on another system has the form that a Mac's Python loads.

    check_module.py _forge.so

The linker lets every unknown name pass, as Python's own are found only when the module is loaded.
So what it looks up in any library is held to Python's names here: a symbol of Apple's that the
stubs do not list shows up among these.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import lief
from lief import MachO

LIBRARIES = {
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libobjc.A.dylib",
    "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
}
MINIMUM_MACOS = [14, 0, 0]
PYTHON_NAME = re.compile(r"__?Py[A-Z_]")

# <mach-o/nlist.h>: n_type and n_desc of a symbol.
N_STAB, N_TYPE, N_UNDF, N_EXT = 0xE0, 0x0E, 0x00, 0x01
DYNAMIC_LOOKUP_ORDINALS = {0, 0xFE}  # zig writes the first, Apple's linker the second


def brief(names: Iterable[str]) -> str:
    """Return the first few names."""
    first = sorted(names)
    return ", ".join(first[:8]) + (f" and {len(first) - 8} more" if len(first) > 8 else "")


def undefined_symbols(module: MachO.Binary) -> Iterator[tuple[str, int]]:
    """Yield each undefined symbol and the number of the library it is looked up in."""
    for symbol in module.symbols:
        kind = symbol.raw_type
        if not kind & N_STAB and kind & N_TYPE == N_UNDF and kind & N_EXT:
            yield str(symbol.name), symbol.description >> 8 & 0xFF


def form_faults(module: MachO.Binary) -> Iterator[str]:
    """Yield what is wrong with the file's header and load commands."""
    header = module.header
    if header.cpu_type != MachO.Header.CPU_TYPE.ARM64:
        yield f"it must be built for arm64, is for {header.cpu_type}"
    if header.file_type not in (MachO.Header.FILE_TYPE.BUNDLE, MachO.Header.FILE_TYPE.DYLIB):
        yield f"it must be a bundle or a dylib, is {header.file_type}"
    version = module.build_version
    if version is None or version.platform != MachO.BuildVersion.PLATFORMS.MACOS:
        yield "it must say in LC_BUILD_VERSION that it is for macOS"
    elif list(version.minos) != MINIMUM_MACOS:
        yield f"the lowest macOS must be {MINIMUM_MACOS}, is {version.minos}"
    if module.has_rpath:
        yield f"it must have no rpath, has {[str(path.path) for path in module.rpaths]}"
    loaded = {
        str(library.name)
        for library in module.libraries
        if library.command != MachO.LoadCommand.TYPE.ID_DYLIB
    }
    if loaded != LIBRARIES:
        yield f"it must load {sorted(LIBRARIES)}, loads {sorted(loaded)}"


def symbol_faults(module: MachO.Binary) -> Iterator[str]:
    """Yield what is wrong with the names it takes and gives."""
    looked_up = {
        name for name, library in undefined_symbols(module) if library in DYNAMIC_LOOKUP_ORDINALS
    }
    if not any(PYTHON_NAME.match(name) for name in looked_up):
        yield "it takes nothing from Python"
    others = sorted(name for name in looked_up if not PYTHON_NAME.match(name))
    if others:
        yield f"tests/macos/stubs must list what we use of Apple's, do not list {brief(others)}"
    exported = {str(symbol.name) for symbol in module.exported_symbols}
    ours = {name for name in exported if "forge" in name or re.search(r"\d(MTL|NS)\d", name)}
    if ours != {"_PyInit__forge"}:
        yield f"of ours it must export _PyInit__forge alone, exports {brief(ours)}"


def main() -> None:
    """Check the module that the command line names; say what was found."""
    path = Path(sys.argv[1])
    fat = MachO.parse(path)
    if fat is None or fat.size != 1:
        sys.exit(f"{path}: not a Mach-O file of one architecture")
    module = fat.at(0)
    faults = [*form_faults(module), *symbol_faults(module)]
    for fault in faults:
        print(f"{path.name}: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)
    count = sum(1 for _ in undefined_symbols(module))
    print(f"{path.name}: a module for arm64 and macOS 14, {count} symbols from outside")


if __name__ == "__main__":
    lief.logging.disable()
    main()
