"""Families of decoders by name, and the model that a config means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.comm.mesh import Mesh
from mpitrain.models.decoder import Decoder
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.models.llama import Llama, LlamaConfig
from mpitrain.models.sizes import DecoderConfig

CONFIGS: Mapping[str, type[DecoderConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}
MODELS: Mapping[str, type[Decoder]] = {"gpt": GPT, "llama": Llama}


def build(config: DecoderConfig, mesh: Mesh, **how: Any) -> Decoder:
    """The model of a config; `how` as for `Decoder`."""
    return MODELS[config.family](config, mesh, **how)
