"""The weights in a checkpoint without the rest of a run: which model they make, and how they come into one.

    source = find(path, world)            the checkpoint that a word of the command line means
    settings_in(source)                   the settings of its model, whoever wrote it: a training, or an import
    fill(model, source, world)            this rank's part of the weights, on any layout, in any precision

So a run begins from them (`--init`), a text is generated with them, and another tool gets them (`interchange`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.assemble import sizes_of
from mpitrain.backend import to_device
from mpitrain.checkpoint.saving import some
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.config import GROUPS, OPTIONS, Config
from mpitrain.data import tokenizer_file
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.models.decoder import Decoder
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import show
from mpitrain.recording.outside import heard

WEIGHT = "weight/"
"""How the names of weights in a checkpoint begin."""
TABLE = f"{WEIGHT}table.weight"
IMPORTED = "imported"
"""The scalar of a checkpoint that another tool's weights became: what that tool said besides."""
BROUGHT = "brought"
"""The same in the checkpoints of a run that began with such weights."""


def of_model() -> list[str]:
    """Names of the options that say which model weights are of; `dtype` is one of them."""
    names, groups = list(OPTIONS), list(GROUPS)
    return names[: names.index(groups[groups.index("experts") + 1])]


def find(path: str, world: World) -> Source:
    """The checkpoint that a word of the command line means, on all ranks the same.  Collective over the world.

    Raises:
        CheckpointError: there is none, its index cannot be read, or some rank sees another one.
    """
    place = together(world, lambda: heard("the checkpoint", lambda: os.fspath(Source.of(path).path)))
    source = together(world, lambda: Source.of(str(place)))
    assert source is not None
    found = world.exchange([str(source.path), source.manifest.step, len(source.manifest.tensors)])
    odd = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if odd is not None:
        raise CheckpointError(
            f"{show(path)}: rank 0 finds {found[0][0]}, rank {odd} {found[odd][0]}: give all ranks the same one."
        )
    return source


def run_of(source: Source) -> Path | None:
    """The folder of the run that a checkpoint lies in, as far as its place tells."""
    folder = source.path.resolve().parent
    return folder.parent if folder.name == "checkpoints" else None


def tokenizer_of(source: Source) -> Path | None:
    """The tokenizer.json of its run, if there is one."""
    run = run_of(source)
    path = None if run is None else run / tokenizer_file.NAME
    return path if path is not None and path.is_file() and not path.is_symlink() else None


def said_besides(source: Source) -> dict[str, Any]:
    """What another tool said of weights that were brought from it, as the words that begin and end a text.

    A run that began with them says it as well; of weights that were made here nobody said anything.
    """
    scalars = source.manifest.scalars
    said = scalars.get(IMPORTED, scalars.get(BROUGHT))
    return dict(said) if isinstance(said, dict) else {}


def settings_in(source: Source) -> dict[str, Any]:
    """The settings of the model in a checkpoint, among them how many words it has, which a run need not say.

    Raises:
        CheckpointError: it says nothing of a model, or is of no model of text.
    """
    saved, table = source.manifest.scalars.get("config"), source.manifest.tensors.get(TABLE)
    if not isinstance(saved, dict) or "model" not in saved:
        raise CheckpointError(f"{show(source)} holds no settings: it was not saved by training, nor imported.")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{show(source)} has no {TABLE}, the table of words: it is of no model of text.")
    found = {name: saved[name] for name in of_model() if name in saved}
    return found if found.get("vocab") is not None else {**found, "vocab": table.shape[0]}


def model_in(source: Source) -> tuple[Config, DecoderConfig]:
    """The model in a checkpoint: its settings, with the usual ones for what is not of the model, and its sizes.

    Raises:
        CheckpointError: it says nothing of a model, what it says cannot be, or it has another number of weights.
    """
    try:
        config = Config(**settings_in(source))
        sizes = sizes_of(config, source.manifest.tensors[TABLE].shape[0])
    except ConfigError as error:
        raise CheckpointError(f"{show(source)} holds settings that are none: {error}") from None
    tensors = source.manifest.tensors
    held = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name.startswith(WEIGHT))
    if held != sizes.num_parameters:
        raise CheckpointError(
            f"{show(source)} holds {held:,} weights, but a model of its settings ({config.model}, {config.layers}"
            f" layers, width {config.width}) has {sizes.num_parameters:,}."
        )
    return config, sizes


def fill(model: Decoder, source: Source, world: World) -> None:
    """Put the weights of a checkpoint into a model, rounded where its precision is another.  Collective over the world.

    Args:
        model: this rank's part of it.
        source: the checkpoint, whatever layout saved it.
        world: all ranks.

    Raises:
        CheckpointError: a weight is missing, too many, or has another shape: names it, the same on all ranks, before
            one is written.
        CheckpointDamaged: a file is not what was written; names file and tensor.

    Cost: of each tensor the rows that this rank holds; memory for one tensor of it besides.
    """
    check_fit(model, source, world)
    together(world, lambda: _read_into(source, model))
    for flat in (*model.flats, *model.frozen_flats):
        flat.refresh()


def check_fit(model: Decoder, source: Source, world: World) -> None:
    """Refuse weights of another model, as `fill` would; reads none.  Collective over the world."""
    wanted: dict[str, tuple[int, ...]] = {}
    for names in world.exchange([[WEIGHT + p.name, list(p.full_shape)] for p in model.parameters()]):
        wanted.update((name, tuple(shape)) for name, shape in names)
    saved = {name: tensor.shape for name, tensor in source.manifest.tensors.items() if name.startswith(WEIGHT)}
    if lines := misfits(saved, wanted):
        raise CheckpointError("\n".join([f"{show(source)} does not fit the model:", *lines]))


def misfits(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What of the tensors that there are is not what a model wants, a line for each kind; by name -> shape."""
    lines = []
    if missing := [name for name in wanted if name not in saved]:
        lines.append(f"missing in it: {some(missing)}")
    if unexpected := [show(name) for name in saved if name not in wanted]:
        lines.append(f"unexpected in it: {some(unexpected)}")
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    if odd := [f"{name} is {saved[name]}, the model wants {wanted[name]}" for name in both]:
        lines.append(f"of another shape: {some(odd, 2)}")
    return lines


def _read_into(source: Source, model: Decoder) -> None:
    for share in model.kept():
        if share.master.size:
            values = source.read(WEIGHT + share.name, share.rectangle)
            with np.errstate(over="ignore"):
                share.master[...] = to_device(values, like=share.master)
