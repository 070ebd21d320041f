"""Device arrays go through the host and come back to the device, without any implicit copy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world


class DeviceArray:
    """A stand-in for cupy.ndarray: what is not asked for by name is refused, as CuPy does."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    shape = property(lambda self: self._values.shape)
    dtype = property(lambda self: self._values.dtype)
    ndim = property(lambda self: self._values.ndim)

    def get(self) -> np.ndarray:
        return self._values.copy()

    def reshape(self, shape: Any) -> DeviceArray:
        return DeviceArray(self._values.reshape(shape))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert isinstance(value, DeviceArray), "a host array was written into a device array"
        self._values[index] = value._values

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("cupy")
    module.ndarray = DeviceArray  # type: ignore[attr-defined]
    module.asarray = (  # type: ignore[attr-defined]
        lambda x, order=None: x if isinstance(x, DeviceArray) else DeviceArray(np.array(x))
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_verb_takes_and_gives_device_arrays(cupy: ModuleType, ranks: int) -> None:
    def main() -> None:
        w = world()
        n, me = w.size, w.rank
        host = np.arange(6.0 * n).reshape(2 * n, 3) + me
        mean = np.arange(6.0 * n).reshape(2 * n, 3) * n + sum(range(n))
        x = DeviceArray(host.copy())

        def arrived(y: Any, truth: np.ndarray) -> None:
            assert isinstance(y, DeviceArray)
            np.testing.assert_array_equal(y.get(), truth)

        for deterministic in (False, True):
            w.mode.deterministic = deterministic
            arrived(w.all_reduce(x), mean)
            arrived(w.iall_reduce(x).wait(), mean)
            out = DeviceArray(np.zeros((2 * n, 3)))
            assert w.all_reduce(x, out=out) is out
            arrived(out, mean)
            assert w.iall_reduce(x, out=x).wait() is x
            arrived(x, mean)
            x = DeviceArray(host.copy())
            arrived(w.reduce_scatter(x), np.split(mean, n)[me])
        arrived(w.all_gather(x), np.concatenate([host - me + rank for rank in range(n)]))
        arrived(w.all_to_all(x), np.concatenate([np.split(host - me + rank, n)[me] for rank in range(n)]))
        arrived(w.broadcast(x, n - 1), host - me + n - 1)
        arrived(w.shift(x), host - me + (me - 1) % n)
        if n > 1:
            landing = DeviceArray(np.zeros((2 * n, 3)))
            arrives = w.irecv((2 * n, 3), "f8", (me - 1) % n, out=landing)
            w.isend(x, (me + 1) % n).wait()
            assert arrives.wait() is landing
            arrived(landing, host - me + (me - 1) % n)

    LocalWorld(ranks).run(main)
