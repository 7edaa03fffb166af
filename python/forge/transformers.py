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
from typing import Any

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

from forge._torch_tensors import boundaries
from forge._transformers_mask import EAGER, CarriedMask
from forge._transformers_runs import (
    Sizes,
    band_of,
    options_of_function,
    options_of_mask,
    within_sequences,
)
from forge.torch import attention

__all__ = ["register"]


def _check_library() -> None:
    """Hold what _mask expects, and what band_of reads out of mask functions, against the library.

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
        band = band_of(function)
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
    use_vmap: bool = False,
    **_: Any,
) -> CarriedMask:
    """Build what transformers hands to each layer in place of a mask: forge's options."""
    if attention_mask is not None and attention_mask.shape[:-1] != (batch_size,):
        raise ValueError(
            f"attention_mask must be [B, T] of ones and zeros with B = {batch_size}, got "
            f"{list(attention_mask.shape)}"
        )
    sizes = Sizes(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    options = options_of_function(mask_function, attention_mask, sizes, use_vmap)
    return CarriedMask((batch_size, q_length, kv_length), options)


def _options_of(mask: object, sizes: tuple[int, int, int, int], layer: str) -> dict[str, Any]:
    """Return forge's options for the mask of a layer of these sizes, ``[B, H, Tq, Tk]``."""
    if isinstance(mask, CarriedMask):
        options, made_for = mask.options, tuple(mask.shape)
    elif isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                f"attn_implementation='forge' cannot serve this call: {layer} was handed a mask of "
                f"{mask.dtype}; one with four axes must be bool, True being visible, or of "
                f"floating-point numbers, added to the scores; or {EAGER}"
            )
        options, made_for = {}, tuple(mask.shape)
    else:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attn_implementation='forge' cannot serve this call: {layer} was handed a mask {got} "
            f"where [B, heads, Tq, Tk] is expected; {EAGER}"
        )
    # What is carried counts positions: of its axes none but the batch may be of length 1.
    free = (0, 1) if isinstance(mask, CarriedMask) else (0, 1, 2, 3)
    if any(
        extent != full and (extent != 1 or axis not in free)
        for axis, (extent, full) in enumerate(zip(made_for, sizes, strict=True))
    ):
        raise ValueError(
            f"attn_implementation='forge' cannot serve this model: {layer} has scores "
            f"{list(sizes)}, and was handed a mask {list(made_for)}; {EAGER}"
        )
    if not isinstance(mask, CarriedMask):
        options = options_of_mask(mask)
    options = dict(options)
    for name in ("key_start", "key_end"):
        given = options.get(name)
        if given is not None and len(given) != sizes[0]:
            options[name] = given.expand(sizes[0], *given.shape[1:])
    return options


# What some models hand to their attention that forge's kernels do not know.
_UNSUPPORTED = {
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "head_mask": "head masks",
    "output_attentions": "attention weights as an output",
}


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention_dropout must be 0 in training, got {dropout}; build the model with the "
            "dropout of its attention at 0 (attention_dropout=0; BERT: "
            f"attention_probs_dropout_prob=0; GPT-2: attn_pdrop=0; T5: dropout_rate=0), or {EAGER}"
        )
    for name, what in _UNSUPPORTED.items():
        given = others.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name} must not be given, forge has no {what}; {EAGER}")


def _options_without_mask(
    is_causal: bool, window: int | None, sizes: tuple[int, int], packed: bool
) -> dict[str, Any]:
    """Return the options where a model builds no mask: causal or not, as with sdpa.

    With packed sequences it builds none because flash-attention would read all from what it gets.
    """
    Tq, Tk = sizes
    if packed:
        limit = -1 if window is None else window - 1
        return {"causal": is_causal, "window": (limit, -1 if is_causal else limit)}
    if window is not None or (is_causal and 1 < Tq != Tk):
        raise ValueError(
            f"attn_implementation='forge' cannot serve this model: it makes no mask for {Tq} "
            f"queries and {Tk} keys (window {window}); {EAGER}"
        )
    return {"causal": is_causal and Tq > 1}


def _packed_boundaries(
    sizes: tuple[int, int, int], others: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Return where packed sequences' queries and keys begin, the last end among them, if given."""
    B, Tq, Tk = sizes
    of_queries, of_keys = (others.get(f"cu_seq_lens_{of}") for of in "qk")
    if of_queries is None and of_keys is None:
        return None
    if B != 1:
        raise ValueError(
            f"cu_seq_lens_q must come with one row of sequences laid end to end, got B = {B}"
        )
    cu_q = boundaries("cu_seq_lens_q", of_keys if of_queries is None else of_queries, Tq)
    cu_k = boundaries("cu_seq_lens_k", of_queries if of_keys is None else of_keys, Tk)
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seq_lens_k must have {len(cu_q)} entries as cu_seq_lens_q has, got {len(cu_k)}"
        )
    return cu_q, cu_k


def _score_tensors(query: Tensor, bias: Tensor | None, others: dict[str, Any]) -> dict[str, Any]:
    """Return forge's ``bias`` and ``sinks`` of what the layer hands over, and of its mask."""

    def fits(x: Tensor) -> Tensor:
        return x if x.dtype in (torch.float32, query.dtype) else x.float()

    position = others.get("position_bias")
    if position is not None:
        if not isinstance(position, Tensor) or position.dim() != 4:
            raise ValueError(
                "position_bias must be a tensor [B, heads, Tq, Tk], got "
                f"{getattr(position, 'shape', type(position).__name__)}; {EAGER}"
            )
        bias = position if bias is None else position + bias
    sinks = others.get("s_aux")
    sinks = others.get("sinks") if sinks is None else sinks
    if sinks is not None and sinks.dim() == 4:  # [B, H, Tq, 1], a sink of each query's own
        sinks = sinks[..., 0]
    found = {"bias": bias, "sinks": sinks}
    return {name: fits(x) for name, x in found.items() if x is not None}


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
    _refuse(dropout, others)
    (B, H, Tq, _), Tk = query.shape, key.shape[2]
    packed = _packed_boundaries((B, Tq, Tk), others)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options = _options_without_mask(bool(causal), sliding_window, (Tq, Tk), packed is not None)
    else:
        options = _options_of(attention_mask, (B, H, Tq, Tk), type(module).__name__)
    if packed is not None:
        options = within_sequences(options, *packed, (Tq, Tk))
    options |= _score_tensors(query, options.get("bias"), others)
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
        name: the name to register under. ``"paged|eager"`` puts forge in the place of the eager
            attention that transformers takes for continuous batching (``generate_batch``).

    Raises:
        RuntimeError: this version of transformers builds masks in a way that forge cannot read.
    """
    _check_library()
    if AttentionInterface().get(name) is not _attention:
        _refuse_when_built(name)
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
