"""What a sequence split over ranks costs: messages, bytes, and a model of the time.

Example::

    import forge.split
    problem = forge.split.Problem(T=2**20, ranks=64, H=32, Hkv=8, hd=128, itemsize=2, causal=True)
    forge.split.fewer_bytes(problem)  # "ring" or "ulysses"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge._arrays import Array, as_bool, as_int
from forge._options import Window
from forge._ring_plan import band_of, layout_name, layout_runs

__all__ = ["Machine", "Problem", "Time", "Traffic", "estimate", "fewer_bytes", "traffic"]

WAYS = ("ring", "ulysses")
_BACKWARD = 2.5  # products of matrices in the backward for each in the forward: 5 for 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Attention over a sequence that ranks hold in parts."""

    T: int
    """Rows of the whole sequence."""
    ranks: int
    H: int
    Hkv: int
    hd: int
    hv: int | None = None
    """``hd`` by default."""
    B: int = 1
    itemsize: int = 4
    """4, or 2 in half precision, the bytes of an element of q, k and v."""
    layout: str = "zigzag"
    causal: bool = False
    window: Window = None
    backward: bool = True
    """Count forward and backward, not the forward alone."""

    def __post_init__(self) -> None:
        for name, least in (("T", 0), ("ranks", 1), ("H", 1), ("Hkv", 1), ("hd", 1), ("B", 0)):
            if as_int(name, getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.hv is not None and as_int("hv", self.hv) < 1:
            raise ValueError(f"hv must be at least 1, got {self.hv}")
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize must be 2 or 4, got {self.itemsize}")
        layout_name(self.layout)
        as_bool("causal", self.causal)
        as_bool("backward", self.backward)
        band_of(self.causal, self.window)

    @property
    def widths(self) -> int:
        """The channels of a key and its value together."""
        return self.hd + (self.hd if self.hv is None else self.hv)

    def runs(self) -> list[Array]:
        """Return the rows of each rank, as (first, end)."""
        return [layout_runs(self.layout, self.T, self.ranks, r) for r in range(self.ranks)]

    def rows(self) -> Array:
        """Return how many rows each rank holds."""
        held: Array = np.array([int((run[:, 1] - run[:, 0]).sum()) for run in self.runs()])
        return held

    def pairs(self) -> Array:
        """Return how many keys of rank ``s`` the queries of rank ``r`` see, ``[r, s]``."""
        ends = np.zeros((self.ranks, 2, 2), np.int64)
        for rank, runs in enumerate(self.runs()):
            ends[rank, : len(runs)] = runs
        queries, keys = ends[:, None, :, None], ends[None, :, None, :]
        band = band_of(self.causal, self.window)
        left, right = min(band.left, self.T), min(band.right, self.T)
        seen = _below(queries, keys, right) - _below(queries, keys, -left - 1)
        pairs: Array = np.sum(seen, (2, 3))
        return pairs


def _below(queries: Array, keys: Array, shift: int) -> Array:
    """Pairs with key <= query + shift, of runs [first, end) of both."""
    width = keys[..., 1] - keys[..., 0]

    def up_to(count: Array) -> Array:  # min(1, width) + min(2, width) + ... + min(count, width)
        count = np.maximum(count, 0)
        short = np.minimum(count, width)
        pairs: Array = short * (short + 1) // 2 + (count - short) * width
        return pairs

    base = shift - keys[..., 0]
    found: Array = up_to(queries[..., 1] + base) - up_to(queries[..., 0] + base)
    return found


class Traffic(NamedTuple):
    """What ranks send in one call, the hash of its options aside."""

    messages: int
    """Of the rank that sends most bytes."""
    bytes: int
    """Likewise."""
    total_bytes: int
    """Of all ranks."""


def _way(how: object) -> str:
    if how not in WAYS:
        raise ValueError(f"how must be 'ring' or 'ulysses', got {how!r}")
    return str(how)


def traffic(problem: Problem, how: str) -> Traffic:
    """Count what ranks send: exactly, but for at most 72 bytes of frame in a message.

    Args:
        problem: sizes and options.
        how: ``"ring"`` (``ring_attention`` of ``forge.torch`` and ``forge.mpi``) or ``"ulysses"``
            (their ``ulysses_attention``).

    Raises:
        ValueError: another word, or heads that ranks cannot share out.
    """
    messages, sent = (_ring if _way(how) == "ring" else _ulysses)(problem)
    most = int(sent.argmax())
    return Traffic(int(messages[most]), int(sent[most]), int(sent.sum()))


def _ring(problem: Problem) -> tuple[Array, Array]:
    """Messages and bytes that each rank sends."""
    n, rows = problem.ranks, problem.rows()
    sees = problem.pairs() > 0
    messages, sent = np.zeros(n, np.int64), np.zeros(n, np.int64)
    elements = rows * problem.B * problem.Hkv * problem.widths
    for owner in range(n):
        readers = (owner + 1 + np.flatnonzero(np.roll(sees[:, owner], -owner)[1:])) % n
        if not len(readers):
            continue
        times = 1 + problem.backward
        for senders, count, each in (
            ([owner, *readers[:-1]], times, elements[owner] * problem.itemsize),
            (readers, int(problem.backward), elements[owner] * 4),
        ):
            messages[senders] += count
            sent[senders] += count * each
    return messages, sent


def _ulysses(problem: Problem) -> tuple[Array, Array]:
    n, rows = problem.ranks, problem.rows()
    if problem.H % n or (problem.Hkv % n and n % problem.Hkv):
        raise ValueError(
            f"how must be 'ring' where ranks cannot share out the heads, got {n} ranks with "
            f"H={problem.H} and Hkv={problem.Hkv}"
        )
    hv = problem.widths - problem.hd
    of_q, of_k = problem.H // n, max(1, problem.Hkv // n)
    others = problem.T - rows
    in_rows, in_heads = rows * (n - 1) * problem.B, others * problem.B
    sent = in_rows * (of_q * problem.hd + of_k * problem.widths) + in_heads * of_q * hv
    sent = sent * problem.itemsize
    if problem.backward:
        sums = 4 if problem.Hkv < n else problem.itemsize
        sent = sent + in_rows * of_q * hv * problem.itemsize
        sent = sent + in_heads * (
            of_q * problem.hd * problem.itemsize + of_k * problem.widths * sums
        )
    return np.full(n, (n - 1) * (2 + 2 * problem.backward)), sent


def fewer_bytes(problem: Problem) -> str:
    """Say which of the two sends fewer bytes on the rank that sends most.

    Returns:
        ``"ring"`` or ``"ulysses"``; ``"ring"`` where ranks cannot share out the heads, or both
        send the same.
    """
    try:
        other = traffic(problem, "ulysses").bytes
    except ValueError:
        return "ring"
    return "ulysses" if other < traffic(problem, "ring").bytes else "ring"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank does in a second."""

    flops: float
    """Operations of attention as measured, ``2 (hd + hv)`` for each visible pair and query head."""
    bandwidth: float
    """Bytes that it sends, while it receives as many."""
    latency: float
    """Seconds that a message takes besides."""


class Time(NamedTuple):
    """Seconds of one call, as the model has it."""

    computing: float
    """Of the ranks that compute most, block by block."""
    sending: float
    """If nothing were computed meanwhile."""
    total: float
    """Where both go on at once."""


def estimate(problem: Problem, how: str, machine: Machine) -> Time:
    """Estimate the time of a call.

    The ring goes in steps: in each all ranks read a block while the next is on its way, and a step
    takes the longer of both. The exchange of heads for rows overlaps nothing. Either begins with
    the hash of the options, which goes round all ranks.
    """
    n = problem.ranks
    each = 2.0 * problem.B * problem.H * problem.widths / machine.flops
    pairs = problem.pairs()
    hello = (n - 1) * machine.latency
    if _way(how) == "ulysses":
        found = traffic(problem, how)
        computing = pairs.sum() * each / n * (1 + _BACKWARD * problem.backward)
        sending = hello * (1 + problem.backward) + (
            found.messages * machine.latency + found.bytes / machine.bandwidth
        )
        return Time(computing, sending, computing + sending)
    ranks = np.arange(n)
    steps = np.array([pairs[ranks, (ranks - d) % n].max() for d in range(n)]) * each
    block = float(problem.rows().max()) * problem.B * problem.Hkv * problem.widths
    hops = steps > 0
    hops[0] = False  # its own block
    keys = hops * (machine.latency + block * problem.itemsize / machine.bandwidth)
    computing, sending = float(steps.sum()), hello + float(keys.sum())
    # While a block is read, the next one arrives.
    total = hello + float(np.maximum(steps, np.append(keys[1:], 0)).sum())
    if problem.backward:
        back = _BACKWARD * steps
        sums = hops * (machine.latency + block * 4 / machine.bandwidth)
        computing += float(back.sum())
        sending += hello + float(keys.sum() + sums.sum())
        # And the gradients of the one before go on, those of the last one home.
        meanwhile = np.append(keys[1:], 0) + np.append(0, sums[:-1])
        total += hello + float(np.maximum(back, meanwhile).sum()) + float(sums[-1])
    return Time(computing, sending, total)
