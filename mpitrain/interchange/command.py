"""The words `import` and `export` of `mpitrain checkpoint`.

What does the work is imported when it is done: the other words of the command need no models.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.backend import DTYPES
from mpitrain.checkpoint.manifest import MANIFEST
from mpitrain.checkpoint.tools import wording
from mpitrain.checkpoint.tools.command import SAME, Given, Tool
from mpitrain.checkpoint.tools.progress import Progress
from mpitrain.config_rules import memory_size
from mpitrain.errors import CheckpointError
from mpitrain.options import Option, show

if TYPE_CHECKING:
    from mpitrain.models.sizes import DecoderConfig

_INTO = Option(
    "dtype",
    str,
    None,
    "in which the model computes; weights are kept in float32, or float64",
    choices=tuple(DTYPES),
    metavar="NAME",
    unset="default: that of the files",
)
_OUT_OF = Option(
    "dtype",
    str,
    None,
    "of the weights in the files",
    choices=tuple(DTYPES),
    metavar="NAME",
    unset="default: that of the run",
)
_SHARD = Option("shard_size", str, "5GiB", "values of a file; what is more goes into others", metavar="SIZE")


def _import(paths: list[str], given: Given) -> int:
    from mpitrain.interchange import importing

    target = _free(paths[1])
    found = importing.looked_into(paths[0], None if given["dtype"] is None else str(given["dtype"]))
    began = time.perf_counter()
    with found.weights, Progress("import", found.nbytes) as progress:
        size = importing.run(found, target, progress.add)
    seconds = time.perf_counter() - began
    print(f"{show(paths[0])} -> {show(paths[1])}")
    print(f"{_in_words(found.sizes)}, computes in {found.config.dtype}")
    print(f"{wording.count(len(found.pairs), 'tensor')} in {found.dtype.name}; {wording.speed(size, seconds)}")
    if found.left_out:
        print(f"left out, since no weights: {wording.some(found.left_out, 2)}")
    if found.tokenizer is None:
        print(f"no tokenizer: {found.no_tokenizer}")
    else:
        print("tokenizer.json goes along")
    return SAME


def _export(paths: list[str], given: Given) -> int:
    from mpitrain.interchange import exporting

    shard_size = memory_size(str(given["shard_size"]), "--shard-size")
    target = _free(paths[1])
    found = exporting.looked_into(paths[0], None if given["dtype"] is None else str(given["dtype"]), shard_size)
    began = time.perf_counter()
    with Progress("export", found.nbytes) as progress:
        size = exporting.folder(found, target, progress.add)
    seconds = time.perf_counter() - began
    for note in found.source.notes:
        print(f"passed over: {note}")
    print(f"{show(found.source)} -> {show(paths[1])}")
    print(f"{_in_words(found.sizes)}, in {found.dtype}")
    tensors = wording.count(sum(map(len, found.shards)), "tensor")
    print(f"{tensors} in {wording.count(len(found.shards), 'file')}; {wording.speed(size, seconds)}")
    return SAME


def _in_words(sizes: DecoderConfig) -> str:
    groups = "" if sizes.groups == sizes.heads else f" in {wording.count(sizes.groups, 'group')}"
    window = "" if sizes.window is None else f", window {sizes.window:,}"
    return (
        f"{sizes.family} of {sizes.num_parameters:,} parameters: {wording.count(sizes.layers, 'layer')}, width"
        f" {sizes.width:,}, {wording.count(sizes.heads, 'head')}{groups}, {sizes.seq_len:,} positions{window},"
        f" {sizes.vocab:,} words, {'tied' if sizes.tied else 'untied'}"
    )


def _free(text: str) -> Path:
    """A new folder.

    Raises:
        CheckpointError: something has the name, or it lies in a checkpoint.
    """
    target = Path(os.path.abspath(text))
    if os.path.lexists(target):
        raise CheckpointError(f"{show(text)}: is there already; it is left alone.  Choose another name, or remove it.")
    above = next(folder for folder in target.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise CheckpointError(f"{show(text)}: {show(above)} is not a folder.")
    inside = next((folder for folder in target.resolve().parents if (folder / MANIFEST).is_file()), None)
    if inside is not None:
        raise CheckpointError(f"{show(text)}: lies in the checkpoint {show(inside)}, which stays as it is.")
    return target


TOOLS: Mapping[str, Tool] = {
    "import": Tool(
        ("import FOLDER OUT [--dtype NAME]",),
        "Make a run of a model in the layout of transformers: GPT-2, Llama or Mistral.\n"
        "FOLDER holds config.json and safetensors.  Go on with generate OUT, or train --init OUT.",
        (2, 2),
        (_INTO,),
        _import,
    ),
    "export": Tool(
        ("export PATH OUT [--dtype NAME] [--shard-size SIZE]",),
        "Write the weights in the layout of transformers, whose from_pretrained loads OUT.",
        (2, 2),
        (_OUT_OF, _SHARD),
        _export,
    ),
}
