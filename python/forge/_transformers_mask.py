"""What travels through a model of transformers in the place of a mask, up to forge's attention."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

EAGER = "use attn_implementation='eager'"

# What a model may ask of a mask that it only hands on: how large it is, of what kind, and where.
_FACTS = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.layout.__get__,
    Tensor.ndim.__get__,
    Tensor.is_cpu.__get__,
    Tensor.is_cuda.__get__,
    Tensor.is_meta.__get__,
    Tensor.is_nested.__get__,
    Tensor.is_sparse.__get__,
    Tensor.is_quantized.__get__,
    Tensor.requires_grad.__get__,
    Tensor.requires_grad.__set__,
    Tensor.is_leaf.__get__,
    Tensor.grad.__get__,
    Tensor.grad_fn.__get__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.__format__,
}
# What may be called on it, and gives the same mask again.
_SAME = {Tensor.detach, Tensor.contiguous, Tensor.clone, Tensor.cpu, Tensor.__deepcopy__}


class CarriedMask(Tensor):  # type: ignore[misc]  # without torch it is of no type
    """forge's options for one mask, behind the size of a mask ``[B, 1, Tq, Tk]``, without numbers.

    transformers hands tensors of four axes from layer to layer untouched, so this one is a tensor.
    It has no memory. A model that adds it to its scores, or does anything with it but hand it to
    its attention function, is stopped by ``__torch_function__``; whatever gets past Python, by
    ``__torch_dispatch__``.
    """

    options: dict[str, Any]

    @staticmethod
    def __new__(cls, size: tuple[int, int, int], options: dict[str, Any]) -> CarriedMask:
        B, Tq, Tk = size
        mask: CarriedMask = Tensor._make_wrapper_subclass(
            cls, (B, 1, Tq, Tk), dtype=torch.bool, device="cpu"
        )
        mask.options = options
        return mask

    def __init__(self, size: tuple[int, int, int], options: dict[str, Any]) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"CarriedMask(size={tuple(self.shape)}, options={self.options})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        mask = args[0] if args and isinstance(args[0], cls) else None
        if mask is not None and (
            func in _SAME
            or (func is Tensor.to and _only_moves(args[1:], kwargs or {}))
            or (func is Tensor.__getitem__ and _takes_all(mask, args[1]))
        ):
            return mask
        return _refuse(func)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # a reentrant checkpoint, an autograd.Function
            return cls((args[0].shape[0], *args[0].shape[2:]), args[0].options)
        return _refuse(func)


def _refuse(func: Any) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    raise ValueError(
        f"attn_implementation='forge' cannot serve this model: it uses {name} on the mask that "
        "only forge's attention reads, so it computes attention, or a mask, itself; "
        f"{EAGER}"
    )


def _only_moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of ``Tensor.to`` ask for a device at most, and not for numbers."""
    asked = (*args, *kwargs.values())
    return not any(
        isinstance(x, Tensor) or (isinstance(x, torch.dtype) and x is not torch.bool) for x in asked
    )


def _takes_all(mask: Tensor, index: Any) -> bool:
    """Whether the index is one of slices over all of their axes, as in ``[:, :, :, :Tk]``."""
    index = index if isinstance(index, tuple) else (index,)
    sizes = tuple(mask.shape)
    return len(index) <= len(sizes) and all(
        part is Ellipsis if not isinstance(part, slice) else part.indices(size) == (0, size, 1)
        for part, size in zip(index, sizes, strict=False)
    )
