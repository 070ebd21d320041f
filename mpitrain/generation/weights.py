"""From a checkpoint to a model that writes: any layout, whatever layout has saved it, and weights only.

The settings in a checkpoint say which model it is of; what they say of training is not used.  Values are read from the
files piece by piece, each compared with its sum, and put into the precision of the model: a rank takes memory for its
own weights and for one tensor of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.assemble import sizes_of
from mpitrain.backend import dtype_of, to_device
from mpitrain.checkpoint.saving import some
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.config import GROUPS, OPTIONS, Config
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.models.decoder import Decoder
from mpitrain.models.families import build
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import show

WEIGHT = "weight/"
TABLE = "weight/table.weight"


def find(path: str, world: World) -> Source:
    """The checkpoint that a word of the command line means, on all ranks the same.  Collective over the world.

    Raises:
        CheckpointError: there is none, its index cannot be read, or some rank sees another one.
    """
    source = together(world, lambda: Source.of(path))
    assert source is not None
    found = world.exchange([str(source.path), source.manifest.step, len(source.manifest.tensors)])
    odd = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if odd is not None:
        raise CheckpointError(
            f"{show(path)}: rank 0 finds {found[0][0]}, rank {odd} {found[odd][0]}: give all ranks the same one."
        )
    return source


def run_of(source: Source) -> Path | None:
    """The folder of the run that saved a checkpoint, as far as its place tells."""
    folder = source.path.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def settings_of(source: Source, asked: Mapping[str, Any]) -> Config:
    """The settings of the model in a checkpoint, with a layout of one's own.

    Args:
        source: the checkpoint.
        asked: the layout, and a dtype that is another one than was saved.

    Raises:
        CheckpointError: it holds no settings, or some that are none.
        ConfigError: the layout does not go together with them.
    """
    saved = source.manifest.scalars.get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{source} holds no settings: it was not saved by training.  Without them nobody knows what model it is."
        )
    mine = {name: saved[name] for name in _of_model() if name in saved}
    try:
        alone = Config(**{**mine, "dropout": 0.0})
    except ConfigError as error:
        raise CheckpointError(f"{source} holds settings that are none: {error}") from None
    return Config(**{**mine, "dropout": 0.0, "dtype": alone.dtype, **asked})


def _of_model() -> list[str]:
    """Names of the options that say which model it is."""
    names = list(OPTIONS)
    return names[: names.index(_next_group("experts"))]


def _next_group(name: str) -> str:
    """The first option of the group behind another one."""
    groups = list(GROUPS)
    return groups[groups.index(name) + 1]


def sizes(source: Source, config: Config) -> DecoderConfig:
    """The sizes of the model in a checkpoint, which its tensors bear out.

    Raises:
        CheckpointError: it has no weights, or others than such a model has.
    """
    tensors = source.manifest.tensors
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    table = weights.get(TABLE)
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{source} has no {TABLE}, the table of words: it is of no model that writes.")
    try:
        found = sizes_of(config, table.shape[0])
    except ConfigError as error:
        raise CheckpointError(f"{source} holds settings that are none: {error}") from None
    held = sum(math.prod(tensor.shape) for tensor in weights.values())
    if held != found.num_parameters:
        raise CheckpointError(
            f"{source} holds {held:,} weights, but a model of its settings ({config.model}, {config.layers} layers,"
            f" width {config.width}) has {found.num_parameters:,}."
        )
    return found


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
    how: dict[str, Any] = {"sequence_parallel": config.sequence_parallel, "zero": config.zero, "dtype": dtype}
    model = build(of_model, mesh, **how, start=False)
    _check_fit(source, model, mesh.world)
    together(mesh.world, lambda: _fill(source, model))
    for flat in model.flats:
        flat.refresh()
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


def _check_fit(source: Source, model: Decoder, world: World) -> None:
    """Refuse weights of another model; all ranks see the same, so all raise the same."""
    wanted: dict[str, tuple[int, ...]] = {}
    for names in world.exchange([[WEIGHT + p.name, list(p.full_shape)] for p in model.parameters()]):
        wanted.update((name, tuple(shape)) for name, shape in names)
    saved = {name: tensor.shape for name, tensor in source.manifest.tensors.items() if name.startswith(WEIGHT)}
    lines = []
    if missing := [name for name in wanted if name not in saved]:
        lines.append(f"missing in it: {some(missing)}")
    if unexpected := [name for name in saved if name not in wanted]:
        lines.append(f"unexpected in it: {some(unexpected)}")
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    if odd := [f"{name} is {saved[name]}, the model wants {wanted[name]}" for name in both]:
        lines.append(f"of another shape: {some(odd, 2)}")
    if lines:
        raise CheckpointError("\n".join([f"{source} does not fit the model of its settings:", *lines]))


def _fill(source: Source, model: Decoder) -> None:
    """Put the values into what this rank holds of each weight."""
    for share in model.kept():
        if share.master.size:
            values = source.read(WEIGHT + share.name, share.rectangle)
            share.master[...] = to_device(values, model.like)
