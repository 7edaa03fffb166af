"""PyTorch's scaled_dot_product_attention; softcap, which it lacks, as separate operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.plain import Inputs


def _bias(case: Case) -> torch.Tensor | None:
    mask = case.mask()
    if mask is None:
        return None
    bias = torch.zeros(case.Tq, case.Tk, dtype=_dtype(case))
    return bias.masked_fill_(~torch.from_numpy(mask), -math.inf)


def _dtype(case: Case) -> torch.dtype:
    found: torch.dtype = getattr(torch, case.dtype)
    return found


def _with_softcap(case: Case, softcap: float) -> Callable[..., torch.Tensor]:
    bias, group = _bias(case), case.H // case.Hkv

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        scores = torch.tanh((q @ k.transpose(-1, -2)) * (case.scale / softcap)) * softcap
        if bias is not None:
            scores = scores + bias
        return torch.softmax(scores, -1) @ v

    return attention


def _fused(case: Case) -> Callable[..., torch.Tensor]:
    options: dict[str, Any] = {"enable_gqa": case.Hkv != case.H}
    if case.window:
        options["attn_mask"] = _bias(case)
    elif not case.is_decode:
        options["is_causal"] = case.causal
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def _note(case: Case) -> str:
    if case.softcap:
        return "separate operations"
    return "SDPA with a float mask" if case.window else "SDPA"


def _prepare(case: Case, inputs: Inputs, threads: int, own_layout: bool) -> Runner:
    torch.set_num_threads(threads)

    def tensor(x: Array) -> torch.Tensor:
        # [B, heads, T, hd], a view
        heads = torch.from_numpy(x).to(_dtype(case)).transpose(1, 2)
        return heads.contiguous() if own_layout else heads

    def array(x: torch.Tensor) -> Array:
        return np.asarray(x.detach().float().transpose(1, 2))

    plain = [tensor(x) for x in (inputs.q, inputs.k, inputs.v)]
    tracked = [x.detach().clone(memory_format=torch.preserve_format) for x in plain]
    tracked = [x.requires_grad_() for x in tracked]
    dout = tensor(inputs.dout)
    attention = _with_softcap(case, case.softcap) if case.softcap else _fused(case)
    graph: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*plain)

    def backward() -> tuple[torch.Tensor, ...]:
        if not graph:
            graph.append(attention(*tracked))
        return tuple(torch.autograd.grad(graph[0], tracked, dout, retain_graph=True))

    return Runner(
        forward=forward,
        as_output=array,
        backward=backward,
        as_gradients=lambda gradients: tuple(array(x) for x in gradients),
        note=_note(case),
    )


def prepare_packed(case: Case, inputs: Inputs, threads: int) -> Runner:
    """On the arrays as forge gets them, viewed as [B, heads, T, hd]."""
    return _prepare(case, inputs, threads, own_layout=False)


def prepare_own_layout(case: Case, inputs: Inputs, threads: int) -> Runner:
    """On contiguous [B, heads, T, hd] arrays."""
    return _prepare(case, inputs, threads, own_layout=True)
