"""How much memory the process can get, so that a call too large is refused before it starts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

# Below this a call is not worth asking the system about.
_SMALL = 64 << 20


def check_memory(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], instead: str = "") -> int:
    """Return the bytes of an array of that shape, or refuse it where memory will not do.

    Raises:
        MemoryError: saying how many bytes it takes, how many there are, and ``instead``.
    """
    nbytes = math.prod(int(extent) for extent in shape) * dtype.itemsize
    if nbytes > _SMALL:
        available = available_memory()
        if nbytes > available:
            hint = f"; {instead}" if instead else ""
            raise MemoryError(
                f"{name} of shape {tuple(shape)} takes {nbytes} bytes, "
                f"{available} are available{hint}"
            )
    return nbytes


def available_memory() -> int:
    """Bytes the process can still get: the least of free memory, cgroup limit and address space."""
    limits = [_physical_memory(), _cgroup_headroom(), _address_space_headroom()]
    return min(limit for limit in limits if limit is not None)


def _physical_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> int | None:
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _address_space_headroom() -> int | None:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, soft - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError):
        return None
