"""forge's attention for Hugging Face transformers.

import forge.transformers
forge.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="forge", dtype="float32")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as error:
    raise ImportError(
        "forge.transformers needs PyTorch and transformers with its AttentionMaskInterface: "
        "pip install torch transformers, or pip install '.[transformers]' in a checkout of forge"
    ) from error

from forge.torch import attention

__all__ = ["register"]

_INSTEAD = "use attn_implementation='sdpa' or 'eager'"

# A mask travels through the model as an int64 tensor [B, 1, 1, fields]: transformers hands tensors
# of four axes on untouched. No mask of a user's starts with this number.
_MARK = 0x666F726765


class _Keys(NamedTuple):
    """Which keys a sequence's queries see, in the order of the fields of a mask tensor."""

    mark: int
    query_offset: int
    key_start: int
    key_end: int
    causal: int
    left: int
    right: int
    Tq: int
    Tk: int


class _Band(NamedTuple):
    """A mask function of transformers, as forge's options; -1 is no limit."""

    causal: bool = False
    left: int = -1
    right: int = -1

    def __and__(self, other: _Band) -> _Band:
        return _Band(
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


def _band_of(function: Any) -> _Band | None:
    """Return what a mask function lets a query see; None where no band says it."""
    if function is masking_utils.causal_mask_function:
        return _Band(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Band()
    width = _captured(function, masking_utils.sliding_window_overlay, 1)
    if width is not None:
        return _Band(left=width - 1)
    distance = _captured(function, masking_utils.sliding_window_bidirectional_overlay, 1)
    if distance is not None:
        return _Band(left=distance, right=distance)
    band = _Band()
    for part in _captured(function, masking_utils.and_masks) or (None,):
        of_part = None if part is None else _band_of(part)
        if of_part is None:
            return None
        band &= of_part
    return band


def _check_library() -> None:
    """Hold what _mask expects, and what _band_of reads out of mask functions, against the library.

    Raises:
        RuntimeError: the installed transformers builds its masks in another way.
    """
    known = inspect.signature(masking_utils.sdpa_mask).parameters
    needed = set(inspect.signature(_mask).parameters) - {"_"}
    if not needed <= set(known):
        raise RuntimeError(
            f"forge.transformers needs transformers 5.24 or later, got {_version()}, whose masks "
            f"are made without {', '.join(sorted(needed - set(known)))}; {_INSTEAD}"
        )
    position = torch.arange(8)
    i, j = position[:, None], position[None, :]
    functions = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_bidirectional_mask_function(3),
    )
    for function in functions:
        band = _band_of(function)
        if band is not None:
            seen = torch.ones(8, 8, dtype=torch.bool)
            seen &= (j <= i) | (not band.causal)
            seen &= (i - j <= band.left) | (band.left < 0)
            seen &= (j - i <= band.right) | (band.right < 0)
            if torch.equal(seen, function(0, 0, i, j).expand(8, 8)):
                continue
        raise RuntimeError(
            f"forge.transformers cannot read the masks of transformers {_version()}: "
            f"{getattr(function, '__qualname__', function)}; {_INSTEAD}"
        )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _key_ranges(padding: Tensor | None, kv_length: int, kv_offset: int) -> list[tuple[int, int]]:
    """Return (first, one past the last) unpadded key of each sequence; [(0, Tk)] for all alike."""
    if padding is None:
        return [(0, kv_length)]
    inside = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    length = inside.shape[1]
    counts = inside.sum(1).tolist()
    if length == kv_length and all(count == length for count in counts):
        return [(0, kv_length)]
    # Keys beyond the mask are padding too, as in transformers' own masks.
    starts = inside.to(torch.uint8).argmax(1).tolist() if length else [0] * len(counts)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if not bool(inside[b, start : start + count].all()):
            raise ValueError(
                "attention_mask must have its zeros left and right of one run of ones, got zeros "
                f"between ones in sequence {b}; to generate, pad on the left "
                f"(tokenizer.padding_side = 'left'), or {_INSTEAD}"
            )
    return [
        (start, start + count) if count else (0, 0)
        for start, count in zip(starts, counts, strict=True)
    ]


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Build what transformers hands to each layer in place of a mask: a few numbers a sequence.

    Raises:
        ValueError: packed sequences, chunked or blockwise masks, padding between tokens.
    """
    band = _band_of(mask_function)
    if band is None:
        raise ValueError(
            "the mask must be causal, sliding-window or bidirectional with padding, got "
            "another (packed sequences by position_ids, chunks, blocks of images, a function of "
            f"your own); pad the batch instead of packing it, or {_INSTEAD}"
        )
    rows = [
        _Keys(
            mark=_MARK,
            query_offset=int(q_offset) - kv_offset,
            key_start=start,
            key_end=end,
            causal=int(band.causal),
            left=band.left,
            right=band.right,
            Tq=q_length,
            Tk=kv_length,
        )
        for start, end in _key_ranges(attention_mask, kv_length, kv_offset)
    ]
    return torch.tensor(rows).expand(batch_size, -1)[:, None, None, :]


def _options_of(mask: Tensor, Tq: int, Tk: int) -> dict[str, Any]:
    """Return forge's options for a mask tensor made by _mask."""
    fields = len(_Keys._fields)
    if not isinstance(mask, Tensor) or mask.shape[1:] != (1, 1, fields):
        raise ValueError(
            "attention_mask must be [B, T] of ones and zeros, got "
            f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}; "
            f"forge takes no masks of four axes: {_INSTEAD}"
        )
    rows = [_Keys(*row) for row in (mask[:1] if mask.stride(0) == 0 else mask)[:, 0, 0].tolist()]
    first = rows[0]
    if first.mark != _MARK:
        raise ValueError(f"attention_mask must be [B, T] of ones and zeros, got {mask}; {_INSTEAD}")
    if (first.Tq, first.Tk) != (Tq, Tk):
        raise ValueError(
            f"attention_mask must be made for {Tq} queries and {Tk} keys, got one for "
            f"{first.Tq} and {first.Tk}; {_INSTEAD}"
        )
    options: dict[str, Any] = {
        "causal": bool(first.causal),
        "window": (first.left, first.right),
        "query_offset": first.query_offset,
    }
    if any((row.key_start, row.key_end) != (0, Tk) for row in rows):
        ranges = torch.tensor([(row.key_start, row.key_end) for row in rows])
        options["key_start"], options["key_end"] = ranges.expand(len(mask), 2).unbind(1)
    return options


# What some models hand to their attention that forge's kernels do not know.
_UNSUPPORTED = {
    "position_bias": "biases on the scores",
    "relative_position_bias": "biases on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "head_mask": "head masks",
    "output_attentions": "attention weights as an output",
}


def _refuse(value: Tensor, query: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention_dropout must be 0 in training, got {dropout}; build the model with the "
            "dropout of its attention at 0 (attention_dropout=0; BERT: "
            f"attention_probs_dropout_prob=0; GPT-2: attn_pdrop=0), or {_INSTEAD}"
        )
    for name, what in _UNSUPPORTED.items():
        given = others.get(name)
        if given is not None and given is not False:
            instead = "use attn_implementation='eager'" if name == "output_attentions" else _INSTEAD
            raise ValueError(f"{name} must not be given, forge has no {what}; {instead}")
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value must have the head size of query, got {value.shape[-1]} and "
            f"{query.shape[-1]}; {_INSTEAD}"
        )


def _options_without_mask(is_causal: bool, window: int | None, Tq: int, Tk: int) -> dict[str, Any]:
    """Return the options where a model builds no mask: causal or not, as with sdpa."""
    if window is not None or (is_causal and 1 < Tq != Tk):
        raise ValueError(
            f"attention_mask must be made by transformers' mask functions, got None for {Tq} "
            f"queries and {Tk} keys (window {window}); {_INSTEAD}"
        )
    return {"causal": is_causal and Tq > 1}


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, in transformers' words; tensors are ``[B, heads, T, hd]``."""
    _refuse(value, query, dropout, others)
    Tq, Tk = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = _options_without_mask(bool(causal), sliding_window, Tq, Tk)
    else:
        options = _options_of(attention_mask, Tq, Tk)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, scale=scaling, softcap=softcap, **options), None


def register(name: str = "forge") -> None:
    """Make ``attn_implementation="forge"`` known to transformers. Calling it again does no harm.

    Args:
        name: the name to register under.

    Raises:
        RuntimeError: this version of transformers builds masks in a way that forge cannot read.
    """
    _check_library()
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
