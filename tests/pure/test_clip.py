"""The global norm: each element once, the same number on every rank, and nothing changed where it is not finite."""

import math

import numpy as np
import pytest

from mpitrain.nn.init import zeros
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.clip import clip, coefficient, first_not_finite, global_norm, scale, sum_of_squares


def alone(squares):
    return squares


def test_a_long_gradient_is_scaled_to_the_bound_and_a_short_one_left_alone():
    grads = [np.array([[3.0, 0.0]]), np.array([4.0])]
    result = clip(grads, grads, 1.0, alone)
    assert result.norm == 5.0
    assert result.finite
    assert result.coefficient == pytest.approx(0.2, rel=1e-6)
    assert math.sqrt(sum_of_squares(grads)) == pytest.approx(1.0, rel=1e-6)
    before = [g.copy() for g in grads]
    assert clip(grads, grads, 2.0, alone).coefficient == 1.0
    assert all(map(np.array_equal, grads, before))
    assert clip(grads, grads, None, alone).coefficient == 1.0
    assert clip(grads, grads, math.inf, alone).coefficient == 1.0


def test_stages_clip_by_the_norm_of_the_whole():
    """C28, T28.3: stage norms 3 and 4, bound 1: norm 5 on both, 0.6 and 0.8 left."""
    squares = [sum_of_squares([np.array([3.0])]), sum_of_squares([np.array([4.0])])]
    for value, left in ((3.0, 0.6), (4.0, 0.8)):
        grads = [np.array([value])]
        asked = []

        def over_both_stages(local, asked=asked):
            asked.append(local)
            return sum(squares)

        result = clip(grads, grads, 1.0, over_both_stages)
        assert asked == [value**2]
        assert result.norm == 5.0
        assert grads[0][0] == pytest.approx(left, abs=1e-6)


def test_a_rank_that_counts_nothing_scales_what_it_holds():
    """C29, C46: a replica that another rank counts, and a stage without parameters, take part with zero."""
    grads = [np.array([3.0])]
    assert clip([], grads, 1.0, lambda local: local + 25.0).norm == 5.0
    assert grads[0][0] == pytest.approx(0.6, rel=1e-6)
    assert clip([], [], 1.0, lambda local: local + 25.0).norm == 5.0


def test_squares_of_float32_are_summed_in_float64():
    assert sum_of_squares([np.full(3, 1e30, np.float32)]) == pytest.approx(3e60, rel=1e-6)
    values = np.full(3_000_001, 1e-4, np.float32)  # a float32 sum drifts by 1e-3 and more
    assert sum_of_squares([values]) == pytest.approx(3_000_001 * float(np.float32(1e-4)) ** 2, rel=1e-12)
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(300, 200))
    assert sum_of_squares([matrix, matrix[:, ::3]]) == pytest.approx((matrix**2).sum() + (matrix[:, ::3] ** 2).sum())
    assert sum_of_squares([]) == sum_of_squares([np.empty((0, 3))]) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_reported_and_scales_nothing(bad):
    """T28.4: also on the ranks whose own gradients are finite."""
    grads = [np.array([1.0, 2.0]), np.array([bad, 1.0])]
    result = clip(grads, grads, 1.0, alone)
    assert not result.finite
    assert math.isnan(result.coefficient)
    assert grads[0].tolist() == [1.0, 2.0]
    healthy = [np.array([10.0])]
    result = clip(healthy, healthy, 1.0, lambda local: local + bad * bad)
    assert not result.finite
    assert healthy[0][0] == 10.0


def test_the_parameter_behind_a_bad_norm_is_named():
    named = [Parameter(name, (2,), init=zeros) for name in ("a", "b", "c")]
    for p in named:
        p.grad = np.zeros(2)
    assert first_not_finite(named) is None
    named[1].grad[1] = math.nan
    named[2].grad[0] = math.inf
    assert first_not_finite(named) == "b"


def test_the_pieces_stand_alone():
    assert global_norm(9.0, lambda local: local + 16.0) == 5.0
    assert math.isnan(global_norm(math.nan, alone))
    assert coefficient(5.0, 1.0) == 1.0 / (5.0 + 1e-6)
    assert coefficient(0.0, 1.0) == 1.0
    array = np.array([2.0, 4.0], np.float32)
    scale([array], 0.5)
    assert array.tolist() == [1.0, 2.0]


def test_clipping_equals_pytorch():
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    grads = [generator.normal(size=shape) for shape in ((4, 5), (7,), (2, 3, 2))]
    twins = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in grads]
    for twin, g in zip(twins, grads, strict=True):
        twin.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(twins, 0.7)
    assert clip(grads, grads, 0.7, alone).norm == pytest.approx(float(norm), rel=1e-13)
    assert all(np.allclose(twin.grad.numpy(), g, rtol=1e-13, atol=0) for twin, g in zip(twins, grads, strict=True))
