"""What a forward call keeps for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge._arrays import IN_PLACE, Array, split_heads
from forge._dtypes import FLOAT32, Element, element_of, read_as_stored
from forge._options import Sizes

if TYPE_CHECKING:
    from forge._forge import Options


ALL_IN_PLACE = {"q": IN_PLACE, "k": IN_PLACE, "v": IN_PLACE}


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of one forward call, checked: q, k, v with heads split, and its options."""

    element: Element
    """Of q."""
    kv_element: Element
    """Of k and v."""
    q: Array
    k: Array
    v: Array
    ndim: int
    sizes: Sizes
    options: Options
    kernel: str
    given: dict[str, Array]
    """The caller's own arrays, where a copy is read."""
    arrays: dict[str, str]
    """What became of them, for last_run()."""
    scores: dict[str, Array] = field(default_factory=dict)
    """Of bias, mask and sinks those that were given, as the compiled module takes them."""
    score_elements: dict[str, Element] = field(default_factory=dict)

    def query_shape(self) -> tuple[int, ...]:
        sizes = self.sizes
        if self.ndim == 4:
            return sizes.B, sizes.Tq, sizes.H, sizes.hd
        return sizes.B, sizes.Tq, sizes.H * sizes.hd

    def key_shape(self) -> tuple[int, ...]:
        sizes = self.sizes
        if self.ndim == 4:
            return sizes.B, sizes.Tk, sizes.Hkv, sizes.hd
        return sizes.B, sizes.Tk, sizes.Hkv * sizes.hd

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of o and dout."""
        sizes = self.sizes
        if self.ndim == 4:
            return sizes.B, sizes.Tq, sizes.H, sizes.hv
        return sizes.B, sizes.Tq, sizes.H * sizes.hv

    def value_shape(self) -> tuple[int, ...]:
        sizes = self.sizes
        if self.ndim == 4:
            return sizes.B, sizes.Tk, sizes.Hkv, sizes.hv
        return sizes.B, sizes.Tk, sizes.Hkv * sizes.hv

    def row_shape(self) -> tuple[int, int, int]:
        return self.sizes.B, self.sizes.H, self.sizes.Tq


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """What a forward call keeps for its backward.

    References to q, k, v and out, the row statistics and the options. Arrays are not copied: do not
    write into them before the backward.
    """

    _call: Call
    out: Array
    """``o``, in the rank of q; float32 where q is of half precision."""
    row_max: Array
    """``m``, the maximum of each row's visible scores, and of its sink; ``[B, H, Tq]``; -inf for a
    dead row without one."""
    row_sum: Array
    """``l``, the sum of ``exp(s - m)`` over the visible keys and the sink; ``[B, H, Tq]``; 0 for a
    dead row without one."""
    _probs: Array | None
    backend: str
    """The backend that ran, and that the backward will run on."""

    @property
    def kernel(self) -> str:
        """The kernel family that was asked for, ``"fused"`` or ``"materialized"``."""
        return self._call.kernel

    @property
    def lse(self) -> Array:
        """Log-sum-exp of the visible scores, the sink among them, natural log; ``[B, H, Tq]``.

        -inf for a dead row.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            lse: Array = self.row_max + np.log(self.row_sum)
        return lse

    @property
    def probs(self) -> Array:
        """``p``, ``[B, H, Tq, Tk]``; only from ``kernel="materialized"``.

        Raises:
            ValueError: the forward ran with another kernel.
        """
        if self._probs is None:
            raise ValueError(
                f"probs must come from a forward with kernel='materialized', "
                f"got kernel={self.kernel!r}"
            )
        return self._probs

    @property
    def q(self) -> Array:
        """The queries the forward read, in the rank they came in."""
        return self._call.element.show(self._call.q.reshape(self._call.query_shape()))

    @property
    def k(self) -> Array:
        """The keys the forward read, in the rank they came in."""
        return self._call.kv_element.show(self._call.k.reshape(self._call.key_shape()))

    @property
    def v(self) -> Array:
        """The values the forward read, in the rank they came in."""
        return self._call.kv_element.show(self._call.v.reshape(self._call.value_shape()))

    def _arrays(self) -> dict[str, Array]:
        """Return what the backward reads besides q, k, v and dout, by name."""
        arrays = {"out": self.out, "row_max": self.row_max, "row_sum": self.row_sum}
        if self._probs is not None:
            arrays["probs"] = self._probs
        return arrays

    def __repr__(self) -> str:
        sizes = self._call.sizes
        return (
            f"Saved(kernel={self.kernel!r}, backend={self.backend!r}, B={sizes.B}, Tq={sizes.Tq}, "
            f"Tk={sizes.Tk}, H={sizes.H}, Hkv={sizes.Hkv}, hd={sizes.hd}, hv={sizes.hv})"
        )


class Kept(NamedTuple):
    """What a framework kept of a forward's results."""

    out: Array
    row_max: Array
    row_sum: Array
    probs: Array | None = None


def _plain_element(array: Array) -> Element:
    """Return the type of an array that the compiled module has taken as it is."""
    if array.dtype == np.float32:
        return FLOAT32
    element = element_of(array.dtype)
    assert element is not None
    return element


def saved_plainly(q: Array, k: Array, v: Array, plain: tuple[Any, ...]) -> tuple[Array, Saved]:
    """Return what attention_forward does, from the compiled module's own forward call."""
    o, exact, row_max, row_sum, options, extents = plain
    sizes = Sizes(*extents)
    element, kv_element = _plain_element(q), _plain_element(k)
    call = Call(
        element=element,
        kv_element=kv_element,
        q=split_heads(read_as_stored(q, element), sizes.H),
        k=split_heads(read_as_stored(k, kv_element), sizes.Hkv),
        v=split_heads(read_as_stored(v, kv_element), sizes.Hkv),
        ndim=q.ndim,
        sizes=sizes,
        options=options,
        kernel="fused",
        given={"q": q, "k": k, "v": v},
        arrays=ALL_IN_PLACE,
    )
    return o, Saved(call, exact, row_max, row_sum, None, "cpu")
