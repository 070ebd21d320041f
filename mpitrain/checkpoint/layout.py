"""What a checkpoint holds: logical tensors, and which rectangle of each lies in which file.

A tensor in a checkpoint is known by its name and its full shape; ranks, axes and buffers do not appear.  A rank brings
`SlabRef`s: the rectangles that it holds.  Each rectangle that several ranks hold is written by the one that counts it,
so the rectangles in a checkpoint tile every tensor.  The manifest, `manifest.json`, is the whole index:

    {"format": 1, "step": 100, "layout": {"dp": 8}, "versions": {...}, "scalars": {...},
     "files": {"rank-00000.h5": 1884160},
     "tensors": {"weight/blocks.0.mlp.up.weight": {"shape": [128, 512], "dtype": "float32",
                 "slabs": [{"start": [0, 0], "stop": [128, 512], "file": "rank-00000.h5"}]}}}
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.backend import Array
from mpitrain.errors import CheckpointError
from mpitrain.spec import Spec

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "float16",
    "float32",
    "float64",
}

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*(/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)*")
_FILE = re.compile(r"rank-[0-9]{5,}\.h5")
_MAX_MANIFEST = 1 << 28  # bytes; a hundred thousand slabs are 20 MB


class SlabRef(NamedTuple):
    """One rank's rectangle of a logical tensor.

    Attributes:
        name: of the tensor, in a checkpoint: `weight/blocks.0.mlp.up.weight`.
        full_shape: shape of the unsharded tensor.
        rectangle: slices with explicit start and stop, one a dim.
        array: the values, of the rectangle's shape; loading writes into it.
        counted_here: this rank writes it.
    """

    name: str
    full_shape: tuple[int, ...]
    rectangle: tuple[slice, ...]
    array: Array
    counted_here: bool


class _Lies(Protocol):
    """How a tensor lies across ranks, and which part of it is here."""

    @property
    def full_shape(self) -> tuple[int, ...]: ...
    @property
    def rectangle(self) -> tuple[slice, ...]: ...
    @property
    def spec(self) -> Spec: ...


class _Holds(_Lies, Protocol):
    """What is asked of a parameter."""

    @property
    def name(self) -> str: ...
    @property
    def master(self) -> Array: ...


class _Keeps(_Lies, Protocol):
    """What is asked of a tensor that an optimizer keeps."""

    @property
    def array(self) -> Array: ...


def counted_here(spec: Spec, coords: Mapping[str, int]) -> bool:
    """Whether the rank at `coords` is the one that counts its slab: the first on every axis that does not cut it.

    Only the holder's own stage exists on pp, so pp does not matter; of a tied pair the first stage's copy counts.
    """
    cut_axes = set(spec.shard_dims()) | {"pp"}
    first = all(index == 0 for axis, index in coords.items() if axis not in cut_axes)
    return first and (not spec.tied or coords.get("pp", 0) == 0)


def slabs_of(
    parameters: Iterable[_Holds], states: Mapping[str, Mapping[str, _Keeps]], coords: Mapping[str, int]
) -> list[SlabRef]:
    """The slabs of a model and of its optimizer.

    Args:
        parameters: this rank's, materialised.
        states: kind -> parameter's name -> tensor, as `Optimizer.state_tensors` gives it; of any shape and spec.
        coords: this rank's place in the mesh.

    Returns:
        Weights as `weight/NAME`, in the precision in which they are updated, states as `KIND/NAME`; views, no copies.
    """
    slabs = []
    for p in parameters:
        slabs.append(SlabRef(f"weight/{p.name}", p.full_shape, p.rectangle, p.master, counted_here(p.spec, coords)))
        for kind, of in states.items():
            if (state := of.get(p.name)) is not None:
                counted = counted_here(state.spec, coords)
                slabs.append(SlabRef(f"{kind}/{p.name}", state.full_shape, state.rectangle, state.array, counted))
    return slabs


# ------------------------------------------------------------------------------------------------------------- manifest


class Slab(NamedTuple):
    """A rectangle, and the file that holds it."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


class Logical(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    slabs: tuple[Slab, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the slabs tile the tensor: cut along a grid, all different, and of its volume together."""
        different = len({slab.start for slab in self.slabs}) == len(self.slabs)
        return different and sum(math.prod(slab.shape) for slab in self.slabs) == math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """The index of a checkpoint.

    Attributes:
        step: steps that were done when it was saved.
        layout: axis -> ranks, of the run that saved it; for people, loading does not need it.
        versions: of the libraries that wrote it.
        scalars: what the run wanted back, as JSON holds it.
        files: name -> size in bytes.
        tensors: by name.
    """

    step: int
    layout: dict[str, int]
    versions: dict[str, str]
    scalars: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Logical]

    def to_json(self) -> str:
        """The text of the file."""
        tensors = {
            name: {"shape": t.shape, "dtype": t.dtype, "slabs": [slab._asdict() for slab in t.slabs]}
            for name, t in self.tensors.items()
        }
        whole = {"format": FORMAT, **vars(self), "tensors": {}}
        head = json.dumps(whole, indent=1, allow_nan=False)
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
        return head.removesuffix("{}\n}") + f"{{\n{lines}\n }}\n}}\n"


def check_slabs(slabs: Sequence[SlabRef]) -> None:
    """Refuse what a checkpoint cannot hold; what only this library can get wrong is asserted.

    Raises:
        CheckpointError: a name or a dtype that is not allowed, or two tensors of one name.
    """
    seen: set[str] = set()
    for slab in slabs:
        if not _NAME.fullmatch(slab.name) or slab.name in seen:
            why = "stands twice" if slab.name in seen else "may only have letters, digits and _ - . /"
            raise CheckpointError(f"Tensor {slab.name!r} cannot be saved: its name {why}.")
        if slab.array.dtype.name not in DTYPES:
            raise CheckpointError(
                f"Tensor {slab.name} is {slab.array.dtype.name}; a checkpoint holds {', '.join(sorted(DTYPES))}."
            )
        assert slab.array.shape == tuple(part.stop - part.start for part in slab.rectangle), slab.name
        seen.add(slab.name)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, every field checked; no other file is read.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format, or a file is missing or of another size.
    """
    path = folder / MANIFEST
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_MANIFEST:
            raise CheckpointError(
                f"{path} is not a manifest: it must be a regular file of at most {_MAX_MANIFEST} bytes."
            )
        whole = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is not JSON.  Resume from another checkpoint.") from None
    found = whole.get("format") if isinstance(whole, dict) else None
    if type(found) is int and found > FORMAT:
        raise CheckpointError(
            f"{folder} has format {found}; this mpitrain reads up to {FORMAT}.  Use a newer mpitrain."
        )
    try:
        manifest = _manifest(whole)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is damaged: {detail}.  Resume from another checkpoint.") from None
    for name, size in manifest.files.items():
        try:
            about = os.lstat(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder} is not complete: {name}: {error.strerror}.") from None
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            raise CheckpointError(
                f"{folder} is damaged: {name} must be a regular file of {size} bytes; it has {about.st_size}."
            )
    if re.fullmatch(r"step-[0-9]{8,}", folder.name) and int(folder.name[len("step-") :]) != manifest.step:
        raise CheckpointError(
            f"{path} is damaged: it says step {manifest.step} in {folder.name}.  Resume from another checkpoint."
        )
    return manifest


def _manifest(whole: Any) -> Manifest:
    """The manifest in a JSON value.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not one.
    """
    _must(whole["format"] == FORMAT, "its format is not known")
    _must(_is_count(whole["step"]), "its step is not a number")
    for key in ("layout", "versions", "scalars"):
        _must(isinstance(whole[key], dict), f"{key} is not a table")
    for name, size in whole["files"].items():
        _must(bool(_FILE.fullmatch(name)) and _is_count(size), f"file {name!r} is not allowed")
    tensors = {}
    for name, about in whole["tensors"].items():
        _must(bool(_NAME.fullmatch(name)), f"tensor name {name!r} is not allowed")
        shape = _counts(about["shape"])
        slabs = tuple(Slab(_counts(s["start"]), _counts(s["stop"]), s["file"]) for s in about["slabs"])
        for slab in slabs:
            inside = len(slab.start) == len(slab.stop) == len(shape) and all(
                start < stop <= length for start, stop, length in zip(slab.start, slab.stop, shape, strict=True)
            )
            _must(inside and slab.file in whole["files"], f"a slab of {name} lies outside of it or in no file")
        tensors[name] = Logical(shape, about["dtype"], slabs)
        _must(about["dtype"] in DTYPES, f"{name} has dtype {about['dtype']!r}")
        _must(tensors[name].is_whole, f"the slabs of {name} do not make a whole tensor")
    fields = {key: whole[key] for key in ("step", "layout", "versions", "scalars", "files")}
    return Manifest(tensors=tensors, **fields)


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _counts(values: Any) -> tuple[int, ...]:
    _must(isinstance(values, list) and all(_is_count(value) for value in values), "a shape is not a list of numbers")
    return tuple(values)
