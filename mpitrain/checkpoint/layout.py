"""What a run brings to a checkpoint, and wants from it: logical tensors, of each the rectangle that a rank holds.

A tensor in a checkpoint is known by its name and its full shape; ranks, axes and buffers do not appear.  Ranks that
hold the same rectangle share the work: of a large one each writes some rows, small ones are dealt out.  So what is
written tiles every tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from mpitrain.backend import Array
from mpitrain.checkpoint.manifest import DTYPES, LONGEST_NAME, NAME
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError
from mpitrain.spec import Spec

SHARED = 1 << 16
"""Bytes a rank from which on the ranks that hold a slab cut it among them to write it."""


class SlabRef(NamedTuple):
    """One rank's rectangle of a logical tensor.

    Attributes:
        name: of the tensor, in a checkpoint: `weight/blocks.0.mlp.up.weight`.
        full_shape: shape of the unsharded tensor.
        rectangle: slices with explicit start and stop, one a dim.
        array: the values, of the rectangle's shape; loading writes into it.
        holder: (i, n): this is the i-th of n ranks that hold the rectangle and share the writing; None: it is others'.
    """

    name: str
    full_shape: tuple[int, ...]
    rectangle: tuple[slice, ...]
    array: Array
    holder: tuple[int, int] | None

    @property
    def written(self) -> tuple[slice, ...] | None:
        """The part of the array that this rank writes; None: nothing."""
        shape = self.array.shape
        if self.holder is None or 0 in shape:
            return None
        i, n = self.holder
        whole = tuple(slice(0, length) for length in shape)
        if n > 1 and shape and shape[0] >= n and self.array.size * self.array.dtype.itemsize >= n * SHARED:
            return slice(shape[0] * i // n, shape[0] * (i + 1) // n), *whole[1:]
        return whole if zlib.crc32(self.name.encode()) % n == i else None


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


class _IsKept(_Keeps, Protocol):
    """What is asked of a module's buffer."""

    @property
    def name(self) -> str: ...


def counted_here(spec: Spec, coords: Mapping[str, int]) -> bool:
    """Whether the rank at `coords` is the one that counts its slab: the first on every axis that does not cut it.

    Only the holder's own stage exists on pp, so pp does not matter; of a tied pair the first stage's copy counts.
    """
    cut_axes = set(spec.shard_dims()) | {"pp"}
    first = all(index == 0 for axis, index in coords.items() if axis not in cut_axes)
    return first and (not spec.tied or coords.get("pp", 0) == 0)


def holder(spec: Spec, mesh: Mesh, apart: Iterable[str] = ()) -> tuple[int, int] | None:
    """This rank's number among those that hold the same slab and may write it, and how many they are.

    Of a tied pair of stages the first one writes; along the axes `apart`, where ranks hold other values though the spec
    says the same, the first rank.

    Returns:
        (number, count), or None: this rank is none of them.
    """
    cut, first = spec.shard_dims(), set(apart)
    if spec.tied and mesh.coords["pp"]:
        return None
    if any(mesh.coords[axis] for axis in first if axis not in cut):
        return None
    number, count = 0, 1
    for axis, size in mesh.sizes.items():
        if axis != "pp" and axis not in cut and axis not in first:
            number, count = number * size + mesh.coords[axis], count * size
    return number, count


def slabs_of(
    parameters: Iterable[_Holds],
    states: Mapping[str, Mapping[str, _Keeps]],
    mesh: Mesh,
    apart: Iterable[str] = (),
    buffers: Iterable[_IsKept] = (),
) -> list[SlabRef]:
    """The slabs of a model and of its optimizer.

    Args:
        parameters: this rank's, materialised.
        states: kind -> parameter's name -> tensor, as `Optimizer.state_tensors` gives it; of any shape and spec.
        mesh: the layout.
        apart: axes along which ranks hold weights of their own (`Reducer.apart`): the first one's are saved.
        buffers: what modules keep besides parameters (`Module.buffers`).

    Returns:
        Weights as `weight/NAME`, in the precision in which they are updated, states as `KIND/NAME`, buffers as
        `buffer/NAME`; views, no copies.
    """
    slabs, apart = [], tuple(apart)
    for p in parameters:
        slabs.append(SlabRef(f"weight/{p.name}", p.full_shape, p.rectangle, p.master, holder(p.spec, mesh, apart)))
        for kind, of in states.items():
            if (state := of.get(p.name)) is not None:
                held = holder(state.spec, mesh, apart)
                slabs.append(SlabRef(f"{kind}/{p.name}", state.full_shape, state.rectangle, state.array, held))
    for b in buffers:
        slabs.append(SlabRef(f"buffer/{b.name}", b.full_shape, b.rectangle, b.array, holder(b.spec, mesh, apart)))
    return slabs


def check_slabs(slabs: Sequence[SlabRef]) -> None:
    """Refuse what a checkpoint cannot hold; what only this library can get wrong is asserted.

    Raises:
        CheckpointError: a name or a dtype that is not allowed, or two tensors of one name.
    """
    seen: set[str] = set()
    for slab in slabs:
        if not NAME.fullmatch(slab.name) or len(slab.name) > LONGEST_NAME or slab.name in seen:
            allowed = f"may only have letters, digits, _ - and single dots, {LONGEST_NAME} in all, 8 parts between /"
            why = "stands twice" if slab.name in seen else allowed
            raise CheckpointError(f"Tensor {slab.name!r} cannot be saved: its name {why}.")
        if slab.array.dtype.name not in DTYPES:
            raise CheckpointError(
                f"Tensor {slab.name} is {slab.array.dtype.name}; a checkpoint holds {', '.join(sorted(DTYPES))}."
            )
        assert slab.array.shape == tuple(part.stop - part.start for part in slab.rectangle), slab.name
        seen.add(slab.name)
