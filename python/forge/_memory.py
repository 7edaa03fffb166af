"""How much memory the process can get, so that a call too large is refused before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Below this a call is not worth asking the system about.
_SMALL = 64 << 20


def check_memory(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype[Any] | Mapping[str, np.dtype[Any]],
    instead: str = "",
) -> None:
    """Refuse a call whose new arrays, all together, do not fit, before any is allocated.

    Args:
        shapes: the shape of each array by name.
        dtype: their dtype, or that of each.
        instead: what to do about it, for the message.

    Raises:
        MemoryError: saying how many bytes it takes, how many there are, and ``instead``.
    """
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    total = sum(sizes.values())
    if total <= _SMALL:
        return
    available = available_memory()
    if total > available:
        largest = max(sizes, key=lambda name: sizes[name])
        among = "" if len(sizes) == 1 else f" of {total} in all"
        hint = f"; {instead}" if instead else ""
        raise MemoryError(
            f"{largest} of shape {tuple(shapes[largest])} takes {sizes[largest]} bytes{among}, "
            f"{available} are available{hint}"
        )


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


def _cgroup_headroom(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the least that any cgroup of this process leaves, up to the root; None: no limit."""
    headrooms = []
    for folder, names in _cgroup_folders(groups, mount):
        try:
            used = int((folder / names.usage).read_text()) - _reclaimable(folder, names)
            headrooms.append(int((folder / names.limit).read_text()) - max(0, used))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, min(headrooms)) if headrooms else None


class _Names(NamedTuple):
    """What the two versions of control groups call the same things."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]  # in memory.stat


# Page cache of both lists: a page that was read twice is active, and still given back on demand,
# after it is written where it must be. Shared memory and locked pages are on neither list. What a
# group uses includes its children; so does "total_" in version 1, and everything in version 2.
_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


def _cgroup_folders(groups: Path, mount: Path) -> list[tuple[Path, _Names]]:
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mount, _V2
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", _V1
        else:
            continue
        own = root / path.strip("/")
        folders += [(at, names) for at in (own, *own.parents) if at.is_relative_to(root)]
    return folders


def _reclaimable(folder: Path, names: _Names) -> int:
    """Bytes that count as used but are given back on demand."""
    lines = (folder / "memory.stat").read_text().splitlines()
    sizes = dict(line.split() for line in lines)
    return sum(int(sizes.get(name, 0)) for name in names.reclaimable)


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
