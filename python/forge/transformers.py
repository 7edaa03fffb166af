"""forge's attention for Hugging Face transformers.

import forge.transformers
forge.transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="forge")

Models in float32, bfloat16 and float16, and float32 ones under torch.autocast, on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import torch
    from torch import Tensor
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedModel,
        masking_utils,
    )
except ImportError as error:
    raise ImportError(
        "forge.transformers needs PyTorch and transformers with its AttentionMaskInterface: "
        "pip install torch transformers, or pip install '.[transformers]' in a checkout of forge"
    ) from error

from forge._transformers_mask import EAGER, CarriedMask
from forge.torch import attention

__all__ = ["register"]


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
            f"are made without {', '.join(sorted(needed - set(known)))}; {EAGER}"
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
            f"{getattr(function, '__qualname__', function)}; {EAGER}"
        )


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _key_ranges(
    padding: Tensor | None, kv_length: int, kv_offset: int
) -> list[tuple[int, int]] | None:
    """Return (first, one past the last) unpadded key of each sequence; None: all of them."""
    if padding is None:
        return None
    inside = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    length = inside.shape[1]
    counts = inside.sum(1).tolist()
    if length == kv_length and all(count == length for count in counts):
        return None
    # Keys beyond the mask are padding too, as in transformers' own masks.
    starts = inside.to(torch.uint8).argmax(1).tolist() if length else [0] * len(counts)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if not bool(inside[b, start : start + count].all()):
            raise ValueError(
                "attention_mask must have its zeros left and right of one run of ones, got zeros "
                f"between ones in sequence {b}; where a prompt is padded on the right, generate "
                "from one padded on the left (tokenizer.padding_side = 'left'); a prefix before "
                f"padding, or any other gap, forge cannot serve: {EAGER}"
            )
    return [
        (start, start + count) if count else (0, 0)
        for start, count in zip(starts, counts, strict=True)
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads the padding's values
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
) -> CarriedMask:
    """Build what transformers hands to each layer in place of a mask: forge's options.

    Raises:
        ValueError: packed sequences, chunked or blockwise masks, padding between tokens.
    """
    band = _band_of(mask_function)
    if band is None:
        raise ValueError(
            "the mask must be causal, sliding-window or bidirectional with padding, got "
            "another (packed sequences by position_ids, chunks, blocks of images, a function of "
            f"your own); pad the batch instead of packing it, or {EAGER}"
        )
    if attention_mask is not None and attention_mask.shape[:-1] != (batch_size,):
        raise ValueError(
            f"attention_mask must be [B, T] of ones and zeros with B = {batch_size}, got "
            f"{list(attention_mask.shape)}"
        )
    options: dict[str, Any] = {
        "causal": band.causal,
        "window": (band.left, band.right),
        "query_offset": int(q_offset) - kv_offset,
    }
    ranges = _key_ranges(attention_mask, kv_length, kv_offset)
    if ranges is not None:
        options["key_start"], options["key_end"] = torch.tensor(ranges).unbind(1)
    return CarriedMask((batch_size, q_length, kv_length), options)


def _options_of(mask: Tensor, B: int, Tq: int, Tk: int, layer: str) -> dict[str, Any]:
    """Return forge's options for a mask made by _mask, in a layer of these sizes."""
    if not isinstance(mask, CarriedMask):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attn_implementation='forge' cannot serve this call: {layer} was handed a mask {got} "
            "that transformers' mask functions did not make for forge; the model builds its mask "
            f"itself, or was given one that is not [B, T] of ones and zeros; {EAGER}"
        )
    made_for = (mask.shape[0], *mask.shape[2:])
    if made_for not in ((B, Tq, Tk), (1, Tq, Tk)):
        raise ValueError(
            f"attn_implementation='forge' cannot serve this model: {layer} has {B} sequences of "
            f"{Tq} queries and {Tk} keys, and was handed a mask for {made_for[0]} of "
            f"{made_for[1]} and {made_for[2]}; {EAGER}"
        )
    options = mask.options
    if made_for[0] == B or "key_start" not in options:
        return options
    return {**options, **{name: options[name].expand(B) for name in ("key_start", "key_end")}}


# What some models hand to their attention that forge's kernels do not know.
_UNSUPPORTED = {
    "position_bias": "biases on the scores",
    "relative_position_bias": "biases on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "head_mask": "head masks",
    "output_attentions": "attention weights as an output",
}


def _refuse(value: Tensor, query: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention_dropout must be 0 in training, got {dropout}; build the model with the "
            "dropout of its attention at 0 (attention_dropout=0; BERT: "
            f"attention_probs_dropout_prob=0; GPT-2: attn_pdrop=0), or {EAGER}"
        )
    for name, what in _UNSUPPORTED.items():
        given = others.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name} must not be given, forge has no {what}; {EAGER}")
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):  # eager attention does not look at them
        if others.get(name) is not None:
            raise ValueError(
                f"{name} must not be given, forge has no packed sequences; pad the batch instead "
                "of packing it"
            )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value must have the head size of query, got {value.shape[-1]} and "
            f"{query.shape[-1]}; {EAGER}"
        )


def _options_without_mask(is_causal: bool, window: int | None, Tq: int, Tk: int) -> dict[str, Any]:
    """Return the options where a model builds no mask: causal or not, as with sdpa."""
    if window is not None or (is_causal and 1 < Tq != Tk):
        raise ValueError(
            f"attn_implementation='forge' cannot serve this model: it makes no mask for {Tq} "
            f"queries and {Tk} keys (window {window}); {EAGER}"
        )
    return {"causal": is_causal and Tq > 1}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads options off the mask
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
        layer = type(module).__name__
        options = _options_of(attention_mask, query.shape[0], Tq, Tk, layer)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, scale=scaling, softcap=softcap, **options), None


def _own_attention(model: type[PreTrainedModel]) -> bool:
    """Whether a model's class has attention of its own, out of reach of attention functions.

    transformers knows it of a class by its flag, or finds it in its module. Where it cannot look,
    as in a notebook, the bases decide. A table of attention classes has none for forge.
    """
    parts: list[Any] = [part for part in model.__mro__ if issubclass(part, PreTrainedModel)][:-1]
    for part in parts:
        values = vars(sys.modules.get(part.__module__, object)).values()
        if any(isinstance(x, dict) and isinstance(x.get("eager"), type) for x in values):
            return True
    # A class that asks for an attention function may have a base of which it cannot be seen.
    return not any(
        part._supports_attention_backend or part._can_set_attn_implementation() for part in parts
    )


def _refuse_when_built(name: str) -> None:
    """Make models that would never call forge's function say so when they are built or switched."""
    known = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(known)
    def checked(self: Any, requested_attention: str | None, *rest: Any, **options: Any) -> Any:
        if requested_attention == name and _own_attention(type(self)):
            raise ValueError(
                f"attn_implementation={name!r} cannot serve {type(self).__name__}: it computes "
                f"attention itself and never calls forge's; {EAGER}"
            )
        return known(self, requested_attention, *rest, **options)

    PreTrainedModel.get_correct_attn_implementation = checked


def register(name: str = "forge") -> None:
    """Make ``attn_implementation="forge"`` known to transformers. Calling it again does no harm.

    Args:
        name: the name to register under.

    Raises:
        RuntimeError: this version of transformers builds masks in a way that forge cannot read.
    """
    _check_library()
    if AttentionInterface().get(name) is not _attention:
        _refuse_when_built(name)
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
