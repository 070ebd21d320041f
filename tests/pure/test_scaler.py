"""Scales of gradients: what they do step by step, and what they refuse."""

import math
import re

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor
from mpitrain.autograd.ops.branch import enter_branch, leave_branch
from mpitrain.backend import dtype_of
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.nn.init import zeros
from mpitrain.nn.parameter import Parameter
from mpitrain.optim.scaler import BlockScaler, LossScaler


def run(scaler, events):
    """The scale after each step; 1 is an overflow."""
    return [scaler.settle([bool(event)]) or scaler.scale for event in events]


def test_the_loss_scale_follows_its_rule():
    """T21.2."""
    scaler = LossScaler(2.0**16, window=4, hysteresis=2, floor=1.0)
    expected = [65536, 65536, 32768, 16384, 16384, 16384, 16384, 32768, 32768, 16384]
    assert run(scaler, [1, 0, 1, 1, 0, 0, 0, 0, 1, 1]) == expected


def test_the_scale_stops_at_its_floor_with_a_cause():
    """C14: an overflow that no scale mends."""
    scaler = LossScaler(4.0, hysteresis=1, floor=1.0)
    assert run(scaler, [1, 1]) == [2.0, 1.0]
    assert "even at the lowest loss scale, 1" in scaler.settle([True])


def test_so_many_skipped_steps_in_a_row_are_enough():
    """C14."""
    scaler = LossScaler(2.0**60, patience=20)
    causes = [scaler.settle([True]) for _ in range(20)]
    assert causes[:19] == [None] * 19
    assert causes[19] == "20 steps in a row were skipped (the loss scale is 2^41 by now)"
    scaler = LossScaler(2.0**30, window=0, patience=1)
    assert scaler.settle([True]) == "1 steps in a row were skipped (the loss scale stays 2^30)"
    scaler = LossScaler(2.0**60, patience=3)
    assert [scaler.settle([event]) for event in (True, True, False, True, True)] == [None] * 5


def test_a_shorter_window_than_clean_steps_so_far_doubles_at_once():
    """As after a resume with another window."""
    scaler = LossScaler(4.0, window=2)
    scaler.load_state({"scale": 4.0, "clean": 7, "left": 1, "skipped": 0})
    assert run(scaler, [0, 0, 0]) == [8.0, 8.0, 16.0]


def test_a_fixed_scale_skips_and_stays():
    scaler = LossScaler(2.0**10, window=0, floor=2.0**10)
    assert run(scaler, [1, 0, 1] + [0] * 5000) == [1024.0] * 5003


def test_a_scale_is_a_power_of_two():
    for scale in (1000.0, 3.0, 0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=re.escape(f"{scale:g} is not a power of two")):
            LossScaler(scale)
    with pytest.raises(ConfigError, match="do not go together"):
        LossScaler(1.0, floor=2.0)


def test_only_the_branch_that_overflows_is_lowered_and_not_again_so_soon():
    """T22.2."""
    scaler = BlockScaler([f"blocks.{number}." for number in range(8)])
    bad = [False, *(number == 5 for number in range(8))]
    clean = [False] * 9
    scaler.settle(bad)
    assert scaler.scales[5] == 2.0**13 / math.sqrt(2.0)
    assert all(scaler.scales[number] == 2.0**13 for number in range(8) if number != 5)
    for _ in range(99):
        scaler.settle(clean)
    before = [*scaler.scales]
    scaler.settle(bad)  # 100 steps later
    assert scaler.scales == before
    for _ in range(25):
        scaler.settle(clean)
    before = [*scaler.scales]
    scaler.settle(bad)  # 126 steps after it was lowered
    assert scaler.scales[5] == before[5] / math.sqrt(2.0)
    assert scaler.skipped == 1


def test_a_branch_doubles_in_a_thousand_clean_steps_up_to_its_bound():
    """T22.3."""
    scaler = BlockScaler(["a."], start=2.0**10, highest=2.0**12)
    for _ in range(1000):
        scaler.settle([False, False])
    assert scaler.scales[0] == pytest.approx(2.0**11, rel=1e-6)
    for _ in range(2000):
        scaler.settle([False, False])
    assert scaler.scales[0] == 2.0**12


def test_parameters_belong_to_the_branch_that_their_name_begins_with():
    scaler = BlockScaler(["blocks.1.mlp.", "blocks.11.mlp."])
    names = {"blocks.1.mlp.up.weight": 1, "blocks.11.mlp.up.weight": 2, "blocks.1.norm.weight": 0, "table.weight": 0}
    for name, group in names.items():
        assert scaler.group(Parameter(name, (2,), init=zeros)) == group
    added, router = (Parameter(f"blocks.1.mlp.{name}", (2,), init=zeros) for name in ("down.bias", "router.weight"))
    added.in_full = added.outside = router.in_full = True
    assert scaler.group(added) == 0  # with the residual
    assert scaler.group(router) == 1
    assert scaler.inverse(0) == 1.0
    assert scaler.inverse(1) == 2.0**-13


@pytest.mark.parametrize("make", [lambda: LossScaler(2.0**8, window=3), lambda: BlockScaler(["a.", "b."])])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(make):
    one, two = make(), make()
    events = np.random.default_rng(0).random((400, one.groups)) < 0.05
    for event in events[:200]:
        one.settle([*event])
    two.load_state(one.state_dict())
    for event in events[200:]:
        assert one.settle([*event]) == two.settle([*event])
        assert one.state_dict() == two.state_dict()


def test_a_state_that_is_none_is_refused():
    for state in (
        {},
        {"scale": 2.0**500, "clean": 0, "left": 1, "skipped": 0},
        {"scale": 3.0, "clean": 0, "left": 1, "skipped": 0},
        {"scale": 4.0, "clean": -1, "left": 1},
    ):
        with pytest.raises(CheckpointError, match="power of two"):
            LossScaler().load_state(state)
    for state in ({}, {"scales": [1.0], "lowered": [0], "steps": 1, "skipped": 0}):
        with pytest.raises(CheckpointError, match="2 branches"):
            BlockScaler(["a.", "b."]).load_state(state)


# ------------------------------------------------------------------------------------------------- ends of a branch


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_branch_has_scaled_gradients_and_the_stream_has_not(half):
    scaler = BlockScaler(["a."], start=2.0**10)
    x = Tensor(np.array([1.0, 2.0, 3.0], np.float32), requires_grad=True)
    with Tape() as tape:
        inside = enter_branch(x, scaler, 0, dtype_of(half))
        y = leave_branch(inside * inside, scaler, 0, np.dtype(np.float32))
    assert (inside.dtype, y.dtype) == (dtype_of(half), np.float32)
    seen = []
    node = tape.nodes[1]
    original = node.function.backward

    def looking(grad, *args, **kwargs):
        seen.append(np.asarray(grad, np.float32))
        return original(grad, *args, **kwargs)

    node.function = type("Looking", (node.function,), {"backward": staticmethod(looking)})
    grads = tape.run_backward([(y, np.full(3, 1e-6, np.float32))])
    np.testing.assert_allclose(seen[0], 1.024e-3, rtol=0.01)
    np.testing.assert_allclose(grads[x], 2e-6 * x.data, rtol=0.01)
    assert grads[x].dtype == np.float32


def test_what_overflows_in_a_branch_does_not_leave_it():
    """The filter of Ramesh et al. 2021, appendix D.1: entries that are not finite become 0."""
    scaler = BlockScaler(["a."], start=2.0**13)
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    with Tape() as tape:
        y = leave_branch(enter_branch(x, scaler, 0, np.float16), scaler, 0, np.float32)
    grads = tape.run_backward([(y, np.array([1.0, 100.0, np.nan], np.float32))])
    np.testing.assert_array_equal(grads[x], [1.0, 0.0, 0.0])
