"""Reads x86-64 machine code with binutils; tells which instruction set an instruction needs."""

import re
import subprocess
from collections import Counter
from pathlib import Path

BASELINE, AVX2, AVX512 = 0, 1, 2
LEVEL_NAMES = ("baseline", "AVX2 or FMA", "AVX-512")

# zmm, mask and the upper 16 vector registers exist in EVEX encodings only, {1to8} too.
EVEX = re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b|\{1to\d+\}|\{r[nudz]-sae\}|\{sae\}")
# Every VEX instruction on vectors starts with v; these of its namesakes and neighbours do not fit.
NOT_VEX = {"verr", "verw", "vmcall", "vmmcall", "vmxon", "vmxoff"}
SCALAR_EXTENSIONS = re.compile(
    r"(andn|bextr|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|movbe)[lqw]?$"
)
INSTRUCTION = re.compile(
    r"^\s*[0-9a-f]+:\t(?:(?:rep|repz|repnz|lock|data16|cs|bnd|notrack) )*(\S+)"
)
ADDRESS = re.compile(r"-?(0x)?[0-9a-f]+\(%rip\)")


def level(text):
    """The instruction set that one instruction, as objdump prints it, belongs to."""
    mnemonic = text.split()[0]
    if EVEX.search(text):
        return AVX512
    if mnemonic.startswith("v") and mnemonic not in NOT_VEX:
        return AVX2
    return AVX2 if SCALAR_EXTENSIONS.fullmatch(mnemonic) else BASELINE


def command(*arguments):
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def instructions(path):
    """Mnemonic and operands of each instruction in the file."""
    for line in command("objdump", "-d", "--no-show-raw-insn", str(path)).splitlines():
        match = INSTRUCTION.match(line)
        if match:
            yield line[match.start(1) :].split(" #")[0].split("\t#")[0].strip()


def vector_instructions(path):
    """How often each instruction above the baseline occurs, but for addresses set in linking."""
    found = Counter(text for text in instructions(path) if level(text) > BASELINE)
    result = Counter()
    for text, count in found.items():
        result[ADDRESS.sub("ADDRESS(%rip)", text)] += count
    return result


def highest_level(path):
    return max((level(text) for text in set(instructions(path))), default=BASELINE)


def mergeable_symbols(path):
    """Symbols defined here of which the linker keeps one among several objects' copies."""
    lines = (line.split() for line in command("nm", str(path)).splitlines())
    return [fields[-1] for fields in lines if len(fields) == 3 and fields[1] in "WVui"]


def text_section(path, scratch):
    """The bytes of the file's code."""
    output = Path(scratch) / "text"
    command("objcopy", "-O", "binary", "--only-section=.text", str(path), str(output))
    return output.read_bytes()
