"""Functions of q, k and v that MLX differentiates once, in reverse mode, by forge's backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def once_differentiable(
    forward: Callable[..., list[mx.array]], backward: Callable[..., list[mx.array]]
) -> Any:
    """Return ``forward`` with its gradient.

    Its first result alone has one: ``backward`` takes what ``forward`` takes, the gradient of that
    result, and all results.
    """
    # Without these MLX would take the results for constants: second derivatives of zero.
    first_derivative = mx.custom_function(backward)
    first_derivative.vjp(_refuse_second_derivative)
    first_derivative.jvp(_refuse_second_derivative)
    function: Any = mx.custom_function(forward)
    function.vjp(lambda primals, douts, results: first_derivative(*primals, douts[0], *results))
    function.jvp(_refuse_forward_mode)
    function.vmap(_refuse_vmap)
    return function


def _refuse_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "forge.mlx.attention has first derivatives only, got a derivative of its gradient; where "
        "second derivatives are needed, use mx.fast.scaled_dot_product_attention"
    )


def _refuse_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "forge.mlx.attention has no forward-mode derivative, got mx.jvp; use mx.vjp or mx.grad"
    )


def _refuse_vmap(*_: Any) -> Any:
    raise ValueError(
        "forge.mlx.attention must be called outside mx.vmap; put what it would map into the batch "
        "axis"
    )
