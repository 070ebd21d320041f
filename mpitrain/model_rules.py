"""What must go together in a model: its sizes with each other, and with what its family has.

check_model     refuses sizes that do not divide, and options of another family
rope_scaling    the words of --rope-scaling as numbers
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError
from mpitrain.options import show

if TYPE_CHECKING:
    from mpitrain.config import Config

OF_LLAMA = ("rope_theta", "rope_scaling")
"""Options of rotary positions."""


def check_model(config: Config) -> None:
    """Refuse sizes of a model that do not fit each other or its family.

    Raises:
        ConfigError: names the options, and what to try.
    """
    width, heads = config.width, config.heads
    if width % heads:
        raise ConfigError(
            f"--width {width} is not divisible by --heads {heads}: all heads must have the same size.  "
            f"Try --width {_near_width(config)}{_or_kv_heads(config)}."
        )
    if config.kv_heads is not None and heads % config.kv_heads:
        raise ConfigError(
            f"--heads {heads} is not divisible by --kv-heads {config.kv_heads}: every head of keys and values serves "
            f"as many heads of queries.  Try --kv-heads {_near_kv_heads(heads, config.kv_heads)}."
        )
    _check_family(config)


def _near_width(config: Config) -> int:
    """The nearest width that heads divide evenly; those of a llama have an even number of elements."""
    unit = config.heads * (2 if config.family == "llama" else 1)
    return max(unit, round(config.width / unit) * unit)


def _or_kv_heads(config: Config) -> str:
    """What else must change for as many heads, if anything must."""
    if config.kv_heads is None or config.heads % config.kv_heads == 0:
        return ""
    return f" --kv-heads {_near_kv_heads(config.heads, config.kv_heads)}"


def _near_kv_heads(heads: int, asked: int) -> int:
    """The most heads of keys and values, not more than asked for, that divide the heads."""
    return next(number for number in range(min(heads, asked), 0, -1) if heads % number == 0)


def _check_family(config: Config) -> None:
    """Refuse what the family of the model has not."""
    if config.family == "llama":
        if config.gelu != "tanh":
            raise ConfigError(f"--gelu {config.gelu} is for a gpt: the MLPs of --model {config.model} have a SiLU.")
        if config.experts is not None:
            raise ConfigError(
                f"--experts {config.experts} and --model {config.model}: experts are MLPs with a GELU and stand in the"
                " blocks of a gpt only."
            )
        if config.width // config.heads % 2:
            raise ConfigError(
                f"--width {config.width} in --heads {config.heads}: rotary positions turn pairs of elements, so each"
                f" head needs an even number of them.  Try --width {_near_width(config)}."
            )
        if config.rope_scaling is not None:
            rope_scaling(config.rope_scaling)
        return
    for name in OF_LLAMA:
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {show(value)} is for a llama: positions of --model {config.model} are"
                " learned."
            )


def rope_scaling(text: str) -> dict[str, Any]:
    """What `--rope-scaling` says, as `mpitrain.nn.rotary.Scaling` takes it.

    Raises:
        ConfigError: it says no such thing.
    """
    kind, _, rest = text.partition(":")
    names = {"linear": ("factor",), "llama3": ("factor", "low", "high", "original")}.get(kind, ())
    try:
        numbers = [float(word) for word in rest.split(",")]
    except ValueError:
        numbers = []
    sound = len(numbers) == len(names) > 0 and all(math.isfinite(x) and x > 0 for x in numbers) and numbers[0] >= 1
    if not sound or (kind == "llama3" and not numbers[1] < numbers[2]):
        raise ConfigError(
            f"--rope-scaling {show(text)}: must be linear:FACTOR or llama3:FACTOR,LOW,HIGH,LENGTH, as"
            " llama3:32,1,4,8192: numbers above 0, FACTOR at least 1, LOW below HIGH."
        )
    return {"kind": kind, **dict(zip(names, numbers, strict=True))}
