"""ZeRO: a rank keeps what the formulas say, to the byte, and whole weights of two parts at most (T23.4)."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain import train
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.debug import owners
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.plan.memory import gathered
from mpitrain.plan.traffic import Step
from mpitrain.plan.traffic.slabs import shares
from mpitrain.routing import Routing

slow = pytest.mark.slow
STAGES = (1, 2, 3)
SWITCH = replace(checks.SIZES, routing=Routing(4, capacity_factor=1.0))
LAYOUTS = [
    {"dp": 2},
    {"dp": 3, "batch": 12},
    {"dp": 8},
    {"dp": 2, "cp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True},
]
PIPELINES = [
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "stages": (1, 0, 1, 0)},
    {"schedule": "zb-h1", "recompute": "full"},
    {"schedule": "terapipe", "slices": (9, 7)},
]


def run(sizes=checks.SIZES, **how):
    ranks = how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1)
    LocalWorld(ranks).run(lambda: checks.holds_what_was_predicted(world(), sizes, **how))


def name(layout):
    return " ".join(f"{axis}{size}" for axis, size in layout.items())


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_every_layout_holds_what_was_predicted(layout, zero):
    """Rows that do not divide, and tensors with fewer rows than ranks."""
    run(zero=zero, optimizer="adamw", **layout)


@pytest.mark.parametrize("zero", [pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize("how", PIPELINES, ids=lambda how: how["schedule"])
def test_every_pipeline_that_drains(how, zero):
    run(replace(checks.SIZES, tied=True), dp=2, pp=2, microbatches=4, zero=zero, **how)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "tp": 2}], ids=name)
def test_experts(layout, zero):
    run(SWITCH, zero=zero, **layout)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("how", [{}, {"scaled": True}, {"recompute": "full"}], ids=str)
def test_halves_have_masters_of_their_own_rows(how, zero):
    run(dtype=np.dtype(np.float16), dp=2, zero=zero, optimizer="adamw", **how)


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (replace(checks.SIZES, vocab=24), {"dp": 16, "tp": 2}),  # fewer rows of the table and of what ends a branch
        (replace(checks.SIX, tied=True), {"dp": 8, "tp": 2, "sequence_parallel": True}),
        (SWITCH, {"dp": 8, "ep": 2, "cp": 2}),
    ],
    ids=["tp", "sequence parallel", "experts"],
)
def test_the_rows_of_the_formula_are_those_of_the_model_tensor_by_tensor(sizes, layout):
    def main():
        step = Step(sizes, 16, zero=1, **checks.rank_of(world().rank, layout), **layout)
        _, executor, _ = checks.built(world(), step)
        return {share.name: share.master.shape for share in executor.model.shares()} == {
            slab.name: slab.shape for slab in shares(step)
        }

    ranks = layout["dp"] * layout.get("tp", 1) * layout.get("cp", 1)
    assert all(LocalWorld(ranks).run(main))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_are_those_of_a_part_and_of_those_on_their_way(prefetch, tied):
    """T23.4, T24.2: two parts at most where one is fetched ahead; the head is as large as the table."""
    sizes = replace(checks.SIZES, tied=tied)
    run(sizes, dp=2, zero=3, prefetch=prefetch)
    step = Step(sizes, 16, dp=2, zero=3, prefetch=prefetch)
    h, words, length = 16, 17, 16
    block = 12 * h * h + 13 * h
    parts = [words * h, length * h, block, block, 2 * h, words * h]
    assert gathered(step) == 4 * max(sum(parts[at : at + 1 + prefetch]) for at in range(len(parts)))


@pytest.mark.parametrize("zero", [2, 3])
def test_whole_gradients_are_those_of_a_bucket_and_a_block(zero):
    step = Step(checks.WIDE, 8, dp=2, zero=zero, bucket_bytes=2**15)

    def main():
        mesh, executor, tokens = checks.built(world(), step)
        ledger = MemoryLedger()
        with listen(ledger):
            executor.step(tokens.batch_at(0, 8, mesh.dp.rank, 2))
        return ledger

    h = checks.WIDE.width
    block = 4 * (12 * h * h + 13 * h)
    for ledger in LocalWorld(2).run(main):
        assert 0 < ledger.largest[owners.WHOLE] < block + 2**15
        assert ledger.now[owners.WHOLE] == 0


def test_what_a_run_tells_of_its_memory(tmp_path, capsys):
    data = tmp_path / "text.txt"
    data.write_text("abcdefgh ijklmnop qrstuvwx yz\n" * 200)
    flags = ["--model", "gpt-tiny", "--steps", "2", "--sample-length", "0", "--memory", "--dp", "2", "--zero", "3"]
    argv = [*flags, "--data", str(data), "--run", str(tmp_path / "run")]
    LocalWorld(2).run(lambda: train.main(argv))
    text = capsys.readouterr().out
    rows = rows_of(text, "memory after step 2, ")
    for owner in ("weights", "gradients", "optimizer state", "gathered weights", "activations"):
        now, _, largest, predicted = rows[owner][:4]
        assert largest == predicted != "0.00", owner
        assert (now == "0.00") == (owner in ("gathered weights", "activations"))
    assert rows["whole gradients"][2] != "0.00"


def rows_of(text, title):
    """name -> cells of the table that begins with a title."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[1:]
    return {re.split(r"  +", line.strip())[0]: re.split(r"  +", line.strip())[1:] for line in lines}
