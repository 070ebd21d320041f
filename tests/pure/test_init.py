"""Initial values: the right sizes, and any slab equal to that part of the whole."""

import math

import numpy as np
import pytest

from mpitrain.nn import init

INITIALISERS = {
    "zeros": init.zeros,
    "ones": init.ones,
    "normal": init.normal(0.5),
    "fan_in": init.fan_in(),
    "residual": init.residual(12),
    "sinusoids": init.sinusoids(0.5),
}


def full(shape):
    return tuple(slice(0, length) for length in shape)


@pytest.mark.parametrize("name", INITIALISERS)
def test_a_slab_is_that_part_of_the_whole_bit_for_bit(name):
    make = INITIALISERS[name]
    shape = (37, 50)
    whole = make("w", shape, full(shape), 3)
    assert whole.shape == shape
    assert whole.dtype == np.float64
    for slab in [(slice(0, 37), slice(25, 50)), (slice(10, 19), slice(0, 50)), (slice(3, 4), slice(7, 9))]:
        assert np.array_equal(make("w", shape, slab, 3), whole[slab])
    assert make("w", shape, (slice(37, 37), slice(0, 50)), 3).shape == (0, 50)


def test_values_depend_on_name_and_seed():
    shape = (8, 8)
    base = init.normal(1.0)("a", shape, full(shape), 0)
    assert not np.isclose(base, init.normal(1.0)("b", shape, full(shape), 0)).any()
    assert not np.isclose(base, init.normal(1.0)("a", shape, full(shape), 1)).any()
    assert np.array_equal(base, init.normal(1.0)("a", shape, full(shape), 0))


@pytest.mark.parametrize(
    ("make", "std"),
    [
        (init.normal(0.5), 0.5),
        (init.fan_in(), 1 / math.sqrt(400)),
        (init.fan_in(1), 1 / math.sqrt(300)),
        (init.fan_in(gain=2.0), 2 / math.sqrt(400)),
        (init.residual(8), 1 / math.sqrt(400) / 4),
    ],
)
def test_standard_deviations_are_as_said(make, std):
    shape = (400, 300)
    values = make("w", shape, full(shape), 0)
    assert values.std() == pytest.approx(std, rel=4 / math.sqrt(2 * values.size))
    assert abs(values.mean()) < 4 * std / math.sqrt(values.size)


def test_fan_in_of_a_slab_counts_the_full_dim():
    """A rank that holds half of the inputs must not draw larger values."""
    values = init.fan_in()("w", (400, 300), (slice(0, 10), slice(0, 300)), 0)
    assert values.std() == pytest.approx(0.05, rel=0.06)


def test_sinusoids_have_the_given_size_and_the_published_shape():
    table = init.sinusoids(0.5)("positions", (64, 32), full((64, 32)), 0)
    assert math.sqrt((table**2).mean()) == pytest.approx(0.5, rel=1e-12)
    for position, column in ((0, 0), (0, 1), (5, 6), (63, 31)):
        angle = position / 10000 ** (2 * (column // 2) / 32)
        published = math.cos(angle) if column % 2 else math.sin(angle)
        assert table[position, column] == pytest.approx(published * math.sqrt(0.5), abs=1e-12)
