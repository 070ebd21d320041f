"""What PowerSGD sends is what was predicted, to the byte: 2 (N-1)/N beta (r sum(n + m) + what is not compressed)."""

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_ledger as checks

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.models.gpt import GPTConfig
from mpitrain.parallel.powersgd import Choice, PowerSgd
from mpitrain.plan.memory import left_out
from mpitrain.plan.traffic import DATA, Step, traffic
from mpitrain.routing import Routing

ALL = Choice(2, exact=())
EXPERTS = replace(checks.SIZES, routing=Routing(4, 2, "gshard"))


@pytest.mark.parametrize(
    ("ranks", "sizes", "how"),
    [
        (2, checks.SIZES, {"dp": 2}),
        (3, checks.SIX, {"dp": 3, "batch": 12}),
        (4, checks.SIZES, {"dp": 2, "tp": 2, "sequence_parallel": True}),
        (4, replace(checks.SIZES, tied=True), {"dp": 2, "pp": 2, "microbatches": 2}),
        (4, replace(checks.SIZES, kv_heads=1), {"tp": 2, "cp": 2}),
        (4, EXPERTS, {"dp": 4, "ep": 2}),
        (4, EXPERTS, {"dp": 2, "ep": 2, "tp": 2, "dtype": np.float16}),
        (4, checks.SIZES, {"dp": 2, "tp": 2, "dtype": np.float16, "scaled": True}),
        (4, checks.SIZES, {"tp": 4, "dtype": np.float64}),
    ],
    ids=lambda value: "" if isinstance(value, GPTConfig) else str(value),
)
@pytest.mark.parametrize(
    "choice", [ALL, Choice(1), Choice(40, exact=(), worth=0.0)], ids=["rank 2", "no tables", "all"]
)
def test_every_layout_sends_what_was_predicted(ranks, sizes, how, choice):
    """Words of a vocabulary of 17 divide over no tp: the ranks' parts of table and head are of different sizes."""
    LocalWorld(ranks).run(lambda: checks.sends_what_was_predicted(world(), sizes, compression=choice, **how))


def test_bytes_of_one_large_matrix():
    """T26.5: r (n + m) numbers in the place of n m, a factor of 204.8 for 1024 x 4096 and rank 4."""
    choice = Choice(4, exact=())
    matrices = choice.of("up", (1024, 4096), (1024, 4096), stacked=False)
    payload = 4 * (matrices.left + matrices.right)
    assert (payload, 4 * 1024 * 4096, 4 * 1024 * 4096 / payload) == (81_920, 16_777_216, 204.8)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_the_formula_for_the_default_model(rank):
    h, L, V, s, d = 128, 2, 256, 64, 4
    step = Step(GPTConfig(V, L, h, 4, s), 16, dp=d)
    small = V * h + V * h + s * h + L * 13 * h + 2 * h  # tables, head, biases and norms
    factors = L * rank * (4 * h + 2 * h + 5 * h + 5 * h)
    sent = traffic(replace(step, compression=Choice(rank))).total(DATA, "gradients")
    assert sent == 2 * Fraction(d - 1, d) * 4 * (factors + small)
    assert traffic(step).total(DATA, "gradients") == 2 * Fraction(d - 1, d) * 4 * (L * 12 * h * h + small)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, {}), (4, {"dp": 2, "tp": 2, "dtype": np.float16}), (4, {"dp": 2, "ep": 2, "tp": 2}), (4, {"dp": 2, "pp": 2})],
    ids=str,
)
@pytest.mark.parametrize("feedback", [True, False])
def test_what_is_held_for_it_is_what_was_predicted(ranks, how, feedback):
    def check():
        step = Step(EXPERTS, 16, **checks.rank_of(world().rank, {"dp": 2, **how}), **{"dp": 2, **how}, compression=ALL)
        _, executor, _ = checks.built(world(), step)
        reducer = PowerSgd(executor.model.flats, executor.mesh, ALL.rank, exact=(), feedback=feedback)
        assert sum(array.nbytes for array in reducer.pending_gradients) == left_out(step, feedback)

    LocalWorld(ranks).run(check)
