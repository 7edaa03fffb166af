"""Plain NumPy: whole score matrices, one BLAS call a product, the heads of a group stacked."""

from __future__ import annotations

import numpy as np

from forge._arrays import Array
from forge._bench.cases import Case
from forge._bench.peers import Runner
from forge._check.plain import Inputs


class _Attention:
    def __init__(self, case: Case, inputs: Inputs):
        self.case = case
        group = case.H // case.Hkv
        # [B, Hkv, group * Tq, hd]: the heads that share keys stand below each other.
        self.q, self.dout = (
            np.ascontiguousarray(
                x.reshape(case.B, case.Tq, case.Hkv, group, -1).transpose(0, 2, 3, 1, 4)
            ).reshape(case.B, case.Hkv, group * case.Tq, -1)
            for x in (inputs.q, inputs.dout)
        )
        self.k, self.v = (
            np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (inputs.k, inputs.v)
        )
        mask = case.mask()
        bias = None if mask is None else np.where(mask, np.float32(0), np.float32(-np.inf))
        if case.bias:
            bias = inputs.options["bias"][0] + (np.float32(0) if bias is None else bias)
        # By kv head: [group * Tq, Tk], or one for all.
        self.bias = [None] * case.Hkv
        if bias is not None:
            bias = np.broadcast_to(bias, (case.H, case.Tq, case.Tk))
            self.bias = list(bias.reshape(case.Hkv, group * case.Tq, case.Tk))
        self.sinks = None
        if case.sinks:
            sinks = np.repeat(inputs.options["sinks"], case.Tq)
            self.sinks = sinks.reshape(case.Hkv, group * case.Tq, 1)
        self.out = np.empty_like(self.dout)

    def probabilities(self, b: int, head: int) -> tuple[Array, Array | None]:
        case = self.case
        scores = (self.q[b, head] * np.float32(case.scale)) @ self.k[b, head].T
        tanh = None
        if case.softcap:
            tanh = np.tanh(scores / np.float32(case.softcap))
            np.multiply(tanh, np.float32(case.softcap), out=scores)
        bias = self.bias[head]
        if bias is not None:
            scores += bias
        largest = scores.max(-1, keepdims=True)
        if self.sinks is not None:
            largest = np.maximum(largest, self.sinks[head])
        scores -= largest
        np.exp(scores, out=scores)
        total = scores.sum(-1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[head] - largest)
        scores /= total
        return scores, tanh

    def forward(self) -> Array:
        for b in range(self.case.B):
            for head in range(self.case.Hkv):
                p, _ = self.probabilities(b, head)
                np.matmul(p, self.v[b, head], out=self.out[b, head])
        return self.out

    def backward(self) -> tuple[Array, ...]:
        """Computes the probabilities again, as a backward that keeps little memory does."""
        case = self.case
        dq, dk, dv = np.empty_like(self.q), np.empty_like(self.k), np.empty_like(self.v)
        dbias = (
            np.zeros((1, case.H, case.Tq, case.Tk), np.float32) if case.bias == "pairs" else None
        )
        for b in range(self.case.B):
            for head in range(self.case.Hkv):
                p, tanh = self.probabilities(b, head)
                do = self.dout[b, head]
                np.matmul(p.T, do, out=dv[b, head])
                ds = do @ self.v[b, head].T
                ds -= (do * self.out[b, head]).sum(-1, keepdims=True)
                ds *= p
                if dbias is not None:
                    heads = slice(head * case.H // case.Hkv, (head + 1) * case.H // case.Hkv)
                    dbias[0, heads] += ds.reshape(-1, case.Tq, case.Tk)
                if tanh is not None:
                    ds *= 1 - tanh * tanh
                ds *= np.float32(self.case.scale)
                np.matmul(ds, self.k[b, head], out=dq[b, head])
                np.matmul(ds.T, self.q[b, head], out=dk[b, head])
        return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias)

    def query_layout(self, x: Array) -> Array:
        case = self.case
        heads = x.reshape(case.B, case.Hkv, case.H // case.Hkv, case.Tq, -1)
        rows = heads.transpose(0, 3, 1, 2, 4)
        return np.asarray(rows.reshape(case.B, case.Tq, case.H, -1))


def prepare(case: Case, inputs: Inputs, threads: int = 0) -> Runner:
    del threads  # BLAS takes them from the environment
    attention = _Attention(case, inputs)
    attention.forward()
    return Runner(
        forward=attention.forward,
        as_output=attention.query_layout,
        backward=attention.backward,
        as_gradients=lambda g: (
            attention.query_layout(g[0]),
            g[1].transpose(0, 2, 1, 3),
            g[2].transpose(0, 2, 1, 3),
            *g[3:],
        ),
        note="BLAS, whole score matrix",
    )
