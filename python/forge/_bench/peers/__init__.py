"""The implementations under test. Each module prepares one library's call for a case.

A peer gets q as [B, Tq, H, hd], k as [B, Tk, Hkv, hd], v and dout likewise with hv channels, and
the options with their arrays, in NumPy, and may lay them out as it likes before the clock starts;
it computes in the case's dtype, whose values the float32 arrays hold. What it cannot do it refuses
with Unsupported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge._arrays import Array
from forge._bench.cases import Case
from forge._check.halves import DTYPES
from forge._check.plain import Inputs


class Unsupported(Exception):  # noqa: N818, an answer, not an error
    """The library has no call for this case, or is not installed; the text says which."""


@dataclass
class Runner:
    """Calls that are ready to be timed, and the way from their results to NumPy."""

    forward: Callable[[], Any]
    as_output: Callable[[Any], Array]  # [B, Tq, H, hv]
    backward: Callable[[], Any] | None = None  # the backward alone, from a forward done before
    as_gradients: Callable[[Any], tuple[Array, ...]] = (
        tuple  # case.gradients, shaped as q, k, v, bias
    )
    note: str = ""
    rounds_once: bool = False
    """Whether it promises that a half is float32's result, rounded once."""


@dataclass(frozen=True)
class Peer:
    """A library, or one way to call it."""

    name: str
    module: str  # in this package
    function: str
    packages: tuple[str, ...]  # whose versions to report
    # How long its idle threads may go on spinning after a call, in seconds: slept out, so that they
    # do not take a core from the next peer.
    linger: float
    dtypes: tuple[str, ...] = ("float32",)

    def load(self) -> Callable[[Case, Inputs, int], Runner]:
        """The function that prepares a case for so many threads. Imports the library."""
        try:
            module = importlib.import_module(f"forge._bench.peers.{self.module}")
        except ImportError as error:
            raise Unsupported(f"not installed ({error})") from error
        prepare: Callable[[Case, Inputs, int], Runner] = getattr(module, self.function)
        return prepare


PEERS = {
    peer.name: peer
    for peer in (
        Peer("forge", "forge_peer", "prepare", ("forge-attention",), 0.060, DTYPES),
        Peer("torch", "torch_peer", "prepare_packed", ("torch",), 0.030),
        Peer("torch-bhtd", "torch_peer", "prepare_own_layout", ("torch",), 0.030, DTYPES),
        Peer("torch-flex", "flex_peer", "prepare", ("torch",), 0.030),
        Peer(
            "onnxruntime",
            "onnxruntime_peer",
            "prepare",
            ("onnxruntime", "onnx"),
            0.120,
            ("float32", "float16"),
        ),
        Peer("jax", "jax_peer", "prepare", ("jax", "jaxlib"), 0.030),
        Peer("numpy", "numpy_peer", "prepare", ("numpy",), 0.120),
    )
}
