"""Blocks on their way around the ring: sent on before they are read, received while others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from forge._arrays import Array, new_array
from forge._dtypes import Element
from forge._ring_handshake import Request, Transport
from forge._ring_plan import Plan, Stop

_ALIGNED = 64
VERDICT = 8  # bytes behind gradients: which rank could not compute them, plus 1; 0: none


class Blocks(NamedTuple):
    """Keys and values, or their gradients, of one rank as one message."""

    B: int
    Hkv: int
    hd: int
    hv: int
    rows: tuple[int, ...]
    """Of each rank."""
    element: Element

    def _parts(self, owner: int) -> tuple[int, int]:
        heads = self.B * self.rows[owner] * self.Hkv * self.element.stored.itemsize
        return heads * self.hd, heads * self.hv

    def nbytes(self, owner: int) -> int:
        keys, values = self._parts(owner)
        return keys + -keys % _ALIGNED + values

    def views(self, buffer: Array, owner: int) -> tuple[Array, Array]:
        keys, values = self._parts(owner)
        start = keys + -keys % _ALIGNED
        shape = self.B, self.rows[owner], self.Hkv
        return (
            buffer[:keys].view(self.element.stored).reshape(*shape, self.hd),
            buffer[start : start + values].view(self.element.stored).reshape(*shape, self.hv),
        )


class _Sent(NamedTuple):
    request: Request
    buffer: Array
    until: int
    """At this distance its reader has asked for it for sure."""


class Travel:
    """The messages of one call on one rank.

    Every wait at a distance is for what other ranks do at smaller ones, so that no ring of ranks
    waits for itself: a buffer whose reader comes later is kept until the end.
    """

    def __init__(self, transport: Transport, plan: Plan, blocks: Blocks) -> None:
        self.transport, self.plan, self.blocks = transport, plan, blocks
        self.sent: list[_Sent] = []
        self.awaited: dict[int, tuple[Request, Array]] = {}  # by tag
        self.free: list[Array] = []
        self.failure: BaseException | None = None

    def run(
        self,
        own: Array,
        visit: Callable[[int, Array, Array | None], None],
        gradients: Blocks | None = None,
    ) -> Array | None:
        """Visit every block that this rank reads; returns the gradients of its own.

        Args:
            own: the bytes of its own block.
            visit: called with a block's owner, its bytes, and an array for the bytes of its
                gradients where these are wanted. Where it raises, the messages of other ranks are
                passed on all the same, and what it raised is raised at the end.
            gradients: how gradients lie in a message, where they are to be collected.
        """
        try:
            home = self._run(own, visit, gradients)
        except BaseException:  # a rank that is gone, for one
            self._abandon()
            raise
        if self.failure is not None:
            raise self.failure
        return home

    def _run(
        self,
        own: Array,
        visit: Callable[[int, Array, Array | None], None],
        gradients: Blocks | None,
    ) -> Array | None:
        rank = self.transport.rank
        route = self.plan.route(rank)
        last = self.plan.last_reader(rank)
        if gradients is not None and last is not None:
            self._receive(gradients.nbytes(rank) + VERDICT, last, 2 * rank + 1)
        home = None
        for stop, following in zip(route, (*route[1:], None), strict=True):
            block = own if stop.source is None else self._arrived(2 * stop.owner)
            if stop.target is not None:
                self._send(block, stop.target, 2 * stop.owner, stop.target_distance)
            self._release(stop.distance)
            if following is not None:
                self._ask_for(following, gradients)
            made = None
            if gradients is not None:
                made = self._buffer(gradients.nbytes(stop.owner) + VERDICT)
            self._visit(visit, stop.owner, block, made)
            if stop.target is None and stop.source is not None:
                self.free.append(block)
            if made is not None and stop.source is None:
                home = made
            elif made is not None:
                self._pass_on(stop, made)
        if home is not None and last is not None:
            self._add(home, self._arrived(2 * rank + 1))
        self._release(self.plan.size)
        self._judge(home)
        return home

    def _ask_for(self, stop: Stop, gradients: Blocks | None) -> None:
        assert stop.source is not None
        self._receive(self.blocks.nbytes(stop.owner), stop.source, 2 * stop.owner)
        if gradients is not None and stop.source != stop.owner:
            nbytes = gradients.nbytes(stop.owner) + VERDICT
            self._receive(nbytes, stop.source, 2 * stop.owner + 1)

    def _visit(
        self,
        visit: Callable[[int, Array, Array | None], None],
        owner: int,
        block: Array,
        made: Array | None,
    ) -> None:
        if made is not None:
            made[:] = 0
        try:
            if self.failure is None:
                visit(owner, block, None if made is None else made[:-VERDICT])
        except BaseException as error:  # raised at the end
            self.failure = error
        if made is not None and self.failure is not None:
            made[-VERDICT:].view(np.int64)[0] = self.transport.rank + 1

    def _pass_on(self, stop: Stop, made: Array) -> None:
        """Add this rank's share to what came along, and send it to the next reader, or home."""
        if stop.source != stop.owner:
            self._add(made, self._arrived(2 * stop.owner + 1))
        target, until = stop.target, stop.target_distance
        if target is None:
            target, until = stop.owner, 0
        # Not before the next block is read: it has only just been sent.
        self._send(made, target, 2 * stop.owner + 1, max(until, stop.distance) + 1)

    def _add(self, made: Array, came: Array) -> None:
        sums, more = made[:-VERDICT].view(np.float32), came[:-VERDICT].view(np.float32)
        with np.errstate(all="ignore"):
            sums += more
        verdict = came[-VERDICT:].view(np.int64)[0]
        if verdict:
            made[-VERDICT:].view(np.int64)[0] = verdict
        self.free.append(came)

    def _judge(self, home: Array | None) -> None:
        if home is not None and self.failure is None:
            failed = int(home[-VERDICT:].view(np.int64)[0])
            if failed:
                self.failure = RuntimeError(f"rank {failed - 1} could not compute its gradients")

    def _buffer(self, nbytes: int) -> Array:
        for at, buffer in enumerate(self.free):
            if len(buffer) == nbytes:
                return self.free.pop(at)
        return new_array((nbytes,), np.uint8)

    def _receive(self, nbytes: int, source: int, tag: int) -> None:
        buffer = self._buffer(nbytes)
        self.awaited[tag] = self.transport.receive(buffer, source, tag), buffer

    def _arrived(self, tag: int) -> Array:
        request, buffer = self.awaited[tag]
        request.wait()
        del self.awaited[tag]
        return buffer

    def _send(self, buffer: Array, target: int, tag: int, until: int) -> None:
        self.sent.append(_Sent(self.transport.send(buffer, target, tag), buffer, until))

    def _release(self, distance: int) -> None:
        """Wait for what must have been taken by now; its memory serves again."""
        for sent in self.sent:
            if sent.until <= distance:
                sent.request.wait()
                self.free.append(sent.buffer)
        self.sent = [sent for sent in self.sent if sent.until > distance]

    def _abandon(self) -> None:
        for request in [sent.request for sent in self.sent] + [
            request for request, _ in self.awaited.values()
        ]:
            request.abandon()
        self.sent, self.awaited = [], {}
