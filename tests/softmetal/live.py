"""Compiles a Metal text while a test runs, and runs its kernels on the software device's engine.

The device that is built into the module serves one text, the shaders'. Frameworks are given other
texts, made when they are needed: each is translated and compiled here, and kept in build/ by its
content.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "softmetal-live"

sys.path.insert(0, str(HERE))
from translate import translate  # noqa: E402

ENGINE = sorted([*HERE.glob("exec/*.cpp"), HERE / "live" / "run_kernel.cpp"])
FLAGS = [
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility-inlines-hidden", "-w"),
    *("-I", str(HERE), "-I", str(HERE / "stdlib")),
]
# See CMakeLists.txt. Less optimization than there: most kernels run once.
KERNEL_FLAGS = [
    *("-O1", "-fsigned-char", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions"),
    *(["-mavx2", "-mfma"] if platform.machine() == "x86_64" else []),
    *("-fvisibility=hidden", "-nostdlib++"),
]
EXPORT = """
extern "C" __attribute__((visibility("default"))) const softmetal::Program* live_program() {
  return &softmetal::program;
}
"""


def compiler() -> list[str] | None:
    """Return the command of a clang, 14 or later, or of zig's; None where there is none."""
    if importlib.util.find_spec("ziglang"):
        # As in cmake/zig.cmake and software_compiler.cmake: for the same C++ library, built once.
        return [sys.executable, "-m", "ziglang", "c++", "-O2", "-mcpu=baseline"]
    path = shutil.which("clang++")
    return [path] if path else None


class _Argument(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("is_memory", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that a kernel may touch, at their address."""

    address: int
    bytes: int


def _built(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile to a shared library, once for this content."""
    command = compiler()
    if command is None:
        raise RuntimeError("the live software device needs clang++ or the ziglang package")
    content = hashlib.sha256(repr((command, [*FLAGS, *flags])).encode())
    for path in [*sources, *sorted(HERE.glob("exec/*.h")), *sorted(HERE.glob("stdlib/**/*"))]:
        if path.is_file():
            content.update(path.read_bytes())
    target = CACHE / f"{name}-{content.hexdigest()[:24]}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, *FLAGS, *flags, *map(str, sources), "-o", str(made)], check=True)
        made.replace(target)
    return target


@functools.cache
def _engine() -> ctypes.CDLL:
    path = _built("engine", ENGINE, ["-O2", "-pthread"])
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # the kernels' references
    library.softmetal_run_kernel.restype = ctypes.c_char_p
    return library


@functools.cache
def library(text: str) -> Library:
    """Translate and compile a text; an MslError, or the compiler's, where it is none."""
    source = translate(text.encode(), "live.metal") + EXPORT
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.cpp"
    if not path.exists():
        path.write_text(source)
    _engine()
    return Library(_built("kernels", [path], KERNEL_FLAGS))


class Library:
    """The kernels of one text."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.live_program.restype = ctypes.c_void_p
        self._program = ctypes.c_void_p(self._library.live_program())

    def run(
        self,
        kernel: str,
        arguments: Sequence[bytes | Memory],
        threads: tuple[int, int, int],
        group: tuple[int, int, int],
        seed: int = 0,
    ) -> None:
        """Run a dispatch to its end; a RuntimeError says what the device found wrong."""
        kept, table = [], (_Argument * len(arguments))()
        for slot, argument in enumerate(arguments):
            if isinstance(argument, bytes):
                kept.append(ctypes.create_string_buffer(argument, len(argument)))
                table[slot] = _Argument(ctypes.addressof(kept[-1]), len(argument), 0)
            else:
                table[slot] = _Argument(argument.address, argument.bytes, 1)
        sizes = [(ctypes.c_uint32 * 3)(*size) for size in (threads, group)]
        failure = _engine().softmetal_run_kernel(
            self._program, kernel.encode(), table, len(arguments), *sizes, ctypes.c_uint32(seed)
        )
        if failure:
            raise RuntimeError(f"kernel {kernel}: {failure.decode()}")
