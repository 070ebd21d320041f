"""Initial values: functions that fill any slab of a parameter with exactly what the full tensor holds there.

An initialiser is called as `init(name, full_shape, slab, seed)` and returns float64 of the slab's shape.  Random ones
draw from the stream of the parameter's name (`rng.normal`), so a run starts from the same weights on every layout, and
a parameter that comes or goes changes no other.

    normal(0.5)               a token table
    fan_in()                  a matrix: std 1/sqrt(inputs), which keeps the size of activations
    residual(num_layers)      the matrix that ends a residual branch: fan_in / sqrt(2 L)
    truncated(0.03)           a router: normal, without what lies far out
    sinusoids(0.5)            learned positions that start as sinusoids
    zeros, ones               biases and norms

A tensor (E, a, b) of E matrices, one an expert, is drawn as a matrix of E a rows: every element has a place of its own
in the stream, so no two experts start alike, whichever rank holds them.  Their inputs are then dim 1.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from mpitrain import rng
from mpitrain.nn.parameter import Initializer
from mpitrain.spec import slab_shape


def zeros(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
    """All zeros."""
    return np.zeros(slab_shape(slab))


def ones(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
    """All ones."""
    return np.ones(slab_shape(slab))


def normal(std: float) -> Initializer:
    """Normal with mean 0 and the given standard deviation."""

    def init(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
        return rng.normal(seed, name, full_shape, slab) * std

    return init


def fan_in(dim: int | tuple[int, ...] = 0, gain: float = 1.0) -> Initializer:
    """Normal with std gain / sqrt(inputs): with inputs of variance 1, outputs have variance gain**2.

    Args:
        dim: the dim over which the product sums, or several: 0 for y = x @ W, 1 for matrices (E, a, b) of as many
            experts, (1, 2, 3) for filters (out, kh, kw, c); their lengths multiply to the number of inputs.
        gain: factor on the standard deviation.

    Source: LeCun et al. 1998, Efficient BackProp, eq. 16.
    """
    dims = (dim,) if isinstance(dim, int) else dim

    def init(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
        inputs = math.prod(full_shape[each] for each in dims)
        return rng.normal(seed, name, full_shape, slab) * (gain / math.sqrt(inputs))

    return init


def residual(num_layers: int, dim: int = 0) -> Initializer:
    """`fan_in` divided by sqrt(2 L): the sum of the 2 L branches of L layers then starts with variance 1.

    Source: the scaling by 1/sqrt(number of residual layers) of GPT-2 (Radford et al. 2019, section 2.3).
    """
    return fan_in(dim, gain=1.0 / math.sqrt(2 * num_layers))


FAR = 2.0
"""Standard deviations beyond which `truncated` draws again."""


def truncated(std: float) -> Initializer:
    """Normal with mean 0, drawn again where it lies more than two standard deviations out.

    Each element has a sequence of draws of its own, of which it takes the first that is near enough: a pure function of
    its place, as everywhere here.

    Args:
        std: of the normal distribution before anything is drawn again; what is left has 0.88 of it.

    Source: Fedus et al. 2021, arXiv:2101.03961, section 2.4, who draw routers so with std sqrt(0.1 / inputs).
    Cost: about 5 draws of the whole slab, since in each round 1 in 22 values is far out.
    """

    def init(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
        values = rng.normal(seed, name, full_shape, slab)
        for redraw in itertools.count(1):
            far = np.abs(values) > FAR
            if not far.any():
                break
            values[far] = rng.normal(seed, f"{name}, draw {redraw}", full_shape, slab)[far]
        return values * std

    return init


def sinusoids(rms: float) -> Initializer:
    """A table (positions, width) of sines and cosines with the given root mean square.

    Even columns 2i hold sin(pos / 10000**(2i/width)), odd ones the cosine of the same angle.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; their table has rms 1/sqrt(2).
    """

    def init(name: str, full_shape: tuple[int, ...], slab: tuple[slice, ...], seed: int) -> np.ndarray:
        num_positions, width = full_shape
        position = np.arange(num_positions, dtype=np.float64)[slab[0]]
        column = np.arange(width)[slab[1]]
        angle = position[:, None] / 10_000.0 ** (column // 2 * 2 / width)
        table: np.ndarray = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
        return table * (rms * math.sqrt(2.0))

    return init
