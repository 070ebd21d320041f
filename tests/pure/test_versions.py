"""Versions of the weights: each unit goes back through the weights with which it went forward, and none is written."""

import numpy as np
import pytest

from mpitrain.autograd import Tape, Tensor, ops
from mpitrain.errors import GraphError
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import AdamW, Sgd, elementwise
from mpitrain.optim.versions import Versions
from mpitrain.spec import Shard

AXES = ("pp", "edp", "ep", "cp", "tp")
X = np.arange(6.0).reshape(2, 3) / 7


def parameters():
    """Three weights in two flat buffers."""
    specs = {"w": {}, "n": {"edp": Shard(0)}, "v": {}}
    made = [Parameter(name, (3, 3), spec, init=normal(1.0), decay=name != "n") for name, spec in specs.items()]
    return made, materialize(made, dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 1), 0, np.dtype(np.float64))


def pool(rule="newest", kind=Sgd):
    made, flats = parameters()
    return made, Versions(flats, kind(made, lr=0.1), rule)


def forward(made, x=X):
    with Tape() as tape:
        y = ops.linear(Tensor(x, requires_grad=True), made[0])
        y = ops.linear(y * made[1][0], made[2])
    return tape, y


def update(made, versions, seed=0):
    generator = np.random.default_rng(seed)
    for p in made:
        p.grad[...], p.touched = generator.normal(size=p.grad.shape), True
    versions.renew()
    versions.optimizer.step()


def bound(versions):
    """What the parameters' arrays hold now; they are views of the flat buffers."""
    assert all(p.data.base is flat.weights for flat in versions.flats for p in flat.parameters)
    return [np.concatenate([p.data.reshape(-1) for p in flat.parameters]) for flat in versions.flats]


def without_flush(stage, ranks, number):
    """1F1B that fills and drains once: forwards until the first gradient can be here, then one backward for each."""
    forwards = min(ranks - stage, number)
    row = [("F", j) for j in range(forwards)]
    for j in range(number):
        row += [("B", j)] + [("F", forwards + j)] * (forwards + j < number)
    return row


def run_row(made, versions, row, micros):
    """Numbers of the versions that forwards used, and of versions alive after each update; micros: a batch."""
    used, alive = [], []
    for kind, micro in row:
        if kind == "F":
            used.append(versions.enter(micro, micro // micros))
        else:
            versions.leave(micro)
            if micro % micros == micros - 1:
                update(made, versions, micro)
                alive.append(versions.alive)
    return used, alive


@pytest.mark.parametrize(
    ("stage", "table", "peak"),
    [
        (0, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6], 4),
        (1, [0, 0, 0, 1, 2, 3, 4, 5, 6, 7], 3),
        (2, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8], 2),
        (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 1),
    ],
)
def test_stashing_uses_the_newest_version_and_keeps_as_many_as_units_in_flight(stage, table, peak):
    """T8.1."""
    made, versions = pool()
    used, alive = run_row(made, versions, without_flush(stage, 4, 10), 1)
    assert used == table
    assert versions.peak == max(alive) == peak
    assert versions.number == 10
    assert not versions.held


@pytest.mark.parametrize("stage", range(4))
def test_double_buffering_uses_the_version_before_and_keeps_two(stage):
    """T8.4."""
    made, versions = pool("previous")
    used, alive = run_row(made, versions, without_flush(stage, 4, 16), 4)
    assert used == [0] * 8 + [1] * 4 + [2] * 4
    assert alive == [2] * 4
    assert versions.peak == 2


def test_every_unit_sees_its_own_weights_whatever_the_order():
    generator = np.random.default_rng(0)
    for trial in range(20):
        rule = ("newest", "previous")[trial % 2]
        made, versions = pool(rule, AdamW)
        history = [bound(versions)]  # by version
        flying, batch, unit, vectors = {}, 0, 0, set()
        for _ in range(60):
            choice = generator.integers(3)
            if choice == 0 and len(flying) < 6:
                number = versions.enter(unit, batch)
                assert number == (versions.number if rule == "newest" else max(batch - 1, 0))
                flying[unit] = (number, [p.data for p in made])
                assert all(map(np.array_equal, bound(versions), history[number]))
                unit += 1
            elif choice == 1 and flying:
                done = list(flying)[generator.integers(len(flying))]
                versions.leave(done)
                del flying[done]
            elif choice == 2 and (rule == "newest" or not any(number < batch - 1 for number, _ in flying.values())):
                update(made, versions, len(history))
                history.append(bound(versions))
                batch += 1
            vectors |= {id(flat.weights) for flat in versions.flats}
            for number, arrays in flying.values():
                before = np.concatenate([history[number][0], history[number][1]])
                assert np.array_equal(np.concatenate([arrays[i].reshape(-1) for i in (0, 2, 1)]), before)
        assert len(vectors) <= 2 * versions.peak
        versions.settle()
        assert all(map(np.array_equal, bound(versions), history[-1]))
        assert versions.alive == 1


def test_buffers_are_used_again_and_joined_once(monkeypatch):
    joins = []
    join = elementwise.join
    monkeypatch.setattr(elementwise, "join", lambda *of: joins.append(1) or join(*of))
    made, versions = pool()
    run_row(made, versions, without_flush(0, 4, 40), 1)
    assert versions.peak == 4
    assert len(joins) == 4


def test_weights_that_nobody_holds_are_written_where_they_lie():
    made, versions = pool()
    arrays = [p.data for p in made]
    run_row(made, versions, without_flush(0, 1, 5), 1)
    assert all(p.data is array for p, array in zip(made, arrays, strict=True))
    assert versions.peak == 1


def test_an_update_is_that_of_one_buffer():
    for kind in (Sgd, AdamW):
        made, versions = pool("newest", kind)
        alone, _ = parameters()
        method = kind(alone, lr=0.1)
        for step in range(6):
            versions.enter(step, step)
            if step > 2:
                versions.leave(step - 3)
            update(made, versions, step)
            generator = np.random.default_rng(step)
            for p in alone:
                p.grad[...], p.touched = generator.normal(size=p.grad.shape), True
            method.step()
            assert all(np.array_equal(p.data, q.data) for p, q in zip(made, alone, strict=True))


def test_a_tape_goes_back_through_the_weights_that_it_went_forward_with():
    made, versions = pool()
    expected, _ = parameters()
    reference, y = forward(expected)
    dx = next(iter(reference.run_backward([(y, X)]).values()))
    versions.enter(0, 0)
    tape, y = forward(made)
    update(made, versions)
    versions.enter(1, 1)
    forward(made)
    update(made, versions)
    for p in made:
        p.touched = False
    (mine,) = tape.run_backward([(y, X)]).values()
    assert np.array_equal(mine, dx)
    assert all(np.array_equal(p.grad, q.grad) for p, q in zip(made, expected, strict=True))


def test_a_version_that_is_written_while_a_tape_needs_it_is_refused():
    made, versions = pool()
    versions.enter(0, 0)
    tape, y = forward(made)
    versions.optimizer.step()  # no version of its own
    with pytest.raises(GraphError, match="w was written between forward and backward"):
        tape.run_backward([(y, X)])


@pytest.mark.parametrize("rule", ["newest", "previous"])
def test_a_buffer_that_is_used_again_too_early_is_refused(rule):
    made, versions = pool(rule)
    versions.enter(0, 0)
    tape, y = forward(made)
    versions.leave(0)  # its tape was not walked
    update(made, versions)
    update(made, versions)  # 2BW keeps it one update longer
    with pytest.raises(GraphError, match="w was written between forward and backward"):
        tape.run_backward([(y, X)])


def test_no_count_of_writes_comes_twice():
    made, versions = pool()
    seen = {made[0].version}
    for step in range(8):
        versions.enter(step, step)
        if step > 1:
            versions.leave(step - 2)
        update(made, versions, step)
        assert made[0].version > max(seen)
        seen.add(made[0].version)


def test_a_tape_does_not_count_the_weights_that_it_keeps_alive():
    made, versions = pool()
    versions.enter(0, 0)
    tape, _ = forward(made)
    before = tape.nbytes
    update(made, versions)
    assert made[0].data.base is not tape._weights[0][1].base
    assert tape.nbytes == before


def test_after_a_row_everything_sees_the_newest_version_and_batches_count_anew():
    made, versions = pool("previous")
    run_row(made, versions, without_flush(0, 2, 6), 2)
    versions.enter(6, 3)
    forward(made)
    versions.leave(6)
    old = bound(versions)
    versions.settle()
    newest = bound(versions)
    assert not np.array_equal(old[0], newest[0])
    assert versions.alive == 1
    assert run_row(made, versions, without_flush(0, 2, 6), 2)[0] == [3, 3, 3, 3, 4, 4]
    assert versions.peak == 2


def test_units_in_flight_are_given_up_when_a_row_breaks_off():
    made, versions = pool()
    for unit in range(3):
        versions.enter(unit, unit)
        update(made, versions, unit)
    newest = bound(versions)
    versions.enter(3, 3)
    versions.settle()
    assert not versions.held
    assert versions.alive == 1
    assert all(map(np.array_equal, bound(versions), newest))


def test_a_saved_state_is_loaded_into_the_newest_version():
    made, versions = pool()
    run_row(made, versions, without_flush(0, 3, 5), 1)
    versions.settle()
    for p in made:
        p.data[...] = 2.0  # as a checkpoint is read
    versions.enter(0, 0)
    assert all((weights == 2.0).all() for weights in bound(versions))
    assert all((flat.weights == 2.0).all() for flat in versions.flats)


def test_mistakes_of_the_caller_are_caught():
    _, versions = pool()
    versions.enter(0, 0)
    with pytest.raises(AssertionError, match="in flight already"):
        versions.enter(0, 0)
    _, versions = pool("previous")
    with pytest.raises(AssertionError, match="batch 3 uses version 2"):
        versions.enter(0, 3)
    made, flats = parameters()
    with pytest.raises(AssertionError):
        Versions(flats, Sgd(made), "oldest")
