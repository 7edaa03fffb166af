"""Attention over a sequence split over ranks, which exchange rows for heads and back.

After the exchange a rank has all rows of some heads; the kernels do the rest (Jacobs et al. 2023,
"DeepSpeed Ulysses"). A key/value head that several ranks need goes to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forge._arrays import Array, as_input, new_array
from forge._attention import attention_backward, attention_forward
from forge._dtypes import FLOAT32, Element, as_float32, as_stored
from forge._ring_call import Call, Given
from forge._ring_handshake import Transport
from forge._ring_travel import VERDICT
from forge._saved import Saved

CALL = "ulysses_attention"


class Heads(NamedTuple):
    """Which heads a rank computes."""

    size: int
    H: int
    Hkv: int

    def queries(self, rank: int) -> slice:
        each = self.H // self.size
        return slice(rank * each, (rank + 1) * each)

    def keys(self, rank: int) -> slice:
        if self.Hkv >= self.size:
            each = self.Hkv // self.size
            return slice(rank * each, (rank + 1) * each)
        of_rank = rank * self.Hkv // self.size
        return slice(of_rank, of_rank + 1)

    @property
    def shared(self) -> bool:
        """Whether several ranks have one key/value head."""
        return self.Hkv < self.size


def check_heads(size: int, given: Given) -> None:
    """Refuse heads that ranks cannot share out.

    Raises:
        ValueError: naming both numbers, or sinks of rows.
    """
    sizes = given.sizes
    if given.options.sinks is not None and np.ndim(given.options.sinks) == 3:  # type: ignore[arg-type]
        raise ValueError("sinks must be [H] or [B, H], got [B, H, T]; ring_attention takes these")
    if sizes.H % size:
        raise ValueError(
            f"q must have a multiple of {size} heads, one for each rank, got {sizes.H}; "
            "ring_attention takes any number"
        )
    if sizes.Hkv % size and size % sizes.Hkv:
        raise ValueError(
            f"k must have a multiple or a divisor of {size} heads, the ranks, got {sizes.Hkv}; "
            "ring_attention takes any number"
        )


@dataclass(frozen=True, slots=True)
class UlyssesSaved:
    """What the forward keeps: all rows of this rank's heads."""

    call: Call
    saved: Saved


class Spec(NamedTuple):
    """An array within a message."""

    shape: tuple[int, ...]
    element: Element

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.element.stored.itemsize


def _layout(specs: list[Spec]) -> tuple[list[int], int]:
    """Where the arrays of a message begin, and its bytes."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end + -end % 8)
        end = starts[-1] + spec.nbytes
    return starts, end + -end % 8 + VERDICT


def _views(buffer: Array, specs: list[Spec]) -> list[Array]:
    starts, _ = _layout(specs)
    return [
        buffer[start : start + spec.nbytes].view(spec.element.stored).reshape(spec.shape)
        for start, spec in zip(starts, specs, strict=True)
    ]


class Exchange:
    """Every rank sends a message to every other, all at once.

    A rank that failed takes part all the same, with a word that it did: then nobody waits for it.
    """

    def __init__(self, transport: Transport, tag: int) -> None:
        self.transport, self.tag = transport, tag
        self.failure: BaseException | None = None
        self._requests: list[Any] = []

    def attempt(self, compute: Callable[[], None]) -> None:
        """Compute between two exchanges; what it raises is raised after the next one."""
        try:
            compute()
        except BaseException as error:  # raised by the exchange
            self.failure = error

    def run(
        self,
        outgoing: Callable[[int], list[Array]],
        promised: Callable[[int], list[Spec]],
        incoming: Callable[[int], list[Spec]],
    ) -> list[list[Array]]:
        """Return what each rank had for this one.

        Args:
            outgoing: the arrays for a rank, as the kernels take them; not asked after a failure.
            promised: what these look like.
            incoming: what they look like that a rank sends.
        """
        try:
            found = self._run(outgoing, promised, incoming)
        except BaseException:
            for request in self._requests:
                request.abandon()
            raise
        if self.failure is not None:
            raise self.failure
        return found

    def _run(
        self,
        outgoing: Callable[[int], list[Array]],
        promised: Callable[[int], list[Spec]],
        incoming: Callable[[int], list[Spec]],
    ) -> list[list[Array]]:
        transport = self.transport
        rank, size = transport.rank, transport.size
        buffers: dict[int, Array] = {}
        others = [(rank + d) % size for d in range(1, size)]
        for source in reversed(others):
            buffers[source] = new_array((_layout(incoming(source))[1],), np.uint8)
            self._requests.append(transport.receive(buffers[source], source, self.tag))
        for target in others:
            message = self._message(outgoing, target, promised(target))
            self._requests.append(transport.send(message, target, self.tag))
        found = [] if self.failure is not None else outgoing(rank)
        for request in self._requests:
            request.wait()
        self._requests = []
        failed = [r for r in others if buffers[r][-VERDICT:].view(np.int64)[0]]
        if failed and self.failure is None:
            self.failure = RuntimeError(f"rank {failed[0]} could not compute its part")
        return [found if r == rank else _views(buffers[r], incoming(r)) for r in range(size)]

    def _message(
        self, outgoing: Callable[[int], list[Array]], target: int, specs: list[Spec]
    ) -> Array:
        message = new_array((_layout(specs)[1],), np.uint8)
        message[-VERDICT:].view(np.int64)[0] = self.failure is not None
        if self.failure is None:
            for view, array in zip(_views(message, specs), outgoing(target), strict=True):
                view[...] = array
        return message


class _Parts:
    """The shapes of a call's parts: rows of one rank, heads of another."""

    def __init__(self, transport: Transport, call: Call) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.transport, self.given = transport, call.given
        sizes = call.given.sizes
        self.sizes, self.heads = sizes, Heads(transport.size, sizes.H, sizes.Hkv)
        self.rows = [shard.keys()[0] for shard in call.plan.shards]
        self.total = sum(map(len, self.rows))

    def queries(self, rows_of: int, width: int, element: Element) -> Spec:
        shape = self.sizes.B, len(self.rows[rows_of]), self.sizes.H // self.size, width
        return Spec(shape, element)

    def keys(self, rows_of: int, width: int, element: Element) -> Spec:
        each = max(1, self.sizes.Hkv // self.size)
        return Spec((self.sizes.B, len(self.rows[rows_of]), each, width), element)

    def whole(self, parts: list[Array]) -> Array:
        """All rows, from those of each rank."""
        first = parts[0]
        found = new_array((first.shape[0], self.total, *first.shape[2:]), first.dtype)
        for rows, part in zip(self.rows, parts, strict=True):
            found[:, rows] = part
        return found

    def exchange(self, tag: int) -> Exchange:
        return Exchange(self.transport, tag)

    def inputs(self) -> list[Array]:
        """q, k and v to heads: all rows of those that this rank computes."""
        given, sizes, heads, exchange = self.given, self.sizes, self.heads, self.exchange(0)
        q, k, v = (
            as_input(n, x).array for n, x in zip("qkv", (given.q, given.k, given.v), strict=True)
        )

        def outgoing(target: int) -> list[Array]:
            of_keys = heads.keys(target)
            return [q[:, :, heads.queries(target)], k[:, :, of_keys], v[:, :, of_keys]]

        def specs(rows_of: int) -> list[Spec]:
            return [
                self.queries(rows_of, sizes.hd, given.element),
                self.keys(rows_of, sizes.hd, given.kv_element),
                self.keys(rows_of, sizes.hv, given.kv_element),
            ]

        came = exchange.run(outgoing, lambda target: specs(self.rank), specs)
        elements = (given.element, given.kv_element, given.kv_element)
        return [
            element.show(self.whole([arrays[at] for arrays in came]))
            for at, element in enumerate(elements)
        ]


def ulysses_forward(transport: Transport, call: Call) -> tuple[Array, UlyssesSaved]:
    """Return this rank's rows of o, and what the backward needs."""
    given, parts = call.given, _Parts(transport, call)
    options, sizes, heads = given.options, given.sizes, parts.heads
    q, k, v = parts.inputs()
    found: list[Any] = []

    def compute() -> None:
        found.extend(
            attention_forward(
                q,
                k,
                v,
                causal=options.causal,
                window=options.window,
                softcap=options.softcap,
                scale=options.scale,
                sinks=_sinks_of(call, transport.rank, parts.heads),
                backend="cpu",
            )
        )

    exchange = parts.exchange(1)
    exchange.attempt(compute)
    came = exchange.run(
        lambda target: [as_input("o", found[0]).array[:, parts.rows[target]]],
        lambda target: [parts.queries(target, sizes.hv, given.element)],
        lambda source: [parts.queries(transport.rank, sizes.hv, given.element)],
    )
    out = new_array((sizes.B, sizes.Tq, sizes.H, sizes.hv), given.element.stored)
    for rank, [rows] in enumerate(came):
        out[:, :, heads.queries(rank)] = rows
    return given.element.show(out), UlyssesSaved(call, found[1])


def _sinks_of(call: Call, rank: int, heads: Heads) -> Array | None:
    sinks = call.given.options.sinks
    if sinks is None:
        return None
    array = as_input("sinks", sinks, any_strides=True)
    return array.element.show(array.array[..., heads.queries(rank)])


def ulysses_backward(
    transport: Transport, kept: UlyssesSaved, dout: object, dsinks: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv of this rank's rows; ``dsinks``, float32, gets those of its heads."""
    call, parts = kept.call, _Parts(transport, kept.call)
    given, sizes, heads, rank = call.given, call.given.sizes, parts.heads, transport.rank
    of_rows = as_input("dout", dout).array
    exchange = parts.exchange(0)
    came = exchange.run(
        lambda target: [of_rows[:, :, heads.queries(target)]],
        lambda target: [parts.queries(rank, sizes.hv, given.element)],
        lambda source: [parts.queries(source, sizes.hv, given.element)],
    )
    whole = given.element.show(parts.whole([arrays[0] for arrays in came]))
    made: list[Array] = []
    sums = FLOAT32 if heads.shared else given.kv_element

    def compute() -> None:
        of_keys: dict[str, Any] = {}
        if heads.shared:  # each of the ranks has a share, rounded once they are added
            for name, array in (("dk", kept.saved.k), ("dv", kept.saved.v)):
                of_keys[name] = np.empty(array.shape, np.float32)
        own = dsinks is not None or None
        gradients = attention_backward(whole, kept.saved, dsinks=own, **of_keys)
        made.extend(as_input("a gradient", x).array for x in gradients[:3])
        if dsinks is not None:
            dsinks[..., heads.queries(rank)] = gradients[3]

    back = parts.exchange(1)
    back.attempt(compute)

    def specs(rows_of: int) -> list[Spec]:
        return [
            parts.queries(rows_of, sizes.hd, given.element),
            parts.keys(rows_of, sizes.hd, sums),
            parts.keys(rows_of, sizes.hv, sums),
        ]

    shares = back.run(
        lambda target: [x[:, parts.rows[target]] for x in made], specs, lambda source: specs(rank)
    )
    dq = new_array((sizes.B, sizes.Tq, sizes.H, sizes.hd), given.element.stored)
    for source, (rows, _, _) in enumerate(shares):
        dq[:, :, heads.queries(source)] = rows
    dk, dv = (
        _joined([share[at] for share in shares], heads, sums, given.kv_element) for at in (1, 2)
    )
    return given.element.show(dq), dk, dv


def _joined(shares: list[Array], heads: Heads, sums: Element, element: Element) -> Array:
    """Every key/value head of this rank's rows; shares of one head are added, rank after rank."""
    B, T, _, width = shares[0].shape
    if not heads.shared:
        found = new_array((B, T, heads.Hkv, width), element.stored)
        for rank, share in enumerate(shares):
            found[:, :, heads.keys(rank)] = share
        return element.show(found)
    total = np.zeros((B, T, heads.Hkv, width), np.float32)
    with np.errstate(all="ignore"):
        for rank, share in enumerate(shares):
            total[:, :, heads.keys(rank)] += as_float32(share, sums)
    return element.show(as_stored(total, element))
