"""PyTorch's scaled_dot_product_attention; softcap and sinks, which it lacks, in steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.plain import Inputs


def _bias(case: Case, inputs: Inputs) -> torch.Tensor | None:
    """The mask, with the case's bias, as numbers that are added to the scores."""
    mask = case.mask()
    bias = torch.from_numpy(inputs.options["bias"]).to(_dtype(case)) if case.bias else None
    if mask is None:
        return bias
    hidden = torch.zeros(case.Tq, case.Tk, dtype=_dtype(case))
    hidden.masked_fill_(~torch.from_numpy(mask), -math.inf)
    return hidden if bias is None else bias + hidden


def _dtype(case: Case) -> torch.dtype:
    found: torch.dtype = getattr(torch, case.dtype)
    return found


def _in_steps(case: Case, inputs: Inputs) -> Callable[..., torch.Tensor]:
    bias, group = _bias(case, inputs), case.H // case.Hkv
    sinks = torch.from_numpy(inputs.options["sinks"]).to(_dtype(case)) if case.sinks else None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * case.scale
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        if bias is not None:
            scores = scores + bias
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], -1)
        return torch.softmax(scores, -1)[..., : case.Tk] @ v

    return attention


def _fused(case: Case, inputs: Inputs) -> Callable[..., torch.Tensor]:
    options: dict[str, Any] = {"enable_gqa": case.Hkv != case.H}
    if case.kept or case.packed:
        options["attn_mask"] = torch.from_numpy(case.mask())
    elif case.bias != "pairs" and (case.window or case.bias):
        options["attn_mask"] = _bias(case, inputs)
    elif not case.is_decode:
        options["is_causal"] = case.causal
    missing = case.hd - case.value_dim

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = options if bias is None else {**options, "attn_mask": bias}
        padded = pad(v, (0, missing)) if missing else v
        return scaled_dot_product_attention(q, k, padded, **given)[..., : v.shape[-1]]

    return attention


def _note(case: Case) -> str:
    if case.softcap or case.sinks:
        return "separate operations"
    if case.hv:
        return "SDPA, values padded to the keys' head dim"
    if case.kept or case.packed:
        return "SDPA with a bool mask"
    return "SDPA with a float mask" if case.window or case.bias else "SDPA"


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
    if case.bias == "pairs":
        plain.append(torch.from_numpy(inputs.options["bias"]).to(_dtype(case)))
        tracked.append(plain[-1].clone().requires_grad_())
    in_steps = case.softcap or case.sinks
    attention = _in_steps(case, inputs) if in_steps else _fused(case, inputs)
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
        as_gradients=lambda gradients: (
            *(array(x) for x in gradients[:3]),
            *(np.asarray(x.float()) for x in gradients[3:]),
        ),
        note=_note(case),
    )


def prepare_packed(case: Case, inputs: Inputs, threads: int) -> Runner:
    """On the arrays as forge gets them, viewed as [B, heads, T, hd]."""
    return _prepare(case, inputs, threads, own_layout=False)


def prepare_own_layout(case: Case, inputs: Inputs, threads: int) -> Runner:
    """On contiguous [B, heads, T, hd] arrays."""
    return _prepare(case, inputs, threads, own_layout=True)
