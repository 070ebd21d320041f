"""A communicator to which checks give arrays of the host, and whose messages are arrays of a device.

    OnDevice(world(), cupy)      everything that checks_comm.py and checks_slices.py ask, asked of device arrays

What a check brings is copied to the device, as it lies in memory; what arrives is copied back, into `out` where one is
given.  An array that is a part of `out`, or `out` itself, is so on the device, too.  What CuPy cannot hold stays here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import address
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.request import Request
from mpitrain.comm.wire import KNOWN

BRING = (
    "all_reduce iall_reduce all_gather iall_gather reduce_scatter ireduce_scatter all_to_all iall_to_all"
    " broadcast shift send isend"
).split()


class OnDevice:
    """Verbs and attributes as of `Communicator`."""

    def __init__(self, axis: Communicator, cupy: Any) -> None:
        self._axis, self._cupy = axis, cupy

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._axis, name)
        return self._carried(found) if name in BRING else found

    def group(self, ranks: Sequence[int], name: str) -> OnDevice:
        return OnDevice(self._axis.group(ranks, name), self._cupy)

    def recv(self, *args: Any, out: Any = None, **how: Any) -> Any:
        return self._received(self._axis.recv, args, out, how)

    def irecv(self, *args: Any, out: Any = None, **how: Any) -> Any:
        return self._received(self._axis.irecv, args, out, how)

    def _received(self, verb: Callable[..., Any], args: Any, out: Any, how: Any) -> Any:
        there = None if out is None else self._up(out)
        return self._down(verb(*args, out=there, like=self._cupy.empty(0), **how), there, out)

    def _carried(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *args: Any, out: Any = None, **how: Any) -> Any:
            there = None if out is None else self._up(out)
            given = there if x is out and x is not None else self._part(x, out, there)
            if there is not None:
                how["out"] = there
            return self._down(verb(given, *args, **how), there, out)

        return call

    def _part(self, x: Any, out: Any, there: Any) -> Any:
        if there is None or not isinstance(x, np.ndarray) or not (x.flags.c_contiguous and out.flags.c_contiguous):
            return self._up(x)
        start = (address(x) - address(out)) // out.itemsize
        inside = x.dtype == out.dtype and start >= 0 and start + x.size <= out.size
        return there.reshape(-1)[start : start + x.size].reshape(x.shape) if inside else self._up(x)

    def _up(self, x: Any) -> Any:
        holds = isinstance(x, np.ndarray) and x.dtype.isnative and (x.dtype in KNOWN or x.dtype.itemsize == 2)
        return self._cupy.asarray(x) if holds and x.flags.writeable and x.dtype.char != "g" else x

    def _down(self, made: Any, there: Any, out: Any) -> Any:
        if isinstance(made, Request):
            return _Later(made, lambda result: self._down(result, there, out))
        if out is not None and there is not out:
            assert made is there
            out[...] = made.get()
            return out
        return made.get() if isinstance(made, self._cupy.ndarray) else made


class _Later(Request):
    """A request whose result is brought down once it is there."""

    def __init__(self, request: Request, down: Callable[[Any], Any]) -> None:
        super().__init__(request, lambda: down(request.wait()), lambda pending: pending.wait())
