"""What carries bytes between the ranks of an MPI communicator."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from forge._arrays import Array
from forge._ring_handshake import TransportError

_TAGS = 1 << 14
"""Tags of forge's messages begin here; MPI promises tags to 32767."""
_NOBODYS_TAG = _TAGS - 1
_PAUSE = 2e-4  # seconds between two looks at what is under way

_abandoned: list[tuple[Any, Array]] = []
"""MPI may still read the memory of a message that was given up: it is never freed."""


class _Progress:
    """A thread that lets MPI work while the rank computes.

    Most implementations move long messages only inside of MPI's own calls. A look for a message
    that nobody sends is such a call.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._under_way = 0
        self._runs = False
        self._allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def begin(self) -> None:
        with self._lock:
            self._under_way += 1
            if self._allowed and not self._runs:
                self._runs = True
                threading.Thread(target=self._work, daemon=True).start()

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._under_way:
                    self._runs = False
                    return
            self._comm.Iprobe(MPI.ANY_SOURCE, _NOBODYS_TAG)
            time.sleep(_PAUSE)


class _Message:
    def __init__(self, request: Any, data: Array, peer: int, progress: _Progress) -> None:
        self._request, self._data, self._peer = request, data, peer
        self._progress = progress
        progress.begin()

    def _end(self) -> None:
        if self._request is not None:
            self._request = None
            self._progress.end()

    def wait(self) -> None:
        try:
            self._request.Wait()
        except MPI.Exception as error:
            raise TransportError(f"rank {self._peer} does not answer: {error}") from error
        finally:
            self._end()

    def abandon(self) -> None:
        if self._request is None:
            return
        if not self._request.Test():
            _abandoned.append((self._request, self._data))
        self._end()


class MpiTransport:
    """Bytes between the ranks of a communicator; arrays are sent from and into their own memory."""

    def __init__(self, comm: Any) -> None:
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, got {type(comm).__name__}")
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._progress = _Progress(comm)

    def gather(self, record: Array) -> Array:
        found = np.empty((self.size, len(record)), np.uint8)
        try:
            self._comm.Allgather(record, found)
        except MPI.Exception as error:
            raise TransportError(f"a rank does not answer: {error}") from error
        return found

    def send(self, data: Array, target: int, tag: int) -> _Message:
        return self._begin(self._comm.Isend, data, target, tag)

    def receive(self, data: Array, source: int, tag: int) -> _Message:
        return self._begin(self._comm.Irecv, data, source, tag)

    def _begin(self, how: Any, data: Array, peer: int, tag: int) -> _Message:
        try:
            request = how(data, peer, _TAGS + tag)
        except MPI.Exception as error:
            raise TransportError(f"rank {peer} does not answer: {error}") from error
        return _Message(request, data, peer, self._progress)
