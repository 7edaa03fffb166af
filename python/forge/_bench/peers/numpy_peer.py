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
                x.reshape(case.B, case.Tq, case.Hkv, group, case.hd).transpose(0, 2, 3, 1, 4)
            ).reshape(case.B, case.Hkv, group * case.Tq, case.hd)
            for x in (inputs.q, inputs.dout)
        )
        self.k, self.v = (
            np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (inputs.k, inputs.v)
        )
        mask = case.mask()
        self.bias = None
        if mask is not None:
            bias = np.where(mask, np.float32(0), np.float32(-np.inf))
            self.bias = np.tile(bias, (group, 1))
        self.out = np.empty_like(self.q)

    def probabilities(self, b: int, head: int) -> tuple[Array, Array | None]:
        case = self.case
        scores = (self.q[b, head] * np.float32(case.scale)) @ self.k[b, head].T
        tanh = None
        if case.softcap:
            tanh = np.tanh(scores / np.float32(case.softcap))
            np.multiply(tanh, np.float32(case.softcap), out=scores)
        if self.bias is not None:
            scores += self.bias
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores, tanh

    def forward(self) -> Array:
        for b in range(self.case.B):
            for head in range(self.case.Hkv):
                p, _ = self.probabilities(b, head)
                np.matmul(p, self.v[b, head], out=self.out[b, head])
        return self.out

    def backward(self) -> tuple[Array, Array, Array]:
        """Computes the probabilities again, as a backward that keeps little memory does."""
        dq, dk, dv = np.empty_like(self.q), np.empty_like(self.k), np.empty_like(self.v)
        for b in range(self.case.B):
            for head in range(self.case.Hkv):
                p, tanh = self.probabilities(b, head)
                do = self.dout[b, head]
                np.matmul(p.T, do, out=dv[b, head])
                ds = do @ self.v[b, head].T
                ds -= (do * self.out[b, head]).sum(-1, keepdims=True)
                ds *= p
                if tanh is not None:
                    ds *= 1 - tanh * tanh
                ds *= np.float32(self.case.scale)
                np.matmul(ds, self.k[b, head], out=dq[b, head])
                np.matmul(ds.T, self.q[b, head], out=dk[b, head])
        return dq, dk, dv

    def query_layout(self, x: Array) -> Array:
        case = self.case
        heads = x.reshape(case.B, case.Hkv, case.H // case.Hkv, case.Tq, case.hd)
        rows = heads.transpose(0, 3, 1, 2, 4)
        return np.asarray(rows.reshape(case.B, case.Tq, case.H, case.hd))


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
        ),
        note="BLAS, whole score matrix",
    )
