"""No instruction above the baseline outside the kernels that are chosen for it at run time.

The module is stripped, so its own code cannot be laid at a source file's door. What can be proved:
- each object file of the build holds only what its target may use, and the objects of a target hold
  no symbol that the linker could merge with one of another object (which it might keep instead);
- the module, bindings included (link-time optimization compiles them while linking), holds exactly
  the AVX2, FMA and AVX-512 instructions of the target objects: as many of each and no others.
"""

import platform
import shutil
import sys
from collections import Counter
from pathlib import Path

import forge
import pytest
from disassembly import (
    AVX2,
    AVX512,
    BASELINE,
    LEVEL_NAMES,
    highest_level,
    level,
    mergeable_symbols,
    text_section,
    vector_instructions,
)

BUILD = Path(__file__).parents[2] / "build" / "wheel"  # where `make` builds the installed package
ALLOWED = {"forge_kernels_avx2": AVX2, "forge_kernels_avx512": AVX512}


def objects():
    """Library of the build and object file, for every object file that the build still makes."""
    folder = BUILD / "CMakeFiles"
    rules = BUILD / "build.ninja"
    made = rules.read_text() if rules.exists() else None
    return [
        (library.stem, path)
        for library in sorted(folder.glob("*.dir"))
        for path in sorted(library.rglob("*.o"))
        if made is None or str(path.relative_to(BUILD)) in made
    ]


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The installed module, where its objects are at hand as well."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("about x86-64 instruction sets in ELF files")
    missing = [tool for tool in ("objdump", "objcopy", "nm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs binutils, not found: {', '.join(missing)}")
    installed = Path(forge._forge.__file__)
    built = BUILD / installed.name
    if not built.exists():
        pytest.skip(f"the objects of the installed module are not in {BUILD}")
    scratch = tmp_path_factory.mktemp("text")
    if text_section(built, scratch) != text_section(installed, scratch):
        pytest.skip(f"the installed module is another one than {built}")
    return installed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("addps  %xmm1,%xmm0", BASELINE),
        ("verw   %ax", BASELINE),
        ("bsf    %rax,%rcx", BASELINE),
        ("vaddps %xmm1,%xmm0,%xmm0", AVX2),
        ("vfmadd231ps (%rax),%ymm15,%ymm0", AVX2),
        ("vzeroupper", AVX2),
        ("shlx   %rax,%rcx,%rdx", AVX2),
        ("popcnt %eax,%eax", AVX2),
        ("vaddps %zmm1,%zmm0,%zmm0", AVX512),
        ("vaddps %ymm17,%ymm0,%ymm0", AVX512),
        ("vaddps (%rax){1to8},%ymm0,%ymm0", AVX512),
        ("vmovups (%rax),%ymm0{%k1}{z}", AVX512),
        ("kmovw  %eax,%k1", AVX512),
    ],
)
def test_instruction_sets_are_told_apart(text, expected):
    assert level(text) == expected


def test_an_object_uses_only_the_instructions_of_its_target(module):
    found = objects()
    assert {"forge_core", "forge_kernels_baseline"} <= {library for library, _ in found}
    above = [
        f"{path.relative_to(BUILD)} uses {LEVEL_NAMES[highest_level(path)]}"
        for library, path in found
        if highest_level(path) > ALLOWED.get(library, BASELINE)
    ]
    assert not above


@pytest.mark.parametrize("library", ALLOWED)
def test_a_target_uses_what_it_is_for(library, module):
    levels = [highest_level(path) for name, path in objects() if name == library]
    if not levels:
        pytest.skip(f"this build has no {library}")
    assert max(levels) == ALLOWED[library]


def test_a_target_shares_no_symbol_with_other_objects(module):
    shared = {
        str(path.relative_to(BUILD)): symbols
        for library, path in objects()
        if library in ALLOWED and (symbols := mergeable_symbols(path))
    }
    assert not shared


def test_the_module_holds_the_instructions_of_its_targets_and_no_others(module):
    expected = Counter()
    for library, path in objects():
        if library in ALLOWED:
            expected += vector_instructions(path)
    got = vector_instructions(module)
    assert got.total() > 0
    assert not got - expected, "in the module, not from a target's objects"
    assert not expected - got, "in a target's objects, not in the module"
