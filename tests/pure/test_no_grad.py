"""Nothing is recorded inside of no_grad, however it is asked for, and everything outside as before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import mpitrain
from mpitrain.autograd import no_grad, ops
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.errors import GraphError

X = Tensor(np.arange(3.0), requires_grad=True)


def test_nothing_inside_is_recorded_and_what_is_made_is_a_constant_outside() -> None:
    with Tape() as tape:
        y = X * X
        with no_grad():
            z = y * X
            assert TAPE.get() is None
        w = y + z
    assert [node.function.title() for node in tape.nodes] == ["mul", "add"]
    assert not z.requires_grad
    grads = tape.run_backward([(w, np.ones(3))])
    assert (grads[X] == 2 * X.data).all()  # not 2 x + 3 x^2


def test_it_may_be_used_again_within_itself_and_after_an_error() -> None:
    quiet = no_grad()
    with Tape() as tape:
        with quiet, quiet:
            ops.exp(X)
            with Tape() as inner, quiet:
                ops.exp(X)
            assert not inner.nodes
        with pytest.raises(ZeroDivisionError), quiet:
            raise ZeroDivisionError
        ops.exp(X)
    assert len(tape) == 1
    assert TAPE.get() is None


def test_as_a_decorator_with_and_without_parentheses() -> None:
    @no_grad
    def plain(x: Tensor, *, factor: float = 2.0) -> Tensor:
        """Twice."""
        return x * factor

    @no_grad()
    def called(x: Tensor) -> Tensor:
        return plain(x, factor=3.0)

    with Tape() as tape:
        assert (called(X).data == 3 * X.data).all()
        assert not plain(X).requires_grad
    assert not tape.nodes
    assert (plain.__name__, plain.__doc__) == ("plain", "Twice.")
    assert mpitrain.no_grad is no_grad


def test_a_generator_is_refused_for_its_body_runs_later() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    for decorate in (no_grad, no_grad()):
        with pytest.raises(GraphError, match=r"no_grad around numbers: .*\nPut `with no_grad\(\):` inside"):
            decorate(numbers)


def test_a_recomputed_function_may_have_a_quiet_part() -> None:
    """What it makes there is the same constant in both of its runs."""

    def part(x: Tensor) -> Tensor:
        with no_grad():
            scale = ops.exp(x)
        return x * scale

    with Tape() as tape:
        y = recompute(part, X)
    grads = tape.run_backward([(y, np.ones(3))])
    np.testing.assert_allclose(grads[X], np.exp(X.data))


def test_ranks_that_are_threads_may_share_one() -> None:
    quiet = no_grad()

    def body() -> int:
        ranks = world()
        with Tape() as tape:
            with quiet:
                ranks.all_reduce(np.ones(2))  # another rank enters and leaves meanwhile
                ops.exp(X)
            ops.exp(X)
        return len(tape)

    assert LocalWorld(3).run(body) == [1, 1, 1]
