"""What carries bytes between the ranks of torch.distributed."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge._arrays import Array
from forge._ring_handshake import TransportError
from forge._torch_tensors import autocast, check_score_tensor, check_tensor

_TAGS = 1 << 20
"""Tags of forge's messages begin here, away from those that programs choose."""


class _Message:
    def __init__(self, work: Any, tensor: Tensor, peer: int) -> None:
        self._work, self._tensor, self._peer = work, tensor, peer

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"rank {self._peer} does not answer: {error}") from error

    def abandon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._work.wait(timedelta(milliseconds=1))  # then gloo takes it back


class TorchTransport:
    """Bytes between the ranks of a process group."""

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "group must be of torch.distributed, which is not initialized here; call "
                "torch.distributed.init_process_group('gloo') first"
            )
        self._group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("group must have this process as a member, got one without it")

    def _global(self, rank: int) -> int:
        found: int = dist.get_global_rank(self._group, rank)
        return found

    def gather(self, record: Array) -> Array:
        found = torch.empty((self.size, len(record)), dtype=torch.uint8)
        try:
            dist.all_gather(list(found), torch.from_numpy(record), self._group)
        except RuntimeError as error:
            raise TransportError(f"a rank does not answer: {error}") from error
        gathered: Array = found.numpy()
        return gathered

    def send(self, data: Array, target: int, tag: int) -> _Message:
        return self._begin(dist.isend, data, target, tag)

    def receive(self, data: Array, source: int, tag: int) -> _Message:
        return self._begin(dist.irecv, data, source, tag)

    def _begin(self, how: Any, data: Array, peer: int, tag: int) -> _Message:
        tensor = torch.from_numpy(data)
        try:
            work = how(tensor, self._global(peer), self._group, _TAGS + tag)
        except RuntimeError as error:
            raise TransportError(f"rank {peer} does not answer: {error}") from error
        return _Message(work, tensor, peer)


def checked_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v, under torch.autocast in its dtype.

    Raises:
        TypeError: no tensors, or of a dtype that attention is not computed in.
        ValueError: tensors that are not on the CPU.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be a CPU tensor, got one on {value.device}")
    if sinks is not None:
        check_score_tensor("sinks", sinks)
    return autocast("fused", q, k, v)


def wants_gradient(*values: object) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in values
    )
