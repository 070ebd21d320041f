"""Traces of real runs: what was sent is what was predicted, and what `mpitrain trace` prints of them is whole."""

import re

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.debug.trace.clocks import aligned
from mpitrain.debug.trace.files import read
from mpitrain.trace.command import main as trace
from mpitrain.trace.findings import findings
from mpitrain.trace.known import know
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 2 --steps 5 --sample-length 0 --eval-every 0 --trace".split()

LAYOUTS = {
    "dp4": (4, "--batch 8"),
    "tp2 with sequence parallelism": (4, "--tp 2 --sequence-parallel --batch 8 --microbatches 2"),
    "cp2": (4, "--cp 2 --tp 2 --batch 8"),
    "ulysses": (4, "--cp 2 --cp-attention ulysses --batch 8"),
    "zb-h1": (4, "--pp 2 --tp 2 --schedule zb-h1 --batch 8 --microbatches 4"),
    "interleaved": (2, "--pp 2 --schedule interleaved --chunks 1 --batch 8 --microbatches 4"),
    "terapipe": (2, "--pp 2 --schedule terapipe --slices 2 --batch 8 --microbatches 2"),
    "zero 1": (4, "--zero 1 --batch 8"),
    "zero 3 on stages": (4, "--zero 3 --pp 2 --batch 8 --microbatches 2"),
    "recompute": (4, "--tp 2 --recompute full --batch 8"),
    "float16": (4, "--tp 2 --dtype float16 --batch 8"),
    "buckets": (4, "--reducer bucketed --bucket-mib 0.01 --batch 8"),
    "powersgd": (4, "--reducer powersgd --batch 8"),
    "adafactor, checked": (4, "--tp 2 --optimizer adafactor --check --batch 8"),
}
DEFAULT = ("tp2 with sequence parallelism", "zb-h1", "zero 3 on stages", "adafactor, checked")
BOUNDS = {
    "experts": (4, "--ep 2 --experts 4 --batch 8"),
    "pipedream": (2, "--pp 2 --schedule pipedream-2bw --batch 8 --microbatches 2"),
    "local sgd": (2, "--reducer local --local-steps 2 --batch 8"),
}


@pytest.fixture
def traced(tmp_path):
    """`traced(ranks, flags)` -> the folder of a run that was traced."""
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")

    def traced(ranks, flags):
        run = tmp_path / "run"
        LocalWorld(ranks).run(main, [*TINY, "--data", str(tmp_path / "text"), "--run", str(run), *flags.split()])
        return run

    return traced


def test_a_run_on_eight_ranks_says_all_of_itself(traced, capsys):
    run = traced(8, "--pp 2 --dp 2 --tp 2 --batch 8 --microbatches 2")
    found = findings(know(read(run)), "run")
    assert found.known.steps == [1, 2, 3, 4, 5]
    assert found.known.with_ops == [1, 2, 3]
    assert found.sent.agrees
    assert found.sent.by_cause
    assert {kind.cause for kind in found.sent.kinds} >= {"layers", "gradients", "activations", "loss and norm"}
    assert found.bubbles.formula == pytest.approx(1 / 3)
    assert 0 < found.bubbles.played <= found.bubbles.measured + 0.05
    for share in found.shares:
        parts = share.compute + share.update + share.messages + share.rest
        assert parts == pytest.approx(share.step)
        assert 0 <= share.waits <= share.messages
    for held in found.held:
        for owner in ("weights", "gradients"):
            assert held.largest[owner] == held.predicted[owner], owner
        assert held.largest["activations"] == pytest.approx(held.predicted["activations"], rel=0.05)
    assert {op.op for op in found.ops} >= {"linear", "linear.backward"}
    capsys.readouterr()
    for words in ([], ["--step", "2"], ["--step", "5"]):
        assert trace([str(run), *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        assert len(lines) <= (80 if not words else 50)
    assert all(re.match("rank [0-7] ", line) for line in lines[5:13])


def test_hosts_whose_clocks_are_apart_are_brought_together(traced):
    """The messages of a real run; two of its ranks are said to be on another host, whose clock runs 30 ppm faster."""
    run = traced(4, "--pp 2 --batch 8 --microbatches 2")
    real = read(run)
    true = [rank.spans["start"].copy() for rank in real.ranks]
    for rank in real.ranks[2:]:
        rank.clock = "another"
        for name in ("start", "stop"):
            after = rank.spans[name] - true[0][0]
            rank.spans[name] += 10**12 + (30e-6 * after).astype(np.int64)
    clocks = aligned(real)
    for rank, start in zip(real.ranks, true, strict=True):
        error = np.abs(clocks.shared(rank.rank, rank.spans["start"]) - start).max()
        assert error <= clocks.error[rank.rank] < 10**8


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_sends_what_was_predicted(traced, name):
    found = findings(know(read(traced(*LAYOUTS[name]))), name)
    assert found.sent.predicted
    assert [kind for kind in found.sent.kinds if not kind.agrees] == []
    assert found.sent.odd == []
    assert found.sent.agrees


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_what_depends_on_data_or_on_the_step_stays_within_its_bound(traced, name):
    found = findings(know(read(traced(*BOUNDS[name]))), name)
    assert found.sent.at_most
    total = sum(kind.nbytes * kind.ranks for kind in found.sent.kinds)
    assert 0 < total <= 1.5 * sum(kind.theory * kind.ranks for kind in found.sent.kinds)
