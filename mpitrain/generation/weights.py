"""From a checkpoint to a model that writes: any layout, whatever layout has saved it, and weights only.

The settings in a checkpoint say which model it is of; what they say of training is not used.  How its weights come into
a model stands in `mpitrain.weights`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitrain.backend import dtype_of
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.sizes import DecoderConfig
from mpitrain.weights import fill, find, model_in, run_of

__all__ = ["find", "load", "run_of", "settings_of", "sizes"]


def settings_of(source: Source, asked: Mapping[str, Any]) -> Config:
    """The settings of the model in a checkpoint, with a layout of one's own.

    Args:
        source: the checkpoint.
        asked: the layout, and a dtype that is another one than was saved.

    Raises:
        CheckpointError: it holds no settings, or some that are none.
        ConfigError: the layout does not go together with them.
    """
    alone, _ = model_in(source)
    return replace(alone, dropout=0.0, **asked)


def sizes(source: Source, config: Config) -> DecoderConfig:
    """The sizes of the model in a checkpoint, which its tensors bear out; as `model_in`."""
    return model_in(source)[1]


def load(source: Source, config: Config, of_model: DecoderConfig, mesh: Mesh) -> Decoder:
    """The model, with the weights of the checkpoint.  Collective over the world.

    Raises:
        CheckpointError: weights are missing, or of other shapes.
        CheckpointDamaged: a file is not what was written; names file and tensor.
        ConfigError: it does not fit into this host's memory.
        ShapeError: it does not divide over the ranks.
    """
    dtype = together(mesh.world, lambda: dtype_of(config.dtype))  # a host may lack bfloat16
    here = mesh.world.exchange(mesh.world.host).count(mesh.world.host)
    together(mesh.world, lambda: _check_memory(of_model, config, mesh, here))
    model = build(of_model, mesh, sequence_parallel=config.sequence_parallel, zero=config.zero, dtype=dtype)
    fill(model, source, mesh.world)
    return model


def _check_memory(of_model: DecoderConfig, config: Config, mesh: Mesh, ranks_on_host: int) -> None:
    """Refuse weights that certainly do not fit, before anything is allocated."""
    size = {"float64": 8, "float32": 4}.get(config.dtype, 6)  # halves have masters
    over = mesh.tp.size * mesh.pp.size * (mesh.dp.size * mesh.cp.size if config.zero == 3 else 1)
    experts = of_model.num_expert_parameters
    weights = of_model.num_parameters - experts + experts // mesh.ep.size
    needed, has = size * weights * ranks_on_host // over, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > has:
        raise ConfigError(
            f"{of_model.num_parameters:,} weights in {config.dtype} need {needed / 2**30:,.1f} GiB on this host, which"
            f" has {has / 2**30:,.1f}.\nTake more hosts and --tp, --pp or --zero 3, or a smaller --dtype."
        )
