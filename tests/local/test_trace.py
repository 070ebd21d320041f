"""What a trace says is what happened; nothing of it changes a run, and a run that goes wrong leaves a whole one."""

import contextlib
import errno
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mpitrain import train
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.payload import LIKE_BLOCKING
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.data.tokens import Batch
from mpitrain.debug.trace import notes as n
from mpitrain.debug.trace import tracer as module
from mpitrain.debug.trace.files import read
from mpitrain.debug.trace.records import KIND
from mpitrain.debug.trace.sorter import Sorter
from mpitrain.debug.trace.tracing import tracing
from mpitrain.debug.trace.writer import Writer
from mpitrain.errors import ConfigError, UserError
from mpitrain.events import LISTENERS, STEP_LISTENERS, WITNESSES, alone, listen
from mpitrain.models.gpt import GPT, GPTConfig
from mpitrain.optim import AdamW
from mpitrain.pipeline.action import Action
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete

SIZES = GPTConfig(vocab=19, layers=2, width=8, heads=2, seq_len=6)
STEPS = 12
EXTRA = "an extra message"


def batches(mesh, steps=STEPS, rows=8):
    mine = np.arange(mesh.dp.rank, rows, mesh.dp.size)
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, SIZES.vocab, (rows, SIZES.seq_len + 1))
        yield Batch(tokens[mine, :-1], tokens[mine, 1:], mine, np.arange(SIZES.seq_len), step)


def training(mesh, microbatches=2, name="1f1b"):
    model = GPT(SIZES, mesh, seed=1)
    rows = complete(name, ranks=mesh.pp.size, microbatches=microbatches)
    return Executor(model, AdamW(model.shares(), lr=1e-3), mesh, rows)


def run(folder, ranks=4, steps=STEPS, inside=None, **how):
    """Losses of a run, and bytes by axis and verb that each rank has sent meanwhile, as the door counted."""

    def main():
        mesh = Mesh(world(), pp=2, tp=2)
        executor = training(mesh)
        axes = {axis.name: axis for axis in (mesh.pp, mesh.tp, mesh.world)}
        losses = []
        with tracing(world(), folder, **how) if folder is not None else contextlib.nullcontext():
            before = {name: axis.sent_bytes for name, axis in axes.items()}
            for batch in batches(mesh, steps):
                if inside is not None:
                    inside(mesh, batch)
                losses.append(executor.step(batch))
            after = {name: axis.sent_bytes for name, axis in axes.items()}
        sent = {
            (axis, verb): count - before[axis].get(verb, 0) for axis, of in after.items() for verb, count in of.items()
        }
        return losses, sent

    return LocalWorld(ranks).run(main)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace") / "new"
    return run(folder), read(folder), folder


def texts(rank, spans, *fields):
    return [tuple(rank.strings[span[field]] for field in fields) for span in spans]


def test_the_trace_changes_no_bit_of_the_run(traced):
    found, *_ = traced
    assert [losses for losses, _ in found] == [losses for losses, _ in run(None)]


def test_every_byte_that_the_door_counts_is_in_the_trace(traced):
    found, trace, _ = traced
    for (_, sent), rank in zip(found, trace.ranks, strict=True):
        summed = Counter()
        for span in rank.of_kind("message"):
            verb = rank.strings[span["name"]]
            summed[rank.strings[span["axis"]], LIKE_BLOCKING.get(verb, verb)] += span["bytes"]
        assert +summed == pytest.approx(+Counter(sent))
        assert len(summed) >= 3
        assert not rank.of_kind("wait", "arrival")["bytes"].any()  # each is counted once


def test_every_call_of_an_axis_is_there_once(traced):
    _, trace, _ = traced
    for rank in trace.ranks:
        of_axis = {}
        for span in rank.of_kind("message"):
            if span["peer"] < 0:
                of_axis.setdefault(rank.strings[span["axis"]], []).append(int(span["number"]))
        assert set(of_axis) >= {"tp", "world"}
        for numbers in of_axis.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        pairs = Counter(
            (r["name"], r["peer"], r["tag"], r["number"]) for r in rank.of_kind("message") if r["peer"] >= 0
        )
        assert set(pairs.values()) == {1}


def test_a_step_is_the_row_of_its_rank(traced):
    _, trace, _ = traced
    rows = complete("1f1b", ranks=2, microbatches=2)
    for rank in trace.ranks:
        row = list(map(str, rows[rank.rank // 2]))
        assert [step["step"] for step in rank.steps] == list(range(1, STEPS + 1))
        for step in rank.steps:
            actions = rank.of_kind("action")
            actions = actions[actions["step"] == step["step"]]
            assert [name for (name,) in texts(rank, actions, "name")] == row
            assert actions["start"][0] == step["start"]
            assert actions["stop"][-1] == step["stop"]
            assert (actions["start"][1:] >= actions["stop"][:-1]).all()
            assert step["tokens"] == 8 * SIZES.seq_len


def test_losses_are_those_of_the_steps(traced):
    found, trace, _ = traced
    for (losses, _), rank in zip(found, trace.ranks, strict=True):
        assert [step["loss"] for step in rank.steps] == losses


def test_ops_are_there_in_the_first_steps_and_each_tenth(traced):
    _, trace, _ = traced
    for rank in trace.ranks:
        assert [step["step"] for step in rank.steps if step["ops"]] == [1, 2, 3, 11]
        ops = rank.of_kind("op")
        assert set(ops["step"].tolist()) == {1, 2, 3, 11}
        names = {name for (name,) in texts(rank, ops, "name")}
        assert names >= {"linear", "linear.backward", "attention", "residual_norm.backward"}


def test_spans_nest_as_calls_do(traced):
    """Each span lies within that around it, at the depth that it says, and has the action around it."""
    _, trace, _ = traced
    for rank in trace.ranks:
        around = []
        spans = rank.spans[~np.isin(rank.spans["kind"], [KIND["disk"], KIND["arrival"]])]
        for span in spans:
            del around[span["depth"] :]
            assert len(around) == span["depth"]
            if around:
                assert around[-1]["start"] <= span["start"] <= span["stop"] <= around[-1]["stop"]
                assert span["action"] == around[0]["action"]
                assert span["step"] == around[0]["step"] > 0
            around.append(span)
        assert max(spans["depth"]) == 2


def test_messages_of_steps_without_ops_are_placed_as_in_those_with(traced):
    _, trace, _ = traced
    for rank in trace.ranks:
        messages = rank.of_kind("message")
        told = ("name", "action", "axis", "shape", "site", "path")
        with_ops, without = (texts(rank, messages[messages["step"] == step], *told) for step in (2, 7))
        assert with_ops == without
        assert all(site.rpartition(":")[2].isdigit() for *_, site, _ in without)
        paths = {path for *_, path in without}
        assert paths >= ({"table", "blocks.0.mlp.down"} if rank.rank < 2 else {"blocks.1.mlp.down"})
        backward = {path for _, action, axis, *_, path in without if action == "B" and axis == "tp"}
        assert backward
        assert "" not in backward
        waits = rank.of_kind("wait")  # which a step can do without: what has arrived is not waited for
        seen = set(texts(rank, waits[np.isin(waits["step"], [1, 2, 3, 11])], *told))
        assert seen >= {row for row in texts(rank, waits[waits["step"] == 7], *told) if row[4]}


def test_memory_has_what_the_model_and_its_tapes_hold(traced):
    _, trace, _ = traced
    for rank in trace.ranks:
        held = {}
        for _, step, owner, nbytes in rank.memory.tolist():
            held.setdefault(rank.strings[owner], []).append((step, nbytes))
        assert [nbytes for _, nbytes in held["gradients"]] == [nbytes for _, nbytes in held["weights"]]
        assert held["optimizer state"][-1][1] == 2 * held["weights"][0][1]
        flying = [nbytes for step, nbytes in held["activations"] if step == 3]
        assert flying[-1] == 0  # after the step
        assert max(flying) > 0
        if rank.rank < 2:  # two micro-batches are in flight on the first stage, one on the second
            assert max(flying) == 2 * min(nbytes for nbytes in flying if nbytes)
        else:
            assert len(set(flying)) == 2


def test_what_is_alone_is_not_traced_and_nothing_is_left_behind(tmp_path):
    def inside(mesh, batch):
        with alone():
            mesh.world.exchange(EXTRA)
        assert len(WITNESSES.get()) == 1
        assert (LISTENERS.get(), STEP_LISTENERS.get()) == (WITNESSES.get(), ())

    run(tmp_path, steps=1, inside=inside)
    rank = read(tmp_path).ranks[0]
    assert "test_trace.py" not in "".join(rank.strings)
    assert (LISTENERS.get(), STEP_LISTENERS.get(), WITNESSES.get()) == ((), (), ())


def test_outside_of_steps_messages_say_where_they_come_from(tmp_path):
    run(tmp_path, steps=2, inside=lambda mesh, batch: mesh.world.exchange(EXTRA))
    rank = read(tmp_path).ranks[1]
    outside = rank.spans[(rank.spans["step"] == 0) & (rank.spans["kind"] == KIND["message"])]
    told = Counter((name, site.partition(":")[0]) for name, site in texts(rank, outside, "name", "site"))
    assert told["exchange", "test_trace.py"] == 4  # two exchanges of two calls


def test_others_hear_every_event_beside_a_trace(tmp_path):
    heard = []

    def main(around):
        mesh = Mesh(world(), pp=2)
        executor = training(mesh)
        mine = []
        with around(), listen(lambda event: mine.append((event.kind, event.phase, event.name))):
            for batch in batches(mesh, 5):
                executor.step(batch)
        return mine

    for around in (contextlib.nullcontext, lambda: tracing(world(), tmp_path)):
        heard.append(LocalWorld(2).run(lambda around=around: main(around)))
    assert heard[0] == heard[1]


def test_a_step_that_an_error_ends_leaves_a_whole_trace(tmp_path):
    """The action that raised has no end; what was before it is there, and the steps after it are placed well."""

    def main():
        mesh = Mesh(world())
        executor = training(mesh)
        given = list(batches(mesh, 4))

        def trouble(event):
            if (event.kind, event.phase, event.name) == ("op", "begin", "attention.backward"):
                raise ZeroDivisionError

        with tracing(world(), tmp_path, ops=1):
            executor.step(given[0])
            with listen(trouble), pytest.raises(ZeroDivisionError):
                executor.step(given[1])
            executor.step(given[2])

    LocalWorld(2).run(main)
    for rank in read(tmp_path).ranks:
        first, second, third = rank.steps
        assert "loss" in first
        assert "loss" in third
        assert "loss" not in second
        actions = [name for (name,) in texts(rank, rank.of_kind("action"), "name")]
        row = ["LOAD0@0", "LOAD1@0", "COUNT@0", "F0@0", "B0@0", "F1@0", "B1@0", "REDUCE@0", "STEP@0"]
        assert actions == row + row[: row.index("B0@0")] + row
        of_step = [rank.spans[rank.spans["step"] == step["step"]] for step in rank.steps]
        assert of_step[0]["depth"].tolist() == of_step[2]["depth"].tolist()
        broken = of_step[1][of_step[1]["action"] == 0]  # it is not known in which action it was
        names = [name for (name,) in texts(rank, broken, "name")]
        assert [name for name in names if name.endswith(".backward")]
        assert "attention.backward" not in names


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_activations_are_what_the_tapes_in_flight_hold(tmp_path, name):
    """Also between the two halves of a backward, which a part of the tape outlives."""

    def main():
        mesh = Mesh(world(), pp=2)
        executor = training(mesh, name=name)
        there = []

        def look(event):
            if (event.kind, event.phase) == ("action", "end"):
                there.append(sum(flight.tape.nbytes for flight in executor._running.flying.values()))

        with tracing(world(), tmp_path), listen(look):
            for batch in batches(mesh, 2):
                executor.step(batch)
        return there

    found = LocalWorld(2).run(main)
    for there, rank in zip(found, read(tmp_path).ranks, strict=True):
        held = [row for row in rank.memory.tolist() if rank.strings[row[2]] == "activations"]
        actions = rank.of_kind("action")
        assert len(actions) == len(there)
        for end, nbytes in zip([*actions["start"][1:], 1 << 62], there, strict=True):  # noted before the next begins
            assert ([0] + [nbytes for time, _, _, nbytes in held if time <= end])[-1] == nbytes
        assert len(set(there)) > (1 if name == "1f1b" else 2)


def test_where_a_message_is_from_is_not_guessed(tmp_path):
    """An action that sends something else in a step without ops: nobody has looked, and nothing is said."""
    sites = {(1, 1): "a.py:1", (2, 2): "b.py:2"}
    made = Writer(tmp_path, {"rank": 0, "size": 2, "host": "", "clock": "", "began": 0.0, "facts": {}})
    sorter = Sorter(made, sites.__getitem__)
    made.meet("dp", (0, 1))
    small, large = (("all_reduce", "dp", -1, 0, (size,), np.dtype("f4"), 4.0 * size) for size in (1, 2))
    action = Action("REDUCE")

    def row(step, looked, *sent):
        seen = [((place, place), f"part{place}") if looked else None for place, _ in sent]
        notes = [(n.MESSAGE, at, at, seen[at], what, at) for at, (_, what) in enumerate(sent)]
        return [(n.ROW, looked), *notes, (n.ACTION, 0, 9, action, step), (n.ROW_ENDS, [])]

    both = (1, small), (2, large)
    sorter.sort([*row(1, True, *both), *row(2, False, *both), *row(3, False, both[1]), *row(4, False, *both)])
    sorter.close()
    rank = read(tmp_path).ranks[0]
    messages = rank.of_kind("message")
    told = [(int(span["step"]), rank.strings[span["site"]], rank.strings[span["path"]]) for span in messages]
    known = [("a.py:1", "part1"), ("b.py:2", "part2")]
    assert sorted(told) == [
        *((1, *w) for w in known),
        *((2, *w) for w in known),
        (3, "", ""),
        *((4, *w) for w in known),
    ]


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, capsys):
    """RELIABILITY: resource exhaustion by own features."""
    monkeypatch.setattr(module, "WRITE_EVERY", 0)  # each step is written
    losses = []

    def main(refuse):
        mesh = Mesh(world())
        executor = training(mesh)
        written = 0

        def full(event):
            nonlocal written
            if (event.kind, event.phase, event.name) == ("disk", "begin", "write"):
                written += 1
                if refuse and written > 4:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), event.info["path"])

        with listen(full), tracing(world(), tmp_path):
            found = [executor.step(batch) for batch in batches(mesh, 9)]
            assert bool(WITNESSES.get()) is not refuse
        return found

    for refuse in (False, True):
        losses.append(LocalWorld(2).run(lambda refuse=refuse: main(refuse)))
    assert losses[0] == losses[1]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(
        f": the trace ends after step 4: {tmp_path} cannot be written: No space left on device; training goes on"
        " without.\n"
    )
    for rank in read(tmp_path).ranks:
        assert [step["step"] for step in rank.steps] == [1, 2, 3]


def test_a_long_row_is_written_before_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_NOTES", 50)
    run(tmp_path / "short", steps=4)
    monkeypatch.undo()
    run(tmp_path / "long", steps=4)
    for short, long in zip(read(tmp_path / "short").ranks, read(tmp_path / "long").ranks, strict=True):
        told = ("name", "path", "action", "site", "axis", "shape")
        assert texts(short, short.spans, *told) == texts(long, long.spans, *told)
        assert short.spans["depth"].tolist() == long.spans["depth"].tolist()
        assert short.spans["step"].tolist() == long.spans["step"].tolist()


# ------------------------------------------------------------------------------------------------- around and options


def test_a_new_trace_takes_the_place_of_an_old_one(tmp_path):
    run(tmp_path, steps=1)
    (tmp_path / "mine.txt").write_text("not of a trace")
    assert len(list(tmp_path.glob("rank-*"))) == 4

    def main():
        with tracing(world(), tmp_path):
            world().barrier()

    LocalWorld(2).run(main)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt",
        "rank-00000.000.trace",
        "rank-00001.000.trace",
    ]
    assert [rank.size for rank in read(tmp_path).ranks] == [2, 2]


def around(folder, **how):
    def main():
        with tracing(world(), folder, **how):
            raise AssertionError("not reached")

    LocalWorld(2).run(main)


def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/trace: a trace cannot be written there: Not a directory\.$"):
        around(tmp_path / "file" / "trace")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"ops": 0}, "ops=0"),
        ({"limit": 0}, "limit=0"),
        ({"facts": {"x": {1}}}, "JSON cannot hold them"),
        ({"facts": {"x": float("nan")}}, "JSON cannot hold them"),
        ({"facts": {"x": "y" * 10**6}}, "bytes of JSON, at most"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, how, said):
    with pytest.raises(ConfigError, match=said):
        around(tmp_path / "new", **how)
    assert not (tmp_path / "new").exists()


TINY = "--layers 1 --width 8 --heads 1 --seq-len 8 --batch 4 --steps 4 --sample-length 0".split()


def test_a_training_run_is_traced_when_it_is_asked_for(tmp_path, monkeypatch):
    corpus = tmp_path / "text"
    corpus.write_bytes(bytes(np.random.default_rng(1).integers(97, 123, 4000, dtype=np.uint8)))
    words = ["--data", str(corpus), "--run", str(tmp_path / "run"), *TINY, "--trace", "--trace-ops", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    LocalWorld(2).run(lambda: train.main(words))
    trace = read(tmp_path / "run")
    assert trace.folder == tmp_path / "run" / "trace"
    for rank in trace.ranks:
        assert [step["ops"] for step in rank.steps] == [True, True, True, False]
        assert rank.facts["command"] == ["train.py", *words]
        assert rank.facts["layout"]["edp"] == 2
        assert rank.facts["model"].startswith("gpt-mini: ")
        assert {"numpy", "messages"} <= set(rank.facts["versions"])
        assert any(span["step"] == 0 for span in rank.of_kind("message"))  # validation
    assert "\ntrace" not in Path(tmp_path / "run" / "config.toml").read_text()


def test_options_of_a_trace_are_for_a_trace():
    assert parse(["--trace", "--trace-ops", "3", "--trace-limit", "2"]).trace_limit == 2
    for flag in ("--trace-ops", "--trace-limit"):
        with pytest.raises(ConfigError, match=f"^{flag} 3 is for --trace: nothing is traced"):
            parse([flag, "3"])
        with pytest.raises(ConfigError, match="must be a whole number from 1"):
            parse(["--trace", flag, "0"])
