"""Ranks as threads of one process: a transport that counts, waits and fails as a test wants it.

A message moves when both its ends have asked for it, as with the strictest of real transports, and
its memory is read at the end of its way: who writes into it before is found out.
"""

import threading
import time
from collections import Counter

import numpy as np
from forge._ring_handshake import TransportError

TIMEOUT = 20.0


class Gone(Exception):  # noqa: N818  # of a rank that dies, on purpose
    pass


class _Message:
    """One end of a message."""

    def __init__(self, world, key, data):
        self.world, self.key, self.data = world, key, data
        self.done = threading.Event()
        self.given_up = False

    def wait(self):
        _, source, target, _ = self.key
        end = time.monotonic() + self.world.timeout
        while not self.done.wait(0.02):
            if time.monotonic() > end or self.world.dead & {source, target}:
                raise TransportError(f"rank {source} or {target} does not answer")
        self.world.in_flight -= {self}

    def abandon(self):
        self.given_up = True
        self.world.in_flight -= {self}


class Transport:
    def __init__(self, world, rank):
        self.world, self.rank, self.size = world, rank, world.size
        self.messages, self.bytes, self.gathered = Counter(), Counter(), 0
        self.log = []

    def gather(self, record):
        world = self.world
        self.gathered += 1
        at = self.gathered
        with world.changed:
            world.records.setdefault(at, {})[self.rank] = record.copy()
            world.changed.notify_all()
            full = world.changed.wait_for(
                lambda: len(world.records[at]) == self.size or world.dead, world.timeout
            )
            if not full or len(world.records[at]) < self.size:
                raise TransportError("a rank does not answer")
        return np.stack([world.records[at][rank] for rank in range(self.size)])

    def send(self, data, target, tag):
        kind = "gradients" if tag % 2 else "keys"
        self.messages[kind] += 1
        self.bytes[kind] += data.nbytes
        self.log.append(("send", tag))
        return self._begin("send", self.rank, target, tag, data)

    def receive(self, data, source, tag):
        self.log.append(("receive", tag))
        return self._begin("receive", source, self.rank, tag, data)

    def _begin(self, end, source, target, tag, data):
        world = self.world
        if world.dies_at.get(self.rank) == len(self.log):
            world.die(self.rank)
            raise Gone(self.rank)
        message = _Message(world, (end, source, target, tag), data)
        with world.changed:
            world.in_flight |= {message}
            other = world.waiting.pop((end == "send", source, target, tag), None)
            if other is None:
                world.waiting[(end != "send", source, target, tag)] = message
                return message
        pair = (message, other) if end == "send" else (other, message)
        if world.delay:
            threading.Timer(world.delay, _move, pair).start()
        else:
            _move(*pair)
        return message


def _move(sent, received):
    if not (sent.given_up or received.given_up):
        assert sent.data.shape == received.data.shape
        received.data[:] = sent.data
        sent.done.set()
        received.done.set()


class World:
    """``size`` ranks; ``delay``: seconds that a message takes; ``dies_at``: a rank's last step."""

    def __init__(self, size, delay=0.0, dies_at=None, timeout=TIMEOUT):
        self.size, self.delay, self.timeout = size, delay, timeout
        self.dies_at, self.dead = dies_at or {}, set()
        self.changed = threading.Condition()
        self.records, self.waiting, self.in_flight = {}, {}, set()
        self.transports = [Transport(self, rank) for rank in range(size)]

    def die(self, rank):
        with self.changed:
            self.dead |= {rank}
            self.changed.notify_all()

    def run(self, function):
        """What ``function(transport)`` returns on each rank, or what it raised."""
        results = [None] * self.size

        def work(rank):
            try:
                results[rank] = function(self.transports[rank])
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout + 40)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return results

    def results(self, function):
        """What it returns on each rank; raises what one of them raised."""
        results = self.run(function)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results
