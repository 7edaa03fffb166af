"""Who holds which positions of a sequence that ranks share, whose keys each sees, and their way.

The keys and values of a rank are one block. A block goes from its owner around the ring, rank after
rank, past those where no query sees one of its keys.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge._arrays import Array
from forge._options import Window, as_int_array, as_window

LAYOUTS = ("zigzag", "contiguous")
FAR = 2**61
"""Positions are below it; no limit of a window, so that sums stay within int64."""
_NOWHERE = 2**62 + 1


class Band(NamedTuple):
    """A query at p sees the keys at p - left to p + right."""

    left: int
    right: int


def band_of(causal: bool, window: Window) -> Band:
    left, right = (FAR if end < 0 else min(end, FAR) for end in as_window(window))
    return Band(left, 0 if causal else right)


def layout_name(layout: object) -> str:
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a string, got {type(layout).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'zigzag' or 'contiguous', got {layout!r}")
    return layout


class Shard:
    """The positions of a rank's rows, for each sequence as runs in ascending order."""

    def __init__(self, runs: list[Array]) -> None:
        """``runs``: ``[n, 2]`` of (first, end) for each sequence, or one for all of them."""
        self.runs = runs
        self.rows = max((int((run[:, 1] - run[:, 0]).sum()) for run in runs), default=0)

    def keys(self) -> Array:
        """Where its keys stand, ascending, ``[sequences, rows]``."""
        found = np.full((len(self.runs), self.rows), _NOWHERE)
        for keys, runs in zip(found, self.runs, strict=True):
            each = [np.arange(first, end) for first, end in runs]
            at = np.concatenate([*each, np.empty(0, np.int64)])
            keys[: len(at)] = at
        return found


def layout_runs(layout: str, total: int, size: int, rank: int) -> Array:
    """Cut ``total`` rows into equal parts, one for each rank, or two: one of either end."""
    parts = size if layout == "contiguous" else 2 * size
    held = (rank,) if layout == "contiguous" else (rank, parts - 1 - rank)
    cuts = [(part * total // parts, (part + 1) * total // parts) for part in held]
    return np.array([cut for cut in cuts if cut[0] < cut[1]], np.int64).reshape(-1, 2)


def layout_positions(layout: str, total: int, size: int, rank: int) -> Array:
    positions: Array = Shard([layout_runs(layout, total, size, rank)]).keys()[0]
    return positions


def as_positions(value: object, B: int, rows: int, name: str = "positions") -> Array:
    """Return positions as ``[B, rows]``; -1 is padding.

    Raises:
        TypeError: no ints.
        ValueError: another shape, or positions out of range.
    """
    given = as_int_array(name, value, "an int array, [T] or [B, T]")
    if isinstance(given, int) or given.shape not in ((rows,), (B, rows)):
        shape = () if isinstance(given, int) else given.shape
        raise ValueError(f"{name} must have shape {(rows,)} or {(B, rows)}, got {shape}")
    if given.size and (int(given.min()) < -1 or int(given.max()) >= FAR):
        raise ValueError(
            f"{name} must be within [-1, 2^61), got {int(given.min())} to {int(given.max())}"
        )
    return np.broadcast_to(given.astype(np.int64), (B, rows))


def key_order(positions: Array) -> Array | None:
    """The rows of each sequence by position, padding last; None: they lie so."""
    order: Array = np.argsort(np.where(positions < 0, _NOWHERE, positions), 1, kind="stable")
    return None if (order == np.arange(order.shape[1])).all() else order


def keys_at(positions: Array, order: Array | None) -> Array:
    """Where keys stand that lie in that order."""
    keys = np.where(positions < 0, _NOWHERE, positions)
    return keys if order is None else np.take_along_axis(keys, order, 1)


def shard_of(positions: Array) -> Shard:
    runs = []
    for sequence in positions:
        at = np.sort(sequence[sequence >= 0])
        breaks = np.flatnonzero(np.diff(at) != 1) + 1
        firsts = np.concatenate([[0], breaks]) if len(at) else breaks
        ends = np.concatenate([breaks, [len(at)]]) if len(at) else breaks
        runs.append(np.stack([at[firsts], at[ends - 1] + 1], 1).reshape(-1, 2).astype(np.int64))
    return Shard(runs)


def check_distinct(shards: tuple[Shard, ...]) -> None:
    """Refuse positions that two rows of a sequence have.

    Raises:
        ValueError: naming a position and the ranks.
    """
    for sequence in range(len(shards[0].runs)):
        runs = [(*run, rank) for rank, of in enumerate(shards) for run in of.runs[sequence]]
        runs.sort()
        for (_, end, rank), (first, _, other) in itertools.pairwise(runs):
            if first < end:
                raise ValueError(
                    f"positions must differ within a sequence, got {first} on ranks {rank} and "
                    f"{other}"
                )


class Stop(NamedTuple):
    """What a rank has to do with a block."""

    owner: int
    distance: int
    """How many ranks on from its owner."""
    source: int | None
    """Who sends it; None: it is the rank's own."""
    target: int | None
    """To whom it goes on; None: nobody else sees it."""
    target_distance: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The way of every block."""

    shards: tuple[Shard, ...]
    band: Band

    @property
    def size(self) -> int:
        return len(self.shards)

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int], bool]:
        return {}

    def sees(self, rank: int, owner: int) -> bool:
        """Whether a query of ``rank`` sees a key of ``owner``."""
        if (rank, owner) not in self._known:
            queries, keys = self.shards[rank].runs, self.shards[owner].runs
            self._known[rank, owner] = any(
                self._meet(*pair) for pair in zip(queries, keys, strict=True)
            )
        return self._known[rank, owner]

    def _meet(self, queries: Array, keys: Array) -> bool:
        """Whether a run of queries sees a key of a run; both ascend."""
        if not len(queries) or not len(keys):
            return False
        lo, hi = queries[:, 0] - self.band.left, queries[:, 1] - 1 + self.band.right
        run = np.searchsorted(keys[:, 1], lo, "right")  # the first that ends behind lo
        there = run < len(keys)
        return bool((keys[run[there], 0] <= hi[there]).any())

    def _reader(self, owner: int, distances: range) -> int:
        """The first of these distances at which a rank sees the owner's block, 0 for none."""
        for distance in distances:
            if self.sees((owner + distance) % self.size, owner):
                return distance
        return 0

    def next_reader(self, owner: int, distance: int) -> int:
        return self._reader(owner, range(distance + 1, self.size))

    def previous_reader(self, owner: int, distance: int) -> int:
        return self._reader(owner, range(distance - 1, 0, -1))

    def route(self, rank: int) -> tuple[Stop, ...]:
        """The blocks that a rank reads, in order; its own first."""
        stops = []
        for distance in range(self.size):
            owner = (rank - distance) % self.size
            if distance and not self.sees(rank, owner):
                continue
            source = None
            if distance:
                source = (owner + self.previous_reader(owner, distance)) % self.size
            further = self.next_reader(owner, distance)
            target = (owner + further) % self.size if further else None
            stops.append(Stop(owner, distance, source, target, further))
        return tuple(stops)

    def hops(self) -> tuple[dict[int, list[tuple[int, int]]], ...]:
        """For each distance from an owner, how its block gets there.

        The distance of the rank that sends it, and the pairs (source, target). The first has the
        ways home, by the distance of the last reader.
        """
        found: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(self.size)]
        for owner in range(self.size):
            before = 0
            for distance in range(1, self.size):
                if self.sees((owner + distance) % self.size, owner):
                    pair = (owner + before) % self.size, (owner + distance) % self.size
                    found[distance].setdefault(before, []).append(pair)
                    before = distance
            if before:
                found[0].setdefault(before, []).append(((owner + before) % self.size, owner))
        return tuple(found)

    def last_reader(self, rank: int) -> int | None:
        """Who sends the gradients of a rank's block home; None where nobody else read it."""
        distance = self.previous_reader(rank, self.size)
        return (rank + distance) % self.size if distance else None


@functools.lru_cache(maxsize=32)
def layout_plan(layout: str, total: int, size: int, band: Band) -> Plan:
    runs = (layout_runs(layout, total, size, rank) for rank in range(size))
    return Plan(tuple(Shard([run]) for run in runs), band)


def visible_runs(positions: Array, keys: Array, band: Band) -> tuple[Array, Array] | None:
    """Which of a block's keys each query sees, as first and end; None: all see all.

    Args:
        positions: of the queries, ``[sequences, Tq]``, -1 for padding.
        keys: of the block, ascending, ``[sequences, Tk]``.
        band: what is seen.
    """
    first, end = np.empty(positions.shape, np.int64), np.empty(positions.shape, np.int64)
    for sequence, (at, of) in enumerate(zip(positions, keys, strict=True)):
        first[sequence] = np.searchsorted(of, at - band.left, "left")
        end[sequence] = np.searchsorted(of, at + band.right, "right")
    padding = positions < 0
    first[padding], end[padding] = 0, 0
    if (first == 0).all() and (end == keys.shape[1]).all():
        return None
    return first, end
