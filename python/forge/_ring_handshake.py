"""How ranks find out, before the first block moves, that they make the same call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from forge._arrays import Array

_OWN = 4
_WORDS = 2048  # bytes, for what is sent where the ranks differ


class Request(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when its memory is free again; TransportError where that will never be."""

    def abandon(self) -> None:
        """Give it up: its memory is not touched any more. Raises nothing."""


class Transport(Protocol):
    """What carries bytes between ranks."""

    rank: int
    size: int

    def gather(self, record: Array) -> Array:
        """Return the records of all ranks, ``[size, len(record)]``, bytes."""

    def send(self, data: Array, target: int, tag: int) -> Request:
        """Begin to send bytes."""

    def receive(self, data: Array, source: int, tag: int) -> Request:
        """Begin to fill an array with the bytes that ``source`` sends under ``tag``."""


class TransportError(RuntimeError):
    """A rank that does not answer."""


Given = TypeVar("Given")


def agree(
    transport: Transport,
    build: Callable[[], tuple[Given, dict[str, Any], list[int]]],
) -> tuple[Given, list[list[int]]]:
    """Check that all ranks make one call; every rank raises where they do not.

    A hash of what must be equal goes to all ranks, and where hashes differ what they stand for.

    Args:
        transport: between the ranks.
        build: checks this rank's arguments and returns them, what must be equal on all ranks by
            its name, and up to four numbers that every rank is to know. It may raise.

    Returns:
        What ``build`` returned, and the numbers of every rank.

    Raises:
        ValueError: naming what differs, or the rank that refused its arguments and why.
        TransportError: a rank does not answer.
    """
    refusal: Exception | None = None
    built: list[Given] = []
    own: list[int] = []
    try:
        given, same, own = build()
        built.append(given)
    except Exception as error:
        refusal = error
        same = {"error": f"{type(error).__name__}: {error}"}
    text = json.dumps(same).encode()
    head = np.zeros(2 + _OWN, np.int64)
    head[:2] = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), np.int64)
    head[2 : 2 + len(own)] = own
    heads = transport.gather(head.view(np.uint8)).view(np.int64)
    if (heads[:, :2] != head[:2]).any():
        words = json.dumps(_shortened(same)).encode()
        record = np.zeros(_WORDS, np.uint8)
        record[: len(words)] = np.frombuffer(words, np.uint8)
        texts = transport.gather(record)
        of_ranks = [json.loads(bytes(each).rstrip(b"\0")) for each in texts]
        raise refusal if refusal is not None else ValueError(_difference(of_ranks))
    if refusal is not None:
        raise refusal
    return built[0], heads[:, 2:].tolist()


def _shortened(same: dict[str, Any]) -> dict[str, Any]:
    """What fits the record: a message of any length is cut."""
    if "error" in same:
        return {"error": same["error"].encode("ascii", "replace").decode()[: _WORDS // 4]}
    return same


def _difference(of_ranks: list[dict[str, Any]]) -> str:
    refused = [rank for rank, same in enumerate(of_ranks) if "error" in same]
    if refused:
        return f"rank {refused[0]} refused its arguments: {of_ranks[refused[0]]['error']}"
    differing = []
    for name in of_ranks[0]:
        ranks: dict[str, list[int]] = {}
        for rank, same in enumerate(of_ranks):
            ranks.setdefault(str(same.get(name)), []).append(rank)
        if len(ranks) > 1:
            got = [f"{value} on {_ranks(of)}" for value, of in ranks.items()]
            differing.append(f"{name} must be the same on all ranks, got {' and '.join(got)}")
        if name == "call" and differing:  # what else differs follows from it
            break
    return "; ".join(differing)


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def digest(array: Array | None) -> str:
    """A short word for an array's values."""
    if array is None:
        return "None"
    raw = np.ascontiguousarray(array)
    values = hashlib.blake2b(raw.view(np.uint8).tobytes(), digest_size=8).hexdigest()
    return f"shape {raw.shape} with values {values}"
