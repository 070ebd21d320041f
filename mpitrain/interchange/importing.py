"""`mpitrain checkpoint import`: a folder of transformers' becomes the folder of a run.

    OUT/config.toml                     the settings of the model
    OUT/tokenizer.json                  as it was, if there is one
    OUT/checkpoints/step-00000000       the weights: float32, or float64, as masters of a training are

The sizes in config.json say which tensors there must be, of which shapes; only when all of them are there, a value is
read.  One tensor after the other passes through memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.assemble import sizes_of
from mpitrain.backend import dtype_of
from mpitrain.checkpoint import hdf5
from mpitrain.checkpoint.folders import folder_of, publish, write_manifest
from mpitrain.checkpoint.manifest import Logical, Manifest, Slab
from mpitrain.checkpoint.saving import some, versions
from mpitrain.checkpoint.tools.resharding import drafted
from mpitrain.config import Config
from mpitrain.data import tokenizer_file
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.interchange import names, settings
from mpitrain.interchange.header import read_json
from mpitrain.interchange.numbers import DTYPES, put
from mpitrain.interchange.pairs import Pair
from mpitrain.interchange.weights import Weights, of_folder
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import show
from mpitrain.weights import IMPORTED, WEIGHT, misfits

FILE = "rank-00000.h5"
MOST_SETTINGS = 1 << 20
"""Bytes that are read of config.json."""
MOST_OF_WORDS = 8 << 20
"""Bytes that are read of tokenizer_config.json, which may list some thousands of words."""


class Import(NamedTuple):
    """What is imported: all that is known before a value is read.

    Attributes:
        weights: where values come from.
        config: settings of the model; its dtype is that of the files, unless another one is asked for.
        sizes: what they come to.
        pairs: the tensors.
        same: the head of a tied model, which a file holds beside the table.
        left_out: tensors of the files that are no weights.
        tokenizer: its text; None: there is none that is taken.
        no_tokenizer: why not.
        said: what goes into the checkpoint besides.
    """

    weights: Weights
    config: Config
    sizes: DecoderConfig
    pairs: list[Pair]
    same: tuple[str, str] | None
    left_out: list[str]
    tokenizer: str | None
    no_tokenizer: str
    said: dict[str, Any]

    @property
    def dtype(self) -> np.dtype:
        """Of the weights in the checkpoint."""
        return np.dtype("float64" if self.config.dtype == "float64" else "float32")

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in the checkpoint."""
        return self.sizes.num_parameters * self.dtype.itemsize


def looked_into(text: str, dtype: str | None) -> Import:
    """What a folder, or a file of weights with config.json beside it, holds.

    Args:
        text: the path.
        dtype: in which the model shall compute; None: the one of the files.

    Raises:
        CheckpointError: it cannot be imported; names the file, the key or the tensor.
    """
    path = Path(text)
    if not path.exists():
        raise CheckpointError(
            f"{show(text)}: there is no such file or folder (looked from {Path.cwd()}).\n"
            "Nothing is downloaded here; for a model of the Hub, hf download NAME --local-dir FOLDER does it."
        )
    folder = path if path.is_dir() else path.parent
    said = read_json(of_folder(folder, settings.FILE), MOST_SETTINGS)
    asked = settings.to_settings(said, folder / settings.FILE)
    weights = Weights(path)
    config, sizes = _model(asked, folder / settings.FILE)
    prefix = names.prefix_of(sizes.family, weights.tensors)
    pairs = names.pairs(sizes, prefix)
    same = None
    if sizes.tied and names.HEAD in weights.tensors:
        same = names.table_of(sizes.family, prefix), names.HEAD
    left_out = [name for name in weights.tensors if names.is_buffer(sizes.family, name)]
    _check(weights, pairs, {*left_out, *((names.HEAD,) if same else ())})
    config = replace(config, dtype=dtype or _dtype(weights, pairs))
    tokenizer, words, why = _tokenizer(folder, sizes.vocab)
    about = {"from": "transformers", "model_type": said["model_type"], **settings.tokens_of(said), **words}
    return Import(weights, config, sizes, pairs, same, left_out, tokenizer, why, about)


def _tokenizer(folder: Path, vocab: int) -> tuple[str | None, dict[str, str], str]:
    """The tokenizer that lies beside the weights and which of its words are special, or why none is taken."""
    name = tokenizer_file.NAME
    if not os.path.lexists(folder / name):
        return None, {}, f"there is no {name}"
    path = of_folder(folder, name)
    try:
        text = tokenizer_file.read(path)
        _, words, special = tokenizer_file.checked(text, str(path))
    except DataError as error:
        return None, {}, str(error)
    if words > vocab:
        return None, {}, f"{show(path)} has {words:,} words, the model {vocab:,}"
    return text, _special(folder, special), ""


def _special(folder: Path, special: Mapping[str, int]) -> dict[str, str]:
    """What the file about the tokenizer says of special words: nothing, where it cannot be read."""
    if not os.path.lexists(folder / settings.OF_WORDS):
        return {}
    try:
        said = read_json(of_folder(folder, settings.OF_WORDS), MOST_OF_WORDS)
    except CheckpointError:
        return {}  # the numbers in the settings of the model say most of it, too
    return settings.words_of(said, special)


def _model(asked: Mapping[str, Any], path: Path) -> tuple[Config, DecoderConfig]:
    """Settings and sizes; refused by the name of the option if they cannot be."""
    try:
        config = Config(**asked)
        return config, sizes_of(config, asked["vocab"])
    except ConfigError as error:
        raise CheckpointError(f"{show(path)} asks for a model that cannot be here: {error}") from None


def _check(weights: Weights, pairs: Sequence[Pair], known: set[str]) -> None:
    """That there are the tensors of the model and no others, each with its shape and a dtype that weights may have."""
    held = {name: stored.entry for name, stored in weights.tensors.items() if name not in known}
    wanted = {name: pair.their_shape for pair in pairs for name in pair.theirs}
    lines = misfits({name: entry.shape for name, entry in held.items()}, wanted)
    if odd := [f"{name} is {entry.dtype}" for name, entry in held.items() if entry.dtype not in DTYPES]:
        lines.append(f"weights are {', '.join(DTYPES)}, but {some([*map(show, odd)], 2)}")
    if lines:
        where = show(weights.folder)
        raise CheckpointError("\n".join([f"{where} does not hold the model of its {settings.FILE}:", *lines]))


def _dtype(weights: Weights, pairs: Sequence[Pair]) -> str:
    """The dtype of the files; of several the widest, of the two halves float32, which holds both."""
    found = {DTYPES[weights.tensors[name].entry.dtype] for pair in pairs for name in pair.theirs}
    if found == {"float16", "bfloat16"}:
        return "float32"
    return max(found, key=lambda name: np.dtype(dtype_of(name)).itemsize)


def run(found: Import, target: Path, told: Callable[[int], None]) -> int:
    """Make the folder of a run; nothing is there under its name until all of it is on the disk.

    Args:
        found: what is imported.
        target: the new folder.
        told: called with the number of bytes that were written.

    Returns:
        Bytes of the file of weights.

    Raises:
        CheckpointError: a value cannot be read, or nothing be written.

    Cost: memory for one tensor, as it is in the file and as it is here.
    """
    if found.same is not None:
        _check_same(found.weights, *found.same)
    with drafted(target) as draft:
        folder = folder_of(draft, 0)
        disk.make_folder(folder)
        by_name = {f"{WEIGHT}{pair.ours}": pair for pair in found.pairs}

        def blocks(name: str) -> Iterator[memoryview]:
            for block in hdf5.in_blocks(_bytes(found, by_name[name])):
                told(len(block))
                yield memoryview(bytes(block))  # a block may wait for its sum, and the tensor should not with it

        datasets = [(name, pair.our_shape, found.dtype) for name, pair in by_name.items()]
        written = hdf5.write_blocks(folder / FILE, datasets, blocks)
        tensors = {}
        for name, pair in by_name.items():
            offset, sums = written.slabs[name]
            slab = Slab((0,) * len(pair.our_shape), pair.our_shape, FILE, offset, sums)
            tensors[name] = Logical(pair.our_shape, found.dtype.name, (slab,))
        scalars = {"updates": 0, "config": asdict(found.config), IMPORTED: found.said}
        manifest = Manifest(0, {}, versions(), scalars, {FILE: written.entry}, tensors)
        write_manifest(folder, manifest.to_json())
        disk.replace(draft / "config.toml", found.config.to_toml().encode())
        if found.tokenizer is not None:
            disk.replace(draft / tokenizer_file.NAME, found.tokenizer.encode())
        for each in (folder, folder.parent):
            disk.sync_folder(each)
        publish(target)
    return written.entry.nbytes


def _bytes(found: Import, pair: Pair) -> memoryview:
    """The values of a tensor here, as bytes."""
    ours: Any = np.empty(pair.our_shape, found.dtype)
    for name, view in zip(pair.theirs, pair.views(ours), strict=True):
        put(pair.apart(found.weights.read(name)), view, f"{show(found.weights.tensors[name].file)}: {name}")
    return memoryview(ours.reshape(-1).view(np.uint8))


def _check_same(weights: Weights, table: str, head: str) -> None:
    """That the head of a tied model is its table."""
    one, other = weights.read(table), weights.read(head)
    if one.dtype != other.dtype or one.tobytes() != other.tobytes():
        raise CheckpointError(
            f"{show(weights.folder)}: {head} is not {table}, but {settings.FILE} says that they are tied.\n"
            "If the head is a matrix of its own, write tie_word_embeddings: false there."
        )
