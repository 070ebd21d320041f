"""What an array looks like on the wire, and how dims are cut and joined around it.

A transport moves C-contiguous arrays in a few dtypes, of the host or, where it can, of a device.  Everything that has
to happen to a user's array before and after stands here: Fortran order and strides (MPI would send memory order and
re-order the elements without a word), foreign byte order, dtypes that an MPI may not know (float16, bfloat16), and dims
other than the first.  How arrays cross between device and host stands in staging.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import address, array_module, is_half, to_host
from mpitrain.comm.transport import Array, DType
from mpitrain.errors import CommError, ShapeError

Empty = Callable[[tuple[int, ...], Any], Array]
"""Makes the uninitialised C-contiguous array that a transport fills: of the host, page-locked, or of a device."""

# The dtypes every MPI knows.  Others of the same size travel as their bits.
KNOWN = frozenset(np.dtype(code) for code in "?bhilqBHILQfdFD")
_BITS: dict[int, DType] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


def ready(x: Any) -> Array:
    """`x`, of the host, as a C-contiguous NumPy array in native byte order: itself where it is one, else a copy.

    Raises:
        CommError: x holds Python objects.
    """
    if type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative:
        if x.dtype.hasobject:
            raise CommError("an array of Python objects cannot travel; exchange(obj) carries small JSON values")
        return x
    a = np.asarray(x)
    return ready(np.array(a, dtype=a.dtype.newbyteorder("="), order="C", subok=False))


def on_wire(a: Array) -> Array:
    """A view of a ready array in a dtype of the same size that every MPI knows.

    Raises:
        CommError: no such dtype.
    """
    dtype = a.dtype
    if dtype in KNOWN:
        return a
    if dtype.itemsize not in _BITS:
        raise CommError(f"an array of dtype {dtype} cannot travel: its elements have {dtype.itemsize} bytes")
    bits: Array = a.view(_BITS[dtype.itemsize])
    return bits


def is_inexact(dtype: DType) -> bool:
    """True where the order of a sum shows in its last bits."""
    return dtype.kind in "fc" or dtype.name == "bfloat16"


def is_known(dtype: DType) -> bool:
    """True where every MPI can add up this dtype by itself."""
    return dtype in KNOWN


def check_out(dtype: DType, shape: tuple[int, ...], out: Any, verb: str) -> None:
    """Refuse an `out` that cannot take a result.

    Raises:
        ShapeError: out has another shape.
        CommError: out is read-only, or of a dtype that is neither `dtype` nor float32 for halves.
    """
    if out.shape != shape:
        raise ShapeError(f"{verb}: out has shape {out.shape}, the result {shape}")
    if out.dtype != dtype and not (is_half(dtype) and out.dtype == np.float32):
        raise CommError(f"{verb}: out is {out.dtype}, the array {dtype}; only halves may widen, to float32")
    if not is_writeable(out):
        raise CommError(f"{verb}: out is read-only")


def target(a: Array, shape: tuple[int, ...], out: Any, empty: Empty, verb: str) -> Array:
    """The array that a transport shall fill: `out` itself where it can, else a fresh one.

    Args:
        a: the ready input, which must not be overwritten while it is read.
        shape: of the result.
        out: where the caller wants it, or None.
        empty: makes a fresh one.
        verb: named in errors.
    """
    if out is None:
        return empty(shape, a.dtype)
    if out is a and a.shape == shape and is_writeable(a):
        return a
    if type(out) is type(a) is np.ndarray and out.dtype == a.dtype and out.shape == shape and out.flags.carray:
        fits = True  # the usual case
    else:
        check_out(a.dtype, shape, out, verb)
        fits = type(out) is type(a) and out.flags.c_contiguous and out.dtype.isnative
    if fits and not share_memory(a, out):
        straight: Array = out
        return straight
    if fits and same_memory(a, out):
        return a  # one object: so the transport works in place
    return empty(shape, out.dtype.newbyteorder("="))


def deliver(recv: Array, out: Any) -> Any:
    """Bring a result on the host, or where `out` is, into `out`, unless it stands there."""
    if out is not recv and not (type(out) is type(recv) and same_memory(recv, out)):
        out[...] = to_host(recv) if type(out) is np.ndarray else recv
    return out


def is_writeable(a: Array) -> bool:
    """False for a read-only array; CuPy has none."""
    return type(a) is not np.ndarray or bool(a.flags.writeable)


def share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays of one module may have elements in common."""
    return bool((np if type(a) is np.ndarray else array_module(a)).may_share_memory(a, b))


def same_memory(a: Array, b: Array) -> bool:
    """Whether two C-contiguous arrays of one module are views of exactly the same elements."""
    if a.shape != b.shape or a.dtype != b.dtype or not b.flags.c_contiguous:
        return False
    return address(a) == address(b)


def unmoved(x: Any, out: Any, verb: str) -> Any:
    """The result of a message among one rank: `x` itself, which its new owner may therefore not write.

    Copying would cost an axis of size 1 a pass over memory each message.  So the result is a read-only view: code that
    writes into results says `out=`, on every layout.
    """
    if out is not None:
        check_out(x.dtype, x.shape, out, verb)
        if out is not x:
            out[...] = x
        return out
    xp = array_module(x)
    if xp is not np:
        return xp.asarray(x, order="C")
    view = ready(x).view()
    view.flags.writeable = False
    return view


def dim_of(x: Any, dim: int, verb: str) -> int:
    """`dim` counted from the front.

    Raises:
        ShapeError: x has no such dim.
    """
    shape = shape_of(x)
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"{verb}: an array of shape {shape} has no dim {dim}")
    return dim % len(shape)


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, on whatever device, or of a list of numbers."""
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def cut(a: Array, counts: Sequence[int], dim: int) -> list[Array]:
    """Views of consecutive pieces of `counts` along `dim`."""
    pieces, start = [], 0
    for count in counts:
        pieces.append(a[(slice(None),) * dim + (slice(start, start + count),)])
        start += count
    return pieces


def flat(pieces: Sequence[Array]) -> Array:
    """The pieces' elements, each in C order, one piece after the other."""
    joined = array_module(pieces[0]).empty(sum(piece.size for piece in pieces), pieces[0].dtype)
    start = 0
    for piece in pieces:
        joined[start : start + piece.size].reshape(piece.shape)[...] = piece
        start += piece.size
    return joined


def blocks(a: Array, counts: Sequence[int]) -> list[Array]:
    """Views of the elements of a C-contiguous array, cut into consecutive blocks."""
    return cut(a.reshape(-1), counts, 0)
