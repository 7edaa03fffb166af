"""Which keys each query sees, of transformers' mask functions and of masks: as forge's options.

A band with padding around one run of tokens needs no look at pairs. What else there is (packed
sequences, chunks, blocks of images, prefixes, masks that are there already) comes down to one run
of keys for each query, nearly always; only what does not is carried as a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils


class Band(NamedTuple):
    """A mask function of transformers, as forge's options; -1 is no limit."""

    causal: bool = False
    left: int = -1
    right: int = -1

    def __and__(self, other: Band) -> Band:
        return Band(
            self.causal or other.causal,
            _tighter(self.left, other.left),
            _tighter(self.right, other.right),
        )


def _tighter(one: int, other: int) -> int:
    return max(one, other) if -1 in (one, other) else min(one, other)


def _captured(function: object, maker: Callable[..., Any], *arguments: Any) -> Any:
    """Return the one value that a function of ``maker`` has captured; None for other functions."""
    if getattr(function, "__code__", None) is not maker(*arguments).__code__:
        return None
    cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    return cells[0].cell_contents if len(cells) == 1 else None


def band_of(function: Any) -> Band | None:
    """Return what a mask function lets a query see; None where no band is known to say it."""
    if function is masking_utils.causal_mask_function:
        return Band(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    width = _captured(function, masking_utils.sliding_window_overlay, 1)
    if width is not None:
        return Band(left=width - 1)
    distance = _captured(function, masking_utils.sliding_window_bidirectional_overlay, 1)
    if distance is not None:
        return Band(left=distance, right=distance)
    band = Band()
    for part in _captured(function, masking_utils.and_masks) or (None,):
        of_part = None if part is None else band_of(part)
        if of_part is None:
            return None
        band &= of_part
    return band


class Sizes(NamedTuple):
    """Of a mask, and which positions its first query and its first key have."""

    B: int
    Tq: int
    Tk: int
    q_offset: int
    kv_offset: int


def options_of_function(
    function: Callable[..., Any], padding: Tensor | None, sizes: Sizes, use_vmap: bool = False
) -> dict[str, Any]:
    """Return forge's options for a mask function of transformers and the padding ``[B, T]``."""
    band, inside = band_of(function), _unpadded(padding, sizes)
    runs = None if inside is None else _runs(inside)
    if band is None or (runs is None and inside is not None):
        return _evaluated(function, padding, sizes, use_vmap)
    options: dict[str, Any] = {
        "causal": band.causal,
        "window": (band.left, band.right),
        "query_offset": sizes.q_offset - sizes.kv_offset,
    }
    if runs is not None:
        options["key_start"], options["key_end"] = runs
    return options


def _unpadded(padding: Tensor | None, sizes: Sizes) -> Tensor | None:
    """Return which keys are no padding; None: all are. Those beyond the padding's end are some."""
    if padding is None:
        return None
    inside = padding[:, sizes.kv_offset : sizes.kv_offset + sizes.Tk].to(torch.bool)
    return None if inside.shape[1] == sizes.Tk and bool(inside.all()) else inside


def _runs(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (first, one past the last) key of each row; None where a row has a gap."""
    counts = visible.sum(-1)
    if not visible.shape[-1]:
        return counts, counts
    start = visible.to(torch.uint8).argmax(-1)
    begins = visible[..., 0] + (visible[..., 1:] & ~visible[..., :-1]).sum(-1)
    return None if bool((begins > 1).any()) else (start, start + counts)


# How many pairs of a mask are looked at together: no mask of all pairs is made where runs say it.
_PAIRS = 1 << 18


def _evaluated(
    function: Callable[..., Any], padding: Tensor | None, sizes: Sizes, use_vmap: bool
) -> dict[str, Any]:
    """Return runs of keys, ``[B, Tq]``, or a mask, by asking the function about every pair."""

    def rows(first: int, end: int) -> Tensor:
        visible: Tensor = masking_utils.sdpa_mask(
            batch_size=sizes.B,
            q_length=end - first,
            kv_length=sizes.Tk,
            q_offset=sizes.q_offset + first,
            kv_offset=sizes.kv_offset,
            mask_function=function,
            attention_mask=padding,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
        )
        return visible

    together = max(1, _PAIRS // max(1, sizes.B * sizes.Tk))
    found = []
    for first in range(0, sizes.Tq, together):
        runs = _runs(rows(first, min(first + together, sizes.Tq))[:, 0])
        if runs is None:
            return {"mask": rows(0, sizes.Tq)}
        found.append(runs)
    return _as_options(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


def _as_options(start: Tensor, end: Tensor) -> dict[str, Any]:
    """Runs alone decide: with a position of 0 nothing else is counted from."""
    return {"query_offset": 0, "key_start": start, "key_end": end}


def options_of_mask(mask: Tensor) -> dict[str, Any]:
    """Return forge's options for a mask ``[B, heads, Tq, Tk]`` with axes of 1, bool or added.

    They are found once, and stay with the tensor as long as it is not written to.
    """
    if mask.requires_grad or mask.is_inference():  # whose writes are not counted
        return _read(mask)
    known = getattr(mask, "_forge_options", None)
    if known is None or known[0] != mask._version:
        known = (mask._version, _read(mask))
        mask._forge_options = known
    return dict(known[1])


def _read(mask: Tensor) -> dict[str, Any]:
    visible = mask
    if mask.dtype != torch.bool:
        visible = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min
        if mask.requires_grad or not bool((visible | hidden).all()):
            return {"bias": mask}
    runs = _runs(visible[:, 0]) if mask.shape[1] == 1 < mask.shape[3] else None
    if runs is None:
        return {"mask": visible}
    return _as_options(*(x[:, 0] if mask.shape[2] == 1 else x for x in runs))


def within_sequences(
    options: dict[str, Any], cu_q: Tensor, cu_k: Tensor, sizes: tuple[int, int]
) -> dict[str, Any]:
    """Return the options with each query's keys cut down to those of its own packed sequence.

    Args:
        options: those of the mask; a band counts from the last query and key of each sequence.
        cu_q: where the sequences' queries begin, and the last end.
        cu_k: likewise for keys.
        sizes: ``(Tq, Tk)``.
    """
    sequence = torch.searchsorted(cu_q, torch.arange(sizes[0]), right=True) - 1
    start, end = cu_k[:-1][sequence][None], cu_k[1:][sequence][None]
    options = dict(options)
    if "causal" in options:
        options["query_offset"] = (cu_k[1:] - cu_q[1:])[sequence][None]
    for name, own, nearer in (("key_start", start, torch.maximum), ("key_end", end, torch.minimum)):
        given = options.get(name)
        if given is not None:
            given = given if given.dim() == 2 else given[:, None]
            own = nearer(own, given.to(own.dtype))
        options[name] = own
    return options
