"""Experts whose messages travel while others compute: every check of tests/checks_overlap.py, and what is around."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_overlap as checks
from delay import Delayed, delayed

from mpitrain.autograd.lazy import Arriving
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.debug.states import StateChecker
from mpitrain.errors import CommError, ConfigError, ShapeError, StateError
from mpitrain.events import Event, listen
from mpitrain.parallel.expert.experts import Experts
from mpitrain.parallel.expert.overlap import Mail, arrive, send_off
from mpitrain.spec import Shard


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("check", checks.MESSAGES, ids=lambda check: check.__name__)
def test_messages(check: Any, ranks: int) -> None:
    LocalWorld(ranks, timeout=20).run(lambda: check(world()))


@pytest.mark.parametrize("name", checks.RUNS)
def test_a_training_by_halves_is_the_training(name: str) -> None:
    LocalWorld(checks.ranks_of(name), timeout=60).run(lambda: checks.TRAININGS[name](world()))


def test_all_of_it_in_checked_mode() -> None:
    def main() -> None:
        with world().checked():
            for check in checks.MESSAGES:
                check(world())
        checks.trains_alike_in_checked_mode(world())

    LocalWorld(2, timeout=60).run(main)


def pause(seconds: float) -> None:
    """What this rank computes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_message_travels_while_the_rank_computes() -> None:
    """On a transport whose messages take 40 ms a rank that computes for 50 ms has nothing left to wait for, forth and
    back."""

    def main() -> tuple[float, float]:
        w = world()
        slow = w.transport
        assert isinstance(slow, Delayed)
        x = Tensor(np.ones((4, 2)), requires_grad=True)
        mail = Mail(w, [2, 2], [2, 2])
        with Tape() as tape:
            (promise,) = send_off(x, w, mail)
            pause(0.05)
            y = arrive(w, (promise, mail))
        forth = slow.waited
        walk = tape.backward([(y, np.ones(y.shape))])
        next(walk)  # of arrive: the gradient is on its way
        pause(0.05)
        for _ in walk:
            pass
        w.barrier()
        return forth, slow.waited - forth

    for forth, back in LocalWorld(2, wrap=delayed(0.04)).run(main):
        assert forth < 0.01
        assert back < 0.05  # the barrier's own


def on_two(main: Any) -> Any:
    return LocalWorld(2, timeout=20).run(main)


def test_a_gradient_on_its_way_is_a_recipe_that_listeners_can_look_at() -> None:
    def main() -> None:
        w = world()
        heard: list[Any] = []

        def listener(event: Event) -> None:
            if event.kind == "op" and event.phase == "end" and event.name == "arrive.backward":
                (grad,) = event.info["grads"]
                assert isinstance(grad, Arriving)
                heard.extend((grad.array(), grad.unrounded(), grad.dtype, np.full((4, 3), 1.0, np.float32)))
                grad.write(heard[-1], add=True)

        x = Tensor(np.ones((4, 3), np.float16), requires_grad=True)
        mail = Mail(w, [1, 3], [1 + 2 * w.rank] * 2)
        with listen(listener), Tape() as tape:
            y = arrive(w, *zip(send_off(x, w, mail), (mail,), strict=True))
            grad = tape.run_backward([(y, np.full(y.shape, 1.0 + w.rank, np.float16))])[x]
        array, wide, dtype, total = heard
        assert array is grad
        assert (array.dtype, wide.dtype, dtype) == (np.float16, np.float32, np.float16)
        assert array[:, 0].tolist() == [1, 2, 2, 2]
        assert (total == array + 1).all()
        assert (wide == array).all()

    on_two(main)


def test_a_tape_prints_what_is_between() -> None:
    def main() -> str:
        w = world()
        mails = Mail(w, [1, 1], [1, 1]), Mail(w, [1, 0], [1, 0]) if w.rank == 0 else Mail(w, [0, 1], [0, 1])
        with Tape() as tape:
            promises = send_off(Tensor(np.ones((3, 2)), requires_grad=True), w, *mails)
            arrive(w, *zip(promises, mails, strict=True))
        return "\n".join(map(str, tape.nodes))

    assert on_two(main)[0].splitlines() == [
        "%1, %2 = send_off(%0; world)  (2, 2) float64  (1, 2) float64",
        "%3 = arrive(%1, %2; world)  Shard(0) -> Shard(0)  (3, 2) float64",
    ]


@pytest.mark.parametrize("forgets", [False, True])
def test_experts_of_rows_that_have_not_arrived_are_a_state_error(forgets: bool) -> None:
    def main() -> None:
        mesh = Mesh(world(), ep=2)
        layer = Experts("experts", 4, checks.WIDTH, 8, mesh.ep, mesh.tp)
        layer.materialize(mesh)
        checker = StateChecker(layer.parameters(), mesh)
        x = Tensor(np.ones((4, checks.WIDTH), np.float32), requires_grad=True)
        mail, back = Mail(mesh.ep, [2, 2], [2, 2]), Mail(mesh.ep, [2, 2], [2, 2])
        with listen(checker), Tape() as tape:
            checker.start()
            checker.declare(x, {"ep": Shard(0)})
            (rows,) = send_off(x, mesh.ep, mail)
            if not forgets:
                rows = arrive(mesh.ep, (rows, mail))
            rows = layer._through(rows, np.array([[1, 1], [1, 1]]), slice(None))
            y = arrive(mesh.ep, *zip(send_off(rows, mesh.ep, back), (back,), strict=True))
            assert checker.states(y)["ep"] == Shard(0)
            tape.run_backward([(y, x.data)])

    if forgets:
        with pytest.raises(StateError, match="an all_to_all of the rows to their experts is missing before it"):
            on_two(main)
    else:
        on_two(main)


def test_rows_that_no_one_expects_are_refused_by_threads() -> None:
    def main() -> None:
        w = world()
        w.iall_to_all(np.zeros((4, 3)), counts=([1, 3] if w.rank == 0 else [2, 2], [1, 2])).wait()

    with pytest.raises(CommError, match="sends 9 elements to rank 1, which expects 3"):
        on_two(main)


def test_experts_without_halves_are_refused() -> None:
    def main() -> None:
        mesh = Mesh(world(), ep=2)
        Experts("experts", 2, 4, 4, mesh.ep, Communicator("tp", Alone(), [0]), overlap=True)

    with pytest.raises(ShapeError, match="2 experts over 2 ranks leave one here, which has no halves"):
        on_two(main)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--experts 4", "no tokens travel"),
        ("--experts 4 --ep 4", "a rank has a single expert, so there are no halves"),
        ("", "is for a mixture of experts"),
    ],
)
def test_the_flag_is_refused_where_it_means_nothing(flags: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(["--expert-overlap", *flags.split()])


def test_the_flag_is_off_unless_asked_for() -> None:
    assert not parse(["--experts", "4", "--ep", "2"]).expert_overlap
    assert parse(["--experts", "4", "--ep", "2", "--expert-overlap"]).expert_overlap
