"""Fused numerics: arrays in, fresh arrays out, no tensor and no tape.

Each kernel passes over memory as few times as its mathematics allows, and exists twice: `reference` is NumPy that reads
like the formula, `compiled` hands the arrays to C, which was built once for each level of CPU:

    numpy        the references
    baseline     any CPU of the architecture
    x86-64-v3    AVX2, FMA, F16C
    x86-64-v4    AVX-512

The names below are what everybody calls.  Which version stands behind them is decided here and nowhere else, by
`select`, for the whole process: at import the level that the environment variable MPITRAIN_KERNELS names, or else the
best that this CPU runs.  Levels round differently, so ranks agree on one before they train.

All kernels take float16, bfloat16, float32 and float64 (the update alone no halves).  Half precision is storage only:
what a kernel gives is that of the same numbers in float32, rounded once; statistics and sums over rows stay float32.
"""

import os
from collections.abc import Iterable

from mpitrain.errors import ConfigError
from mpitrain.kernels import reference
from mpitrain.kernels.reference import (
    adamw,
    attention,
    attention_backward,
    combine,
    combine_backward,
    conv2d,
    conv2d_filters,
    conv2d_images,
    cross_entropy,
    cross_entropy_backward,
    dropout,
    erf,
    gelu_backward,
    gelu_erf,
    gelu_tanh,
    jitter,
    layer_norm,
    layer_norm_backward,
    matmul,
    max_pool2d,
    max_pool2d_backward,
    narrow,
    residual,
    residual_norm,
    residual_rms_norm,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_pack,
    rotary_unpack,
    row_sum,
    softmax,
    softmax_backward,
    sum_of_squares,
    sum_rows,
    swiglu,
    swiglu_backward,
    widen,
)

__all__ = [
    "adamw",
    "attention",
    "attention_backward",
    "combine",
    "combine_backward",
    "common",
    "conv2d",
    "conv2d_filters",
    "conv2d_images",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "erf",
    "gelu_backward",
    "gelu_erf",
    "gelu_tanh",
    "jitter",
    "layer_norm",
    "layer_norm_backward",
    "level",
    "levels",
    "matmul",
    "max_pool2d",
    "max_pool2d_backward",
    "narrow",
    "residual",
    "residual_norm",
    "residual_rms_norm",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_pack",
    "rotary_unpack",
    "row_sum",
    "select",
    "softmax",
    "softmax_backward",
    "sum_of_squares",
    "sum_rows",
    "swiglu",
    "swiglu_backward",
    "wanted",
    "widen",
]

VARIABLE = "MPITRAIN_KERNELS"
ORDER = ("numpy", "baseline", "x86-64-v3", "x86-64-v4")
"""All levels, lowest first."""

try:
    from mpitrain.kernels import compiled
except ImportError:  # installed without a C compiler
    compiled = None  # type: ignore[assignment]

_level = "numpy"
_chosen: str | None = None  # by `select`; None: as the environment has it


def levels() -> list[str]:
    """The levels that this process can use, lowest first; `numpy` is always there."""
    return ["numpy", *(compiled.levels() if compiled is not None else ())]


def level() -> str:
    """The level in use."""
    return _level


def wanted() -> str:
    """The level that was selected by hand, else the one that MPITRAIN_KERNELS names, else the highest.

    Raises:
        ConfigError: this CPU or this installation does not have it.
    """
    if _chosen is not None:
        return _chosen
    here = levels()
    name = os.environ.get(VARIABLE) or here[-1]
    if name not in here:
        way = f"Unset {VARIABLE} to take the highest." if len(here) > 1 else "`mpitrain doctor` says what to do."
        raise ConfigError(f"{VARIABLE}={name}: this CPU and this installation have {', '.join(here)}.  {way}")
    return name


def select(name: str | None) -> None:
    """Use the kernels of a level in this process from now on; its ranks agree on none above it.

    Args:
        name: one of `levels()`; None: what MPITRAIN_KERNELS names, else the highest.

    Raises:
        ConfigError: this CPU or this installation does not have it.
    """
    global _chosen
    if name is not None:
        use(name)
    _chosen = name
    if name is None:
        use(wanted())


def use(name: str) -> None:
    """As `select`, but what ranks agree on later may be another level."""
    global _level
    if name not in levels():
        raise ConfigError(f"kernels {name!r}: this CPU and this installation have {', '.join(levels())}.")
    if name != "numpy":
        compiled.use(name)
    for kernel in reference.__all__:
        fast = getattr(compiled, kernel, None) if name != "numpy" else None
        globals()[kernel] = fast or getattr(reference, kernel)
    _level = name


def common(names: Iterable[str]) -> str:
    """The lowest of the levels that ranks have: what all of them can run alike."""
    return min(names, key=ORDER.index)


try:
    use(wanted())
except ConfigError:  # said by whoever asks for `wanted` when the ranks agree: an import has nobody to tell it to
    use(levels()[-1])
