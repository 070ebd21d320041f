"""What a random program is made of: each public op, with two further ways to compute it.

    draw     picks inputs and static arguments for it from what the program has so far
    ours     how a program may write the call, as text; `{0}` is the first input, `{dim}` a static argument
    naive    the same in NumPy, by another route where there is one: what the forward pass is compared with, and what
             finite differences are taken of
    torch    the same in PyTorch, whose gradients are a third opinion

Static arguments are what no gradient flows to: dims, shapes, masks, integer arrays, random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


def common_dtype(dtypes: list[str], static: Mapping[str, Any]) -> np.dtype:
    return np.result_type(*dtypes)


def first_dtype(dtypes: list[str], static: Mapping[str, Any]) -> np.dtype:
    return np.dtype(dtypes[0])


@dataclass(frozen=True)
class Op:
    """One word.

    draw(grower) -> (inputs, static), or None where nothing at hand suits;
    naive(*arrays, **static) -> array or tuple; torch(torch, *tensors, **static) likewise;
    dtype: of the result, from those of its inputs that are no numbers;
    choices(*arrays, **static) -> array: which branch each element takes.  Where two points differ in it there is a kink
        between them, and no finite difference across them is taken;
    blur: a further term of the result (or a tuple of terms and None) for the estimate of rounding errors, where they
        are larger than those of the inputs: `shake(x)` has x's shape and the size of one rounding;
    shaken: which method of `Shaker` each input goes through in that estimate, where it is not the usual one;
    roundings: how often it rounds on the way from half precision to half precision; None if one of its results is made
        from another, rounded one, which may carry that error anywhere;
    weight: how often it is drawn.
    """

    name: str
    draw: Callable[..., Any]
    ours: tuple[str, ...]
    naive: Callable[..., Any]
    torch: Callable[..., Any]
    dtype: Callable[[list[str], Mapping[str, Any]], np.dtype] = common_dtype
    choices: Callable[..., Any] | None = None
    blur: str = ""
    shaken: tuple[str, ...] = ()
    roundings: int | None = 1
    weight: float = 1.0


def vocabulary() -> dict[str, Op]:
    """All words, by the name of the function in `mpitrain.autograd.ops`."""
    from fuzz import (
        words_contraction,
        words_elementwise,
        words_experts,
        words_fused,
        words_images,
        words_index,
        words_llama,
        words_questions,
        words_reduce,
        words_shape,
    )

    modules = (
        *(words_elementwise, words_reduce, words_shape, words_index, words_contraction, words_questions),
        *(words_fused, words_experts, words_images, words_llama),
    )
    words = [op for module in modules for op in module.WORDS]
    assert len({op.name for op in words}) == len(words)
    return {op.name: op for op in words}
