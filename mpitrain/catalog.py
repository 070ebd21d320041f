"""The models that have a name: their family and their sizes.

A size that a model does not name is the family's usual one.  `gpt` and `llama` stand for a model of any sizes, as one
that was brought from elsewhere.

Source: Radford et al. 2019 (GPT-2), table 2; Touvron et al. 2023, arXiv:2307.09288, section 2.2 and table 1;
Grattafiori et al. 2024, arXiv:2407.21783, table 3; Zhang et al. 2024, "TinyLlama", arXiv:2401.02385, table 2.  Sizes of
llama3.2-1b are those of its published settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = ("layers", "width", "heads", "seq_len")
"""Sizes that every model names."""
OF_MODEL = (*SIZES, "kv_heads", "hidden", "norm_eps", "rope_theta", "rope_scaling")
"""Options whose value is the model's where none is given."""

_MINI = {"layers": 2, "width": 128, "heads": 4, "seq_len": 64}

GPTS: Mapping[str, Mapping[str, Any]] = {
    "gpt-tiny": {"layers": 2, "width": 32, "heads": 2, "seq_len": 32},
    "gpt-mini": _MINI,
    "gpt-small": {"layers": 6, "width": 384, "heads": 6, "seq_len": 256},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "seq_len": 1024},
    "gpt2-medium": {"layers": 24, "width": 1024, "heads": 16, "seq_len": 1024},
    "gpt2-large": {"layers": 36, "width": 1280, "heads": 20, "seq_len": 1024},
    "gpt2-xl": {"layers": 48, "width": 1600, "heads": 25, "seq_len": 1024},
    "gpt": _MINI,
}
"""GPT-2's architecture."""

LLAMAS: Mapping[str, Mapping[str, Any]] = {
    "llama-tiny": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "seq_len": 32},
    "llama-mini": {**_MINI, "kv_heads": 2},
    "llama-small": {"layers": 6, "width": 384, "heads": 6, "kv_heads": 2, "seq_len": 256},
    "tinyllama-1.1b": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "hidden": 5632, "seq_len": 2048},
    "llama2-7b": {"layers": 32, "width": 4096, "heads": 32, "hidden": 11008, "seq_len": 4096},
    "llama3-8b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 14336,
        "seq_len": 8192,
        "rope_theta": 500000.0,
    },
    "llama3.2-1b": {
        "layers": 16,
        "width": 2048,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 8192,
        "seq_len": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3:32,1,4,8192",
    },
    "llama": _MINI,
}
"""Llama's."""

MODELS: Mapping[str, Mapping[str, Any]] = {**GPTS, **LLAMAS}
"""Models by name, and what they name of `OF_MODEL`."""


def family_of(model: str) -> str:
    """The family of a model, by its name."""
    return "llama" if model in LLAMAS else "gpt"
