"""A causal transformer with its backward written out, in plain NumPy plus forge.

Symbols: B sequences of T characters, H query heads over Hkv key/value heads of size hd,
D = d_model, F = d_ff, V symbols.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import forge
import numpy as np

Tape = tuple[Any, ...]  # what a layer's forward keeps for its backward
TEMPERATURE = 0.8  # of generated text


@dataclass(frozen=True)
class Config:
    """Sizes, and for each layer the options its attention gets on top of `causal`."""

    V: int
    T: int = 128
    D: int = 128
    H: int = 8
    Hkv: int = 2
    F: int = 256
    layers: tuple[dict[str, Any], ...] = ({"window": 32}, {"softcap": 10.0}, {})

    @property
    def hd(self) -> int:
        """Size of one head."""
        return self.D // self.H

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight."""
        D, F, heads = self.D, self.F, self.H + 2 * self.Hkv
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.V, D)}
        for n in range(len(self.layers)):
            shapes[f"{n}.norm_attention"] = (D,)
            shapes[f"{n}.qkv"] = (D, heads * self.hd)
            shapes[f"{n}.proj"] = (self.H * self.hd, D)
            shapes[f"{n}.norm_mlp"] = (D,)
            shapes[f"{n}.up"] = (D, 2 * F)
            shapes[f"{n}.down"] = (F, D)
        return {**shapes, "norm": (D,), "head": (D, self.V)}


class Tensors:
    """Named arrays that are views of one flat vector, so that Adam is a few vector lines."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any) -> None:
        self.shapes = shapes
        self.flat = np.zeros(sum(math.prod(s) for s in shapes.values()), dtype=dtype)
        self.views: dict[str, np.ndarray] = {}
        at = 0
        for name, shape in shapes.items():
            self.views[name] = self.flat[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.views[name]

    def astype(self, dtype: Any) -> Tensors:
        """A copy in another dtype."""
        copy = Tensors(self.shapes, dtype)
        copy.flat[:] = self.flat
        return copy


def initial_weights(config: Config, rng: np.random.Generator) -> Tensors:
    """float32 weights: ones for the norms, else normal with the variance of 1 / fan-in."""
    weights = Tensors(config.shapes(), np.float32)
    for name, w in weights.views.items():
        if w.ndim == 1:
            w[:] = 1
            continue
        std = 1 / math.sqrt(w.shape[0])
        if name.endswith((".proj", ".down")):  # what is added to the residual stream
            std /= math.sqrt(2 * len(config.layers))
        std = {"embed": 0.5, "head": 0.2 * std}.get(name, std)
        w[:] = std * rng.standard_normal(w.shape)
    return weights


def rms_norm(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, Tape]:
    """Gives gain * x / rms(x) over the last axis, and its tape."""
    r = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    unit = x * r
    return unit * gain, (unit, r, gain)


def rms_norm_backward(dy: np.ndarray, tape: Tape, dgain: np.ndarray) -> np.ndarray:
    """Returns dx [.., D] and writes dgain [D]."""
    unit, r, gain = tape
    dgain[:] = np.sum(dy * unit, axis=tuple(range(dy.ndim - 1)))
    dunit = dy * gain
    return r * (dunit - unit * np.mean(dunit * unit, axis=-1, keepdims=True))


def rotate(x: np.ndarray, start: int, *, back: bool = False) -> None:
    """Rotary positions, in place: x [B, T, heads, hd] stands at positions start, start + 1, ...

    `back` turns the other way, which is the gradient of the rotation.
    """
    T, half = x.shape[1], x.shape[-1] // 2
    angle = np.arange(start, start + T)[:, None] * 1000.0 ** -(np.arange(half) / half)
    cos = np.cos(angle).astype(x.dtype)[:, None]
    sin = np.sin(-angle if back else angle).astype(x.dtype)[:, None]
    a, b = x[..., :half], x[..., half:]
    a_turned = a * cos - b * sin
    b[...] = b * cos + a * sin
    a[...] = a_turned


def matrix_backward(x: np.ndarray, dy: np.ndarray, w: np.ndarray, dw: np.ndarray) -> np.ndarray:
    """The backward of y = x @ w: writes dw, returns dx."""
    np.matmul(x.reshape(-1, x.shape[-1]).T, dy.reshape(-1, dy.shape[-1]), out=dw)
    return dy @ w.T


@dataclass
class KVCache:
    """Keys and values of all layers for `room` characters, and how many are there so far."""

    config: Config
    room: int
    length: int = 0
    arrays: np.ndarray = field(init=False)  # [layer, key or value, B = 1, room, Hkv, hd]

    def __post_init__(self) -> None:
        c = self.config
        shape = (len(c.layers), 2, 1, self.room, c.Hkv, c.hd)
        self.arrays = np.zeros(shape, np.float32)

    def append(self, n: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stores layer n's k and v after the first `length`; returns the whole past, as views."""
        end = self.length + k.shape[1]
        self.arrays[n, 0, :, self.length : end] = k
        self.arrays[n, 1, :, self.length : end] = v
        return self.arrays[n, 0, :, :end], self.arrays[n, 1, :, :end]


class CharLM:
    """The model: weights, forward, backward, and the seconds spent in attention."""

    def __init__(
        self, config: Config, weights: Tensors, kernel: str | None, backend: str | None
    ) -> None:
        self.config, self.weights = config, weights
        self.grads = Tensors(config.shapes(), weights.flat.dtype)
        self.where = {"kernel": kernel, "backend": backend}
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def options(self, n: int) -> dict[str, Any]:
        """The attention options of layer n."""
        return {"causal": True, **self.config.layers[n]}

    def split_heads(self, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of qkv [B, T, (H + 2 Hkv) * hd]: q [B, T, H, hd], k and v [B, T, Hkv, hd]."""
        H, Hkv, hd = self.config.H, self.config.Hkv, self.config.hd
        heads = qkv.reshape(*qkv.shape[:2], H + 2 * Hkv, hd)
        return heads[:, :, :H], heads[:, :, H : H + Hkv], heads[:, :, H + Hkv :]

    def attention(self, n: int, x: np.ndarray, cache: KVCache | None) -> tuple[np.ndarray, Tape]:
        """Gives x + proj(attention(norm(x))), [B, T, D], and its tape."""
        w = self.weights
        h, norm = rms_norm(x, w[f"{n}.norm_attention"])
        q, k, v = self.split_heads(h @ w[f"{n}.qkv"])
        start = cache.length if cache else 0
        rotate(q, start)
        rotate(k, start)
        options = self.options(n)
        if cache:
            # The queries are the last of the keys' positions, which is forge's default
            # alignment. No key further back than training saw: rotary positions are relative.
            k, v = cache.append(n, k, v)
            options["window"] = min(options.get("window", self.config.T), self.config.T)
        began = time.perf_counter()
        o, saved = forge.attention_forward(q, k, v, **options, **self.where)
        self.seconds["forward"] += time.perf_counter() - began
        o = o.reshape(x.shape)  # H * hd = D
        return x + o @ w[f"{n}.proj"], (h, norm, o, saved)

    def attention_backward(self, n: int, dy: np.ndarray, tape: Tape) -> np.ndarray:
        """From dy to dx, both [B, T, D]; writes the gradients of the weights on the way."""
        w, g = self.weights, self.grads
        h, norm, o, saved = tape
        do = matrix_backward(o, dy, w[f"{n}.proj"], g[f"{n}.proj"]).reshape(saved.q.shape)
        # forge writes straight into the three parts of one packed array.
        dqkv = np.empty((*h.shape[:2], w[f"{n}.qkv"].shape[1]), h.dtype)
        dq, dk, dv = self.split_heads(dqkv)
        began = time.perf_counter()
        forge.attention_backward(do, saved, dq=dq, dk=dk, dv=dv)
        self.seconds["backward"] += time.perf_counter() - began
        rotate(dq, 0, back=True)
        rotate(dk, 0, back=True)
        dh = matrix_backward(h, dqkv, w[f"{n}.qkv"], g[f"{n}.qkv"])
        return dy + rms_norm_backward(dh, norm, g[f"{n}.norm_attention"])

    def mlp(self, n: int, x: np.ndarray) -> tuple[np.ndarray, Tape]:
        """Gives x + down(SwiGLU(up(norm(x)))), [B, T, D], and its tape."""
        w = self.weights
        h, norm = rms_norm(x, w[f"{n}.norm_mlp"])
        gate, value = np.split(h @ w[f"{n}.up"], 2, axis=-1)
        sigmoid = 0.5 * np.tanh(0.5 * gate) + 0.5
        swish = gate * sigmoid
        a = swish * value
        return x + a @ w[f"{n}.down"], (h, norm, sigmoid, swish, value, a)

    def mlp_backward(self, n: int, dy: np.ndarray, tape: Tape) -> np.ndarray:
        """From dy to dx, both [B, T, D]; writes the gradients of the weights on the way."""
        w, g = self.weights, self.grads
        h, norm, sigmoid, swish, value, a = tape
        da = matrix_backward(a, dy, w[f"{n}.down"], g[f"{n}.down"])
        dup = np.empty((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
        dgate, dvalue = np.split(dup, 2, axis=-1)
        np.multiply(da, swish, out=dvalue)
        np.multiply(da * value, sigmoid + swish - swish * sigmoid, out=dgate)
        dh = matrix_backward(h, dup, w[f"{n}.up"], g[f"{n}.up"])
        return dy + rms_norm_backward(dh, norm, g[f"{n}.norm_mlp"])

    def forward(self, tokens: np.ndarray, cache: KVCache | None = None) -> tuple[np.ndarray, Tape]:
        """Logits [B, T, V] of tokens [B, T]; with a cache, tokens follow those already in it."""
        x = self.weights["embed"][tokens]
        tapes = []
        for n in range(len(self.config.layers)):
            x, attention = self.attention(n, x, cache)
            x, mlp = self.mlp(n, x)
            tapes.append((attention, mlp))
        if cache:
            cache.length += tokens.shape[1]
        h, norm = rms_norm(x, self.weights["norm"])
        return h @ self.weights["head"], (tokens, tapes, h, norm)

    def backward(self, dlogits: np.ndarray, tape: Tape) -> None:
        """Writes all of `grads` from dlogits, [B, T, V]."""
        w, g = self.weights, self.grads
        tokens, tapes, h, norm = tape
        dx = rms_norm_backward(matrix_backward(h, dlogits, w["head"], g["head"]), norm, g["norm"])
        for n in reversed(range(len(tapes))):
            attention, mlp = tapes[n]
            dx = self.attention_backward(n, self.mlp_backward(n, dx, mlp), attention)
        one_hot = np.eye(self.config.V, dtype=dx.dtype)[tokens.reshape(-1)]
        np.matmul(one_hot.T, dx.reshape(-1, self.config.D), out=g["embed"])

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross-entropy in nats a character."""
        return cross_entropy(self.forward(tokens)[0], targets)[0]

    def loss_and_grads(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """The loss; its gradient is left in `grads`."""
        logits, tape = self.forward(tokens)
        loss, dlogits = cross_entropy(logits, targets)
        self.backward(dlogits, tape)
        return loss

    def probs(self, n: int, tokens: np.ndarray) -> np.ndarray:
        """The attention probabilities of layer n over tokens [B, T]: [B, H, T, T]."""
        observed = CharLM(self.config, self.weights, "materialized", "cpu")
        _, (_, tapes, _, _) = observed.forward(tokens)
        attention_tape, _ = tapes[n]
        return attention_tape[-1].probs

    def generate(self, prompt: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
        """`length` characters after the prompt, sampled [length]."""
        cache = KVCache(self.config, len(prompt) + length)
        tokens, out = prompt[None], np.zeros(length, np.uint8)
        for i in range(length):
            logits = self.forward(tokens, cache)[0][0, -1].astype(np.float64) / TEMPERATURE
            p = np.exp(logits - logits.max())
            out[i] = rng.choice(self.config.V, p=p / p.sum())
            tokens = out[None, i : i + 1]
        return out


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """(mean loss, its gradient); logits and gradient [B, T, V], targets [B, T]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=-1, keepdims=True)
    p /= total
    at = targets[..., None].astype(np.int64)
    loss = np.mean(np.log(total) - np.take_along_axis(shifted, at, axis=-1), dtype=np.float64)
    np.put_along_axis(p, at, np.take_along_axis(p, at, axis=-1) - 1, axis=-1)
    p /= targets.size
    return float(loss), p


class Adam:
    """Adam with warm-up, cosine decay to a tenth, and clipping of the gradient's norm."""

    def __init__(self, steps: int, size: int, peak: float = 4e-3) -> None:
        self.steps, self.peak, self.done = steps, peak, 0
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)

    def rate(self) -> float:
        """The learning rate of step `done`."""
        warm_up = max(1, self.steps // 12)
        decay = 0.55 + 0.45 * math.cos(math.pi * self.done / max(1, self.steps))
        return self.peak * min(1.0, (self.done + 1) / warm_up) * decay

    def update(self, weights: np.ndarray, grads: np.ndarray) -> None:
        """One step on the flat weights."""
        beta1, beta2 = 0.9, 0.97
        rate = self.rate()
        self.done += 1
        grads = grads * min(1.0, 1.0 / (float(np.linalg.norm(grads)) + 1e-12))
        self.mean += (1 - beta1) * (grads - self.mean)
        self.square += (1 - beta2) * (grads * grads - self.square)
        mean = self.mean / (1 - beta1**self.done)
        square = self.square / (1 - beta2**self.done)
        weights -= rate * mean / (np.sqrt(square) + 1e-8)
