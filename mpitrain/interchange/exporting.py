"""`mpitrain checkpoint export`: the weights in a checkpoint as a folder that transformers loads.

    OUT/config.json              the settings of the model
    OUT/model.safetensors        the weights; or model-00001-of-00003.safetensors, ... and an index
    OUT/generation_config.json   the words that begin and end a text, if anybody said which
    OUT/tokenizer.json           that of the run, if it has one, and tokenizer_config.json, which says how to load it

The library writes a file from the memory of its tensors.  That memory is a file, too, mapped and without a name, so
that what is held at once is one tensor, not a file of 5 GiB.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain import disk
from mpitrain.backend import dtype_of
from mpitrain.checkpoint.folders import publish
from mpitrain.checkpoint.saving import some
from mpitrain.checkpoint.tools.resharding import drafted
from mpitrain.checkpoint.tools.source import Source
from mpitrain.data import tokenizer_file
from mpitrain.errors import CheckpointError, DataError
from mpitrain.interchange import names, settings
from mpitrain.interchange.header import read_small
from mpitrain.interchange.library import safetensors
from mpitrain.interchange.numbers import put
from mpitrain.interchange.pairs import Pair
from mpitrain.interchange.weights import INDEX, ONE_FILE
from mpitrain.models.sizes import DecoderConfig
from mpitrain.options import show
from mpitrain.weights import WEIGHT, misfits, model_in, said_besides, tokenizer_of


class Piece(NamedTuple):
    """A tensor of a file that is written: its name, and which of those that a pair makes it is."""

    name: str
    pair: Pair
    number: int


class Export(NamedTuple):
    """What is exported.

    Attributes:
        source: where values come from.
        sizes: of the model.
        dtype: of the files.
        shards: the tensors of each file.
        tokenizer: its text; None: there is none.
        said: what another tool said of the weights, as its `model_type`, and which tokens begin and end a text.
        words: the special words of the tokenizer, by their names in tokenizer_config.json.
    """

    source: Source
    sizes: DecoderConfig
    dtype: str
    shards: list[list[Piece]]
    tokenizer: bytes | None
    said: Mapping[str, Any]
    words: Mapping[str, str]

    @property
    def width(self) -> int:
        """Bytes of an element in the files."""
        return int(np.dtype(dtype_of(self.dtype)).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all values in the files."""
        return self.width * sum(_elements(piece) for shard in self.shards for piece in shard)


def looked_into(text: str, dtype: str | None, shard_size: int) -> Export:
    """What of a checkpoint, or of the newest one of a run, goes where.

    Args:
        text: the path.
        dtype: of the files; None: the one in which the run computed.
        shard_size: bytes of values from which on there is another file.

    Raises:
        CheckpointError: there is none, or transformers has no such model.
    """
    source = Source.of(text)
    config, sizes = model_in(source)
    try:
        pairs = names.pairs(sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{show(source)}: {error}") from None
    _check(source, pairs)
    dtype = config.dtype if dtype is None else dtype
    beside = tokenizer_of(source)
    tokenizer = None if beside is None else read_small(beside, tokenizer_file.LARGEST_FILE)
    shards = _dealt(pairs, np.dtype(dtype_of(dtype)).itemsize, shard_size)
    said = said_besides(source)
    words, tokens = settings.words_and_tokens(said, _special(tokenizer, str(beside)))
    return Export(source, sizes, dtype, shards, tokenizer, {**said, **tokens}, words)


def _special(tokenizer: bytes | None, where: str) -> Mapping[str, int]:
    """The special words of a tokenizer and their numbers; of one that is not taken here, nothing is known."""
    try:
        return {} if tokenizer is None else tokenizer_file.checked(tokenizer.decode(), where)[2]
    except (DataError, UnicodeDecodeError):
        return {}


def _check(source: Source, pairs: list[Pair]) -> None:
    """That the checkpoint holds the weights of the model that its settings describe."""
    tensors = source.manifest.tensors
    held = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)}
    wanted = {f"{WEIGHT}{pair.ours}": pair.our_shape for pair in pairs}
    lines = misfits({name: tensor.shape for name, tensor in held.items()}, wanted)
    if odd := [f"{name} is {tensor.dtype}" for name, tensor in held.items() if not tensor.dtype.startswith("float")]:
        lines.append(f"no weights: {some(odd, 2)}")
    if lines:
        raise CheckpointError("\n".join([f"{show(source)} does not hold the model of its settings:", *lines]))


def _dealt(pairs: list[Pair], width: int, shard_size: int) -> list[list[Piece]]:
    """The tensors of each file, in the model's order; one that is larger than a file has one of its own."""
    shards: list[list[Piece]] = [[]]
    filled = 0
    for pair in pairs:
        for number, name in enumerate(pair.theirs):
            piece = Piece(name, pair, number)
            nbytes = _elements(piece) * width
            if shards[-1] and filled + nbytes > shard_size:
                shards.append([])
                filled = 0
            shards[-1].append(piece)
            filled += nbytes
    return shards


def _elements(piece: Piece) -> int:
    return math.prod(piece.pair.their_shape)


def folder(export: Export, target: Path, told: Callable[[int], None]) -> int:
    """Make the folder; nothing is there under its name until all of it is on the disk.

    Args:
        export: what is exported.
        target: the new folder.
        told: called with the number of bytes that were written.

    Returns:
        Bytes of the files of weights.

    Raises:
        CheckpointError: a value cannot be read, or is too large for the dtype, or nothing be written.

    Cost: memory for one tensor, as it is here and as it is in the file; while a file is written, its size on the disk
        once more.
    """
    files = [ONE_FILE]
    if len(export.shards) > 1:
        files = [f"model-{n:05}-of-{len(export.shards):05}.safetensors" for n in range(1, len(export.shards) + 1)]
    size = 0
    values = _Values(export)
    with drafted(target) as draft:
        for file, shard in zip(files, export.shards, strict=True):
            _write(draft / file, shard, values, told)
            size += (draft / file).stat().st_size
        if len(files) > 1:
            mapped = {piece.name: file for file, shard in zip(files, export.shards, strict=True) for piece in shard}
            _write_json(draft / INDEX, {"metadata": {"total_size": export.nbytes}, "weight_map": mapped})
        _write_json(draft / settings.FILE, settings.of_model(export.sizes, export.dtype, export.said))
        if tokens := settings.tokens_of(export.said):
            _write_json(draft / settings.OF_GENERATION, tokens)
        if export.tokenizer is not None:
            disk.replace(draft / tokenizer_file.NAME, export.tokenizer)
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": export.sizes.seq_len}
            _write_json(draft / settings.OF_WORDS, {**about, **export.words})
        publish(target)
    return size


class _Values:
    """The values of tensors as they go into files; of one tensor here, which several come from, they are read once."""

    def __init__(self, export: Export) -> None:
        self._source = export.source
        self.dtype = np.dtype(dtype_of(export.dtype))
        self._held: tuple[Pair, np.ndarray] | None = None

    def write(self, piece: Piece, place: np.ndarray) -> None:
        """Write those of a tensor where they go."""
        pair, name = piece.pair, f"{WEIGHT}{piece.pair.ours}"
        if self._held is None or self._held[0] is not pair:
            self._held = None  # before the next one is read: there is memory for one
            self._held = pair, self._source.read(name, tuple(slice(0, length) for length in pair.our_shape))
        put(pair.views(self._held[1])[piece.number], pair.apart(place), f"{show(self._source)}: {name}")


def _write(path: Path, shard: list[Piece], values: _Values, told: Callable[[int], None]) -> None:
    """One file of weights, and have it on the disk."""
    library = safetensors()
    width = values.dtype.itemsize
    total = width * sum(map(_elements, shard))
    whole = np.frombuffer(_mapped(path.with_name(".values"), total), np.uint8)
    specs, at = {}, 0
    for piece in shard:
        nbytes = _elements(piece) * width
        place = whole[at : at + nbytes].view(values.dtype).reshape(piece.pair.their_shape)
        values.write(piece, place)
        specs[piece.name] = library.TensorSpec(
            dtype=values.dtype.name, shape=piece.pair.their_shape, data_ptr=place.ctypes.data, data_len=nbytes
        )
        at += nbytes
        told(nbytes)
    try:
        library.serialize_file(specs, os.fspath(path), {"format": "pt"})
    except library.SafetensorError as error:
        raise CheckpointError(f"{show(path)} cannot be written: {' '.join(str(error).split())[:200]}.") from None
    file = disk.open_to_read(path)
    try:
        disk.sync(file, path)
    finally:
        os.close(file)


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    """Memory that is a file without a name.  Its room on the disk is taken first: a map cannot say that it lacks."""
    file = disk.create(path)
    try:
        os.unlink(path)
        os.posix_fallocate(file, 0, nbytes)
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _write_json(path: Path, value: object) -> None:
    disk.replace(path, f"{json.dumps(value, indent=2)}\n".encode())
