"""Fused numerics: arrays in, fresh arrays out, no tensor and no tape.

Each kernel passes over memory as few times as its mathematics allows, and exists three times: `reference` is NumPy that
reads like the formula, `cuda` launches CUDA for arrays on a GPU, `compiled` hands the arrays to C, which was built once
for each level of CPU:

    numpy        the references
    baseline     any CPU of the architecture
    x86-64-v3    AVX2, FMA, F16C
    x86-64-v4    AVX-512

The names below are what everybody calls.  Which version stands behind them is decided here and nowhere else, by
`select`, for the whole process: at import the level that the environment variable MPITRAIN_KERNELS names, or else the
best that this CPU runs.  Levels round differently, so ranks agree on one before they train.  Arrays on a GPU, once
`serve` was called, take CUDA, unless `numpy` was asked for by name: then CuPy computes the formulas of the references.

All kernels take float16, bfloat16, float32 and float64 (the update alone no halves).  Half precision is storage only:
what a kernel gives is that of the same numbers in float32, rounded once; statistics and sums over rows stay float32.
"""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.kernels import reference
from mpitrain.kernels.reference import (
    adamw,
    adamw_runs,
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
    factor,
    gelu_backward,
    gelu_erf,
    gelu_tanh,
    hash_rows,
    jitter,
    layer_norm,
    layer_norm_backward,
    linear,
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
    sgd,
    sgd_runs,
    softmax,
    softmax_backward,
    sum_of_squares,
    sum_rows,
    sums_of_squares,
    swiglu,
    swiglu_backward,
    widen,
)

__all__ = [
    "adamw",
    "adamw_runs",
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
    "factor",
    "gelu_backward",
    "gelu_erf",
    "gelu_tanh",
    "hash_rows",
    "jitter",
    "layer_norm",
    "layer_norm_backward",
    "level",
    "levels",
    "linear",
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
    "serve",
    "serves_devices",
    "sgd",
    "sgd_runs",
    "softmax",
    "softmax_backward",
    "sum_of_squares",
    "sum_rows",
    "sums_of_squares",
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
_device: Any = None  # the array module of devices, once there are some


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
    before, _chosen = _chosen, name
    try:
        use(wanted())
    except ConfigError:
        _chosen = before
        raise


def serve(xp: Any) -> None:
    """Have kernels take arrays of a device, too, from now on.

    Args:
        xp: their module, cupy; None: no longer.
    """
    global _device
    _device = xp
    use(_level)


def serves_devices() -> bool:
    """Whether arrays of a device take the kernels written for it.

    Formulas serve devices only where they were asked for: a CPU whose best level they are may stand beside a GPU.
    """
    return _device is not None and (_chosen or os.environ.get(VARIABLE)) != "numpy"


def use(name: str) -> None:
    """As `select`, but what ranks agree on later may be another level."""
    global _level
    if name not in levels():
        raise ConfigError(f"kernels {name!r}: this CPU and this installation have {', '.join(levels())}.")
    if name != "numpy":
        compiled.use(name)
    for kernel in reference.__all__:
        host = getattr(compiled, kernel, None) if name != "numpy" else None
        globals()[kernel] = _for_devices(kernel, host or getattr(reference, kernel))
    _level = name


def _for_devices(kernel: str, host: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as it is where there are devices: where its first array lives decides."""
    if not serves_devices():
        return host
    from mpitrain.kernels import cuda

    device = getattr(cuda, kernel, None)
    if device is None:
        return host
    its_array = _device.ndarray

    @functools.wraps(host)
    def either(first: Any, *others: Any, **named: Any) -> Any:
        one = first
        while isinstance(one, (list, tuple)) and one:  # kernels of several arrays, or of runs of them
            one = one[0]
        return (device if isinstance(one, its_array) else host)(first, *others, **named)

    return either


def common(names: Iterable[str]) -> str:
    """The lowest of the levels that ranks have: what all of them can run alike."""
    return min(names, key=ORDER.index)


try:
    use(wanted())
except ConfigError:  # said by whoever asks for `wanted` when the ranks agree: an import has nobody to tell it to
    use(levels()[-1])
