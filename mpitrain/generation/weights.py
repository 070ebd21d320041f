"""The model of a checkpoint on this rank's part of a mesh, for writing: weights only, in any layout.

Which model it is and how its weights come into one stands in `mpitrain.weights`.
"""

from __future__ import annotations

from typing import Any

from mpitrain.backend import dtype_of
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.devices import Memory, memory_of
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.config import Config
from mpitrain.device import CPU, Device
from mpitrain.errors import ConfigError
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.sizes import DecoderConfig
from mpitrain.weights import fill


def load(
    source: Source, config: Config, of_model: DecoderConfig, mesh: Mesh, kept: int, device: Device = CPU
) -> Decoder:
    """The model, with the weights of the checkpoint.  Collective over the world.

    Args:
        source: the checkpoint.
        config: the settings of its model, and the layout.
        of_model: its sizes.
        mesh: the layout.
        kept: words whose keys and values will be kept, of all texts together.
        device: of this rank.

    Raises:
        CheckpointError: weights are missing, or of other shapes.
        CheckpointDamaged: a file is not what was written; names file and tensor.
        ConfigError: it does not fit into the memory of this host or device.
        ShapeError: it does not divide over the ranks.
    """
    dtype = together(mesh.world, lambda: dtype_of(config.dtype))  # a host may lack bfloat16
    memory = memory_of(mesh.world, device)
    together(mesh.world, lambda: _check_memory(of_model, config, mesh, memory, kept))
    how: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "zero": config.zero, "dtype": dtype}
    model = build(of_model, mesh, **how, xp=device.xp, start=False)
    fill(model, source, mesh.world)
    return model


def _check_memory(of_model: DecoderConfig, config: Config, mesh: Mesh, memory: Memory, kept: int) -> None:
    """Refuse what certainly does not fit, before anything is allocated."""
    size = {"float64": 8, "float32": 4}.get(config.dtype, 6)  # halves have masters
    over = mesh.tp.size * mesh.pp.size * (mesh.dp.size * mesh.cp.size if config.zero == 3 else 1)
    experts = of_model.num_expert_parameters
    weights = of_model.num_parameters - experts + experts // mesh.ep.size
    of_words = 2 * kept * of_model.layers * of_model.groups * of_model.head_width * dtype_of(config.dtype).itemsize
    of_words = of_words // (mesh.tp.size * mesh.pp.size) * memory.ranks
    needed = size * weights * memory.ranks // over
    if needed + of_words > memory.nbytes:
        raise ConfigError(
            f"{of_model.num_parameters:,} weights in {config.dtype} need {needed / 2**30:,.1f} GiB on"
            f" {'a device' if memory.of_device else 'this host'}, keys and values of {kept:,} words"
            f" {of_words / 2**30:,.1f}; it has {memory.nbytes / 2**30:,.1f}.\n"
            "Take more hosts and --tp, --pp or --zero 3, a smaller --dtype, or fewer and shorter texts."
        )
