"""What the memory ledger notes of a rank, whose it says that is, and what a run tells of it."""

import gc
import json
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_memory as checks

from mpitrain import memory_table, train
from mpitrain.autograd import ops
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import World, world
from mpitrain.debug import owners
from mpitrain.debug.memory import MemoryLedger
from mpitrain.events import listen
from mpitrain.metrics import read_metrics
from mpitrain.plan.traffic import Step


def x_of(*shape):
    return Tensor(np.ones(shape), requires_grad=True)


# ------------------------------------------------------------------------------------------------------- what it notes


def test_what_a_node_saves_is_an_activation_until_backward_has_used_it():
    ledger, x = MemoryLedger(), x_of(10, 10)
    with listen(ledger), Tape() as tape:
        y = ops.gelu_tanh(x)  # saves its slope
        assert ledger.now == {owners.ACTIVATIONS: 800, owners.PASSING: 800}
        tape.run_backward([(y, np.ones((10, 10)))])
        assert ledger.now[owners.BACKWARD] == 1600  # the seed and the gradient of x
        tape.grads.clear()
    del y
    ledger.settle()
    assert ledger.now == {owners.ACTIVATIONS: 0, owners.PASSING: 0, owners.BACKWARD: 0}
    assert ledger.peak == 800 * 4


def test_a_buffer_counts_once_and_a_view_keeps_all_of_it():
    ledger, x = MemoryLedger(), x_of(10, 10)
    with listen(ledger), Tape():
        y = ops.gelu_tanh(x)
        y = y.reshape(100)[:3]  # all of the hundred stays
        assert ledger.now[owners.PASSING] == 800
        z = y * y  # saves y, of which all is kept alive
        assert ledger.now[owners.ACTIVATIONS] == 1600
        assert ledger.now[owners.PASSING] == z.data.nbytes


def test_values_go_when_nobody_holds_them():
    ledger, x = MemoryLedger(), Tensor(np.ones(50))
    with listen(ledger):
        y = ops.exp(x)
        y = ops.exp(y)
    ledger.settle()
    assert ledger.now == {owners.PASSING: 400}
    assert ledger.peak == 800
    assert y is not None


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there():
    """A new array may have the id of one that died a moment ago."""
    ledger = MemoryLedger()
    with listen(ledger):
        for _ in range(100):
            ops.exp(Tensor(np.ones(50)))
    ledger.settle()
    assert ledger.total == 0
    assert ledger.peak == 400


def test_the_breakdown_is_that_of_the_moment_of_the_peak():
    ledger, x = MemoryLedger(), x_of(100)
    with listen(ledger):
        with Tape() as tape:
            y = ops.exp(ops.exp(ops.exp(x)))  # each saves what it made
        largest = dict(ledger.now)
        tape.run_backward([(y, np.ones(100))])
        after = ops.exp(Tensor(np.ones(150)))  # less than there was
    assert sum(ledger.at_peak.values()) == ledger.peak > sum(largest.values())
    assert ledger.at_peak[owners.ACTIVATIONS] == 2400
    assert ledger.paths_at_peak == {"": 2400}
    assert ledger.largest[owners.PASSING] == after.data.nbytes


def test_what_the_model_holds_lies_under_no_other_name():
    step = Step(checks.SIZES, 16)
    _, executor, tokens = checks.built(World(Alone(), "none"), step, optimizer="adamw")
    ledger = MemoryLedger({"corpus": [tokens_of(tokens)]})
    with listen(ledger):
        executor.step(tokens.batch_at(0, 16))
    ledger.settle()
    weights = sum(flat.weights.nbytes for flat in executor.model.flats)
    assert ledger.now[owners.WEIGHTS] == ledger.now[owners.GRADIENTS] == weights
    assert ledger.now[owners.STATE] == 2 * weights
    assert owners.MASTERS not in ledger.now
    assert ledger.now["corpus"] == tokens_of(tokens).nbytes
    assert ledger.now[owners.ACTIVATIONS] == ledger.now[owners.BATCH] == 0
    assert ledger.table().splitlines()[-2].split()[0] == "corpus"


def tokens_of(tokens):
    return tokens._corpus.train if hasattr(tokens, "_corpus") else tokens.corpus.train


def test_versions_that_wait_for_their_micro_batches_are_counted_beside_the_newest():
    """ALGORITHMS 8: 2BW holds two versions of the weights."""

    def main():
        step = Step(checks.SIZES, 16, 4, pp=2, pp_rank=world().rank, row=4)
        mesh, executor, tokens = checks.built(world(), step, "pipedream-2bw")
        ledger = MemoryLedger()
        with listen(ledger):
            executor.run([*tokens.batches(16, mesh.dp.rank, mesh.dp.size, stop_step=4)])
        weights = sum(flat.weights.nbytes for flat in executor.model.flats)
        return ledger.now[owners.WEIGHTS], weights, ledger.largest[owners.VERSIONS]

    for newest, weights, others in LocalWorld(2).run(main):
        assert newest == others == weights


def test_what_waits_between_stages_is_neither_a_value_nor_an_activation():
    def main():
        step = Step(checks.SIZES, 16, 4, pp=2, pp_rank=world().rank)
        _, executor, tokens = checks.built(world(), step)
        stream = 4 * 16 * 16 * 4
        ledger = MemoryLedger()
        seen = []

        def look(event):
            if event.kind == "action" and event.phase == "end":
                seen.append((event.info["action"].kind, dict(ledger.now)))

        with listen(ledger), listen(look):
            executor.step(tokens.batch_at(0, 16))
        arrivals = {now.get(owners.ARRIVED, 0) for kind, now in seen if kind.startswith("RECV")}
        return arrivals, ledger.largest[owners.MESSAGES] % stream, stream

    for arrivals, odd, stream in LocalWorld(2).run(main):
        assert arrivals <= {stream, 2 * stream}
        assert odd == 0


def test_sums_in_rank_order_keep_scratch_at_the_door():
    def main():
        ranks = world()
        ranks.set_deterministic()
        step = Step(checks.SIZES, 16, dp=2)
        mesh, executor, tokens = checks.built(ranks, step)
        ledger = MemoryLedger()
        with listen(ledger):
            executor.step(tokens.batch_at(0, 16, mesh.dp.rank, 2))
        return ledger.now[owners.WIRE], mesh.scratch

    for noted, kept in LocalWorld(2).run(main):
        assert noted == kept > 0


def test_evaluation_leaves_nothing_behind():
    step = Step(checks.SIZES, 16)
    _, executor, tokens = checks.built(World(Alone(), "none"), step)
    batch, ledger = tokens.batch_at(0, 16), MemoryLedger()
    with listen(ledger):
        executor.step(batch)
        before = ledger.total
        executor.evaluate([batch])
    ledger.settle()
    assert ledger.total <= before
    assert ledger.paths == {}


def test_what_lives_inside_of_an_op_is_seen_by_tracemalloc_alone():
    tracemalloc.start()
    try:
        ledger, x = MemoryLedger(), Tensor(np.ones((64, 64), np.float16))
        gc.collect()
        with listen(ledger):
            y = ops.matmul(x, x)  # in float32, and narrowed
    finally:
        tracemalloc.stop()
    assert ledger.total == x.data.nbytes + y.data.nbytes
    assert ledger.inside.op == "matmul"
    assert ledger.inside.nbytes >= 3 * 64 * 64 * 4 * 0.6
    quiet = MemoryLedger()
    with listen(quiet):
        ops.matmul(x, x)
    assert quiet.inside.total == 0


# ----------------------------------------------------------------------------------------------------- what a run tells

FLAGS = ["--model", "gpt-tiny", "--steps", "2", "--sample-length", "0", "--memory"]


def told(tmp_path, capsys, *flags, ranks=1):
    """What a run printed, and its last line of metrics."""
    tmp_path.mkdir(exist_ok=True)
    data = tmp_path / "text.txt"
    data.write_text("abcdefgh ijklmnop qrstuvwx yz\n" * 200)
    argv = [*FLAGS, "--data", str(data), "--run", str(tmp_path / "run"), *flags]
    if ranks == 1:
        train.main(argv)
    else:
        LocalWorld(ranks).run(lambda: train.main(argv))
    return capsys.readouterr().out, [*read_metrics(tmp_path / "run" / "metrics.jsonl")]


def rows_of(text, title):
    """name -> cells of the table that begins with a title."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[1:]
    return {re.split(r"  +", line.strip())[0]: re.split(r"  +", line.strip())[1:] for line in lines}


@pytest.mark.parametrize(
    "flags",
    [(), ("--dtype", "float16", "--recompute", "none", "--dropout", "0.1", "--optimizer", "sgd")],
    ids=["as it is", "halves"],
)
def test_memory_is_told_after_the_first_step_and_at_the_end(tmp_path, capsys, flags):
    text, metrics = told(tmp_path, capsys, *flags)
    for title in ("memory after step 1, ", "memory after step 2, "):
        rows = rows_of(text, title)
        for owner in ("weights", "gradients", "optimizer state", "activations"):
            now, at_peak, largest, predicted = rows[owner]
            assert largest == predicted != "0.00", owner
            assert now == at_peak or owner == "activations"
        assert {"values", "value gradients", "batch", "corpus", "all"} <= {*rows}
    assert "of rank" not in text
    assert "memory_peak_bytes" not in metrics[0]
    peaks = metrics[1]["memory_peak_bytes"]
    assert peaks["all"] == sum(peaks.values()) - peaks["all"]
    assert json.dumps(peaks)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_offloaded_is_told_beside_what_is_here(tmp_path, capsys, dtype):
    flags = ["--dtype", dtype, "--offload"]
    text, _ = told(tmp_path, capsys, *flags, "optimizer")
    rows, of_state = rows_of(text, "memory after step 2, "), 2 if dtype == "float32" else 3
    assert {"optimizer state", "masters"}.isdisjoint(rows)
    gradients = float(rows["gradients"][0])
    here, predicted = rows["in the store"]
    assert here == predicted
    assert float(here) == pytest.approx(of_state * gradients, abs=0.02)
    text, _ = told(tmp_path / "other", capsys, *flags, "activations")
    rows = rows_of(text, "memory after step 2, ")
    assert rows["optimizer state"][3] != "0.00"
    assert len(rows["activations"]) == 3  # no formula for what is on its way
    assert rows["in the store"][0] == rows["in the store"][1] != "0.00"


def test_a_block_is_told_beside_the_paper(tmp_path, capsys):
    text, _ = told(tmp_path, capsys, "--recompute", "none", "--dropout", "0.1")
    rows = rows_of(text, "a block keeps of a micro-batch, bytes, none")
    b, s, h, heads = 16, 32, 32, 2
    assert rows["input of norm1"] == [f"{4 * b * s * h:,}", f"{4 * b * s * h:,}", "0"]
    assert rows["softmax"][1] == f"{4 * b * heads * s * s:,}"
    assert rows["mask of drop1"] == [f"{8 * b * s:,}", f"{b * s * h:,}", f"{8 * b * s - b * s * h:,}"]
    ours, theirs, more = (int(cell.replace(",", "")) for cell in rows["all"])
    assert ours - theirs == more
    assert text.count("a block keeps") == 1
    note = f"paper: sbh(34 + 5as/h) = {34 * s * b * h + 5 * heads * s * s * b:,} bytes in 16 bits"
    assert note in text
    assert f" bytes in 16 bits, {theirs:,} with the 4 bytes a number of the column; masks of a byte\n" in text
    assert "dropout is 0" not in text
    whole, rest = (rows_of(text, "memory after step 2, ")[row] for row in ("all", "all without the corpus"))
    assert float(rest[1]) < float(whole[1])


def test_of_blocks_that_differ_one_of_each_kind_is_told(tmp_path, capsys):
    text, _ = told(tmp_path, capsys, "--layers", "4", "--recompute-modules", "blocks.0,blocks.1.mlp")
    made = rows_of(text, "block 0, made again, keeps of a micro-batch, bytes, full")
    part = rows_of(text, "block 1, its mlp made again, keeps of a micro-batch, bytes, selective")
    kept = rows_of(text, "block 2, kept, as 1 more of 4, keeps of a micro-batch, bytes, selective")
    assert {*made} == {"input of norm1", "all", next(row for row in made if row.startswith("paper: 2sbh = "))}
    assert "gelu" in part
    assert part["gelu"][0] == "0"
    assert kept["gelu"][0] == kept["gelu"][1] != "0"
    b, s, h = 16, 32, 32
    assert text.count(f"dropout is 0, so no mask is kept here; the paper's are {2 * b * s * h:,} bytes") == 2
    assert text.count("keeps of a micro-batch") == 3


@pytest.mark.parametrize(
    "flags",
    [
        ("--pp", "2", "--tp", "2", "--sequence-parallel", "--microbatches", "2", "--recompute", "full"),
        ("--pp", "2", "--dp", "2", "--microbatches", "2", "--schedule", "pipedream-2bw", "--optimizer", "adafactor"),
    ],
    ids=["recompute", "overlapping steps"],
)
def test_of_several_ranks_the_one_with_most_is_shown_and_the_span_of_all(tmp_path, capsys, flags):
    text, metrics = told(tmp_path, capsys, *flags, ranks=4)
    assert re.search(r"memory after step \d, [KM]iB, of rank [0-3] ", text)
    rows = rows_of(text, "memory after step 2, ")
    others = ["weight versions"] if "pipedream-2bw" in flags else ["recompute scratch"]
    for owner in ("weights", "gradients", "optimizer state", "activations", *others):
        assert rows[owner][2] == rows[owner][3] != "0.00", owner
    assert re.fullmatch(r"[\d.,]+ rank \d \.\.\. [\d.,]+ rank \d", rows["weights"][4])
    assert "memory_peak_bytes" in metrics[-1]


def test_a_table_of_ranks_names_the_least_and_the_most():
    found = [
        {"now": {"weights": n}, "at_peak": {"weights": n}, "largest": {"weights": n}, "predicted": {"weights": n}}
        | {"total": n, "peak": n, "inside": [0, "", "", 0], "note": ""}
        for n in (3 << 20, 1 << 20, 5 << 20)
    ]
    lines = memory_table.table(found, "after step 7").splitlines()
    assert lines[0].startswith("memory after step 7, MiB, of rank 2")
    assert lines[1].split() == ["weights", *["5.00"] * 4, *"1.00 rank 1 ... 5.00 rank 2".split()]
    assert memory_table.largest_of_ranks(found) == {"weights": 5 << 20, "all": 5 << 20}
    found[0]["inside"] = [1 << 20, "linear", "head", 4 << 20]
    assert "inside of linear head" not in memory_table.table(found, "now")
    found[2]["inside"] = [1 << 20, "linear", "head", 6 << 20]
    assert memory_table.table(found, "now").splitlines()[-1].split() == "and inside of linear head 1.00".split()
    found[2]["note"] = "for some tokens"
    assert memory_table.table(found, "now").splitlines()[-1] == "  activations are predicted for some tokens"


def test_without_the_option_nothing_is_told(tmp_path, capsys):
    others = [flag for flag in FLAGS if flag != "--memory"]
    data = tmp_path / "text.txt"
    data.write_text("abcdefgh ijklmnop qrstuvwx yz\n" * 200)
    train.main([*others, "--data", str(data), "--run", str(tmp_path / "run")])
    assert "memory" not in capsys.readouterr().out
    assert all("memory_peak_bytes" not in line for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
