"""A recorded rank runs again alone: the same bits, and what is not the same is named."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where replay_layouts.py is
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pure"))  # where recorded.py is
import recorded
import replay_layouts
from recorded import RANKS, again, lines_of, made, write_lines

from mpitrain import Mesh, world
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.request import Request
from mpitrain.debug.recorder import record
from mpitrain.errors import DataError, RecordingError, ReplayDivergence
from mpitrain.events import listen
from mpitrain.recording import values
from mpitrain.recording.outside import heard
from mpitrain.recording.reading import RankReader
from mpitrain.replay.command import main
from mpitrain.replay.run import replay, without


def index(folder, rank=1):
    return folder / f"rank-{rank:05}.index.jsonl"


@pytest.mark.parametrize("sent", ["values", "digest"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_verb_brings_what_it_brought(tmp_path, sent, rank):
    numbers = made(tmp_path / "r", "messages", sent=sent)
    outcome, number = again(tmp_path / "r", rank, "messages")
    assert number == numbers[rank]
    assert outcome.of == outcome.messages + {0: 2, 1: 1}[rank]  # a barrier and, of rank 0, a send bring nothing
    assert outcome.compared >= 9
    assert (outcome.end, outcome.differences) == ("", [])


@pytest.mark.parametrize("asked", [None, (3, 4), (1, 2)])
def test_steps_are_made_again_and_those_before_are_skipped(tmp_path, asked):
    results = made(tmp_path / "r", "steps", steps=asked)
    outcome, returned = again(tmp_path / "r", 1, "steps")
    first, last = asked or (1, 4)
    assert (outcome.steps, outcome.skipped) == (last - first + 1, first - 1)
    if asked is None:
        losses, weights = returned
        assert losses == results[1][0]
        assert all(np.array_equal(a, b) for a, b in zip(weights, results[1][1], strict=True))
    else:
        assert outcome.end == f"after step {last}, as the recording does: steps {first} to {last} were asked for"


def test_messages_of_skipped_steps_are_not_kept(tmp_path):
    made(tmp_path / "all", "steps")
    made(tmp_path / "range", "steps", steps=(4, 4))
    kept = {}
    for name in ("all", "range"):
        calls = [one for one in lines_of(index(tmp_path / name)) if one.get("is") == "call"]
        kept[name] = [[one[key] for key in ("n", "number", "verb", "axis", "step", "shape")] for one in calls]
    steps = [one[4] for one in kept["all"]]
    assert [steps.count(step) for step in range(5)] == [steps.count(0), *4 * [steps.count(1)]]
    assert kept["range"] == [one for one in kept["all"] if one[4] in (0, 4)]
    numbers = []
    with listen(lambda event: numbers.append(event.info["number"]) if is_begun(event) else None, ops=False):
        again(tmp_path / "range", 1, "steps")
    assert numbers == [one[1] for one in kept["range"]]


def is_begun(event):
    return (event.kind, event.phase) == ("message", "begin")


def test_numbers_of_messages_from_rank_to_rank_go_on_behind_a_range(tmp_path, monkeypatch):
    """As those of the run: a trace or a ledger of the replay tells the same numbers."""

    def program():
        recorded.steps(2)
        ranks, numbers = world(), []
        with listen(lambda event: numbers.append(event.info["number"]) if is_begun(event) else None, ops=False):
            for _ in range(2):
                if ranks.rank:
                    ranks.recv((2,), np.float64, 0)
                else:
                    ranks.send(np.ones(2), 1)
        return numbers

    changed(monkeypatch, "messages", program)
    found = made(tmp_path / "r", "messages")
    assert found == [[1, 2], [1, 2]]
    lines = lines_of(index(tmp_path / "r"))
    for one in lines:
        if one.get("verb") == "recv":
            one["number"] += 7
    write_lines(index(tmp_path / "r"), lines)
    assert again(tmp_path / "r", 1, "messages")[1] == [8, 9]


def test_values_are_compared_again_where_the_recorded_steps_begin(tmp_path, monkeypatch):
    made(tmp_path / "r", "steps", steps=(3, 4))

    def spoil(event):
        """Before the first recorded sum of gradients."""
        if is_begun(event) and event.info["axis"] == "dp+cp" and event.info["array"].dtype == np.float32:
            event.info["array"][0] += 1

    with (
        listen(spoil, ops=False),
        pytest.raises(ReplayDivergence, match=r"step 3, all_reduce on dp\+cp.*max \|d\| 1 at"),
    ):
        again(tmp_path / "r", 1, "steps")


def changed(monkeypatch, program, function):
    monkeypatch.setitem(recorded.PROGRAMS, program, function)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x * np.float32(1.5), r"message 3 of 7, all_reduce on world at test_replay.py:\d+: what is sent"
         r" differs from the recording, max \|d\| 2.5 at \[5\], in 5 of 6 elements"),
        (lambda x: np.where(np.arange(6) == 2, np.float32(np.nan), x), r"nan in the place of 2 at \[2\], in 1 of 6"),
        (lambda x: x.astype(np.float64), r"the program calls all_reduce \(6,\) float64 on world .*;\nthe recording has"
         r" all_reduce \(6,\) float32 on world at test_replay.py:\d+"),
        (lambda x: x.reshape(2, 3), r"calls all_reduce \(2, 3\) float32"),
    ],
)  # fmt: skip
def test_the_first_message_that_differs_is_named_with_the_difference(tmp_path, monkeypatch, change, said):
    def program(change=lambda x: x):
        ranks = world()
        ranks.exchange("hello")
        x = change(np.arange(6, dtype=np.float32))
        y = ranks.all_reduce(x)
        ranks.broadcast(y, root=0)
        ranks.all_gather(y.reshape(2, 3), dim=1)
        ranks.barrier()
        return ranks.shift(y).sum()

    changed(monkeypatch, "messages", program)
    made(tmp_path / "r", "messages")
    changed(monkeypatch, "messages", lambda: program(change))
    with pytest.raises(ReplayDivergence, match=said) as found:
        again(tmp_path / "r", 1, "messages")
    assert len(str(found.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda ranks, x: ranks.all_reduce(x, op="max"), r'arguments \["max"\].*;\n.*arguments \["sum"\]'),
        (lambda ranks, x: ranks.all_gather(x), r"calls all_gather .*;\nthe recording has all_reduce"),
        (lambda ranks, x: ranks.recv((3,), "float32", 0, tag=4), r"calls recv \(3,\) float32 on world at .*peer 0"),
        (lambda ranks, x: Mesh(ranks, tp=2).tp.all_reduce(x), "all_reduce .3,. float32 on tp at"),
        (lambda ranks, x: None, r"ended; there the recording has message 1, all_reduce .* at test_replay"),
        (lambda ranks, x: (ranks.all_reduce(x), ranks.barrier()), r"calls barrier .* has the end of the program\."),
        (
            lambda ranks, x: (ranks.all_reduce(x), heard("a number", lambda: 1)),
            "asks for a number; there the recording has the end of the program",
        ),
    ],
)
def test_another_call_is_named_beside_the_recorded_one(tmp_path, monkeypatch, other, said):
    changed(monkeypatch, "messages", lambda: world().all_reduce(np.ones(3, np.float32)))
    made(tmp_path / "r", "messages")
    changed(monkeypatch, "messages", lambda: other(world(), np.ones(3, np.float32)))
    with pytest.raises(ReplayDivergence, match=f"(?s){said}"):
        again(tmp_path / "r", 1, "messages")


def test_what_stands_behind_the_recorded_part_is_not_another_call(tmp_path):
    def program():
        with record(world(), tmp_path / "r"):
            x = world().all_reduce(np.ones(3))
        return world().all_reduce(x)

    LocalWorld(2).run(program)
    outcome = replay(RankReader(tmp_path / "r", 1), program, tmp_path)
    assert outcome.end.startswith("before all_reduce (3,) float64 on world")


def test_long_texts_are_told_where_they_part(tmp_path, monkeypatch):
    text = "x" * 1000
    changed(monkeypatch, "messages", lambda: world().exchange(f"{text} 1 {text}"))
    made(tmp_path / "r", "messages")
    changed(monkeypatch, "messages", lambda: world().exchange(f"{text} 2 {text}"))
    with pytest.raises(ReplayDivergence, match=r"tells others\n'[.]{3}x+ 2 x+', in the recording\n'[.]{3}x+ 1 x+'"):
        again(tmp_path / "r", 1, "messages")


def test_it_can_go_on_and_tell_all_that_differs(tmp_path):
    made(tmp_path / "r", "messages")
    recorded.PROGRAMS["other"] = lambda: recorded.messages(2.0)
    outcome, number = again(tmp_path / "r", 1, "other", keep_going=True)
    assert len(outcome.differences) >= 3
    assert number is not None


def test_state_that_differs_after_a_step_is_named(tmp_path, monkeypatch):
    made(tmp_path / "r", "steps")

    def spoilt():
        def spoil(event):
            if (event.kind, event.phase) == ("action", "begin") and event.info["action"].kind == "STEP":
                share = next(p for p in event.info["executor"].model.shares() if p.name == "head.weight")
                share.master[...] *= np.float32(1 + 1e-6)

        with listen(spoil):
            return recorded.steps()

    changed(monkeypatch, "steps", spoilt)
    outcome, _ = again(tmp_path / "r", 0, "steps", keep_going=True)
    assert "after step 1 of the run the state differs from the recording: weight of own/head.weight" in "".join(
        outcome.differences[:1]
    )


def test_a_request_is_complete_when_it_was_and_not_before(tmp_path, monkeypatch):
    def program():
        ranks = world()
        x = np.full(3, ranks.rank, np.float64)
        requests = [ranks.iall_reduce(x), ranks.irecv((3,), np.float64, 1 - ranks.rank, 3)]
        ranks.isend(x, 1 - ranks.rank, 3).wait()
        while not requests[1].test():
            pass
        return [request.wait().tolist() for request in reversed(requests)]

    changed(monkeypatch, "messages", program)
    results = made(tmp_path / "r", "messages")
    for rank in range(RANKS):
        assert again(tmp_path / "r", rank, "messages")[1] == results[rank]
    lines = lines_of(index(tmp_path / "r"))
    last = max(place for place, one in enumerate(lines) if one.get("is") == "got")
    write_lines(index(tmp_path / "r"), lines[:last])  # the process was killed before its last message was complete

    tested = []

    def cut():
        ranks = world()
        x = np.full(3, ranks.rank, np.float64)
        request = ranks.iall_reduce(x)
        assert isinstance(request, Request)
        tested.append(request.test())
        request.wait()

    changed(monkeypatch, "messages", cut)
    outcome, _ = again(tmp_path / "r", 1, "messages")
    assert "which was not answered any more" in outcome.end
    assert tested == [False]


@pytest.mark.parametrize("lines", [1, 2, 5, 9, 20])
def test_a_recording_that_was_cut_is_good_up_to_there(tmp_path, lines):
    made(tmp_path / "r", "messages")
    text = index(tmp_path / "r").read_bytes().splitlines(keepends=True)
    index(tmp_path / "r").write_bytes(b"".join(text[:lines]) + text[lines][: len(text[lines]) // 2])
    outcome, number = again(tmp_path / "r", 1, "messages")
    assert number is None
    assert outcome.end
    assert outcome.differences == []


def test_a_rank_that_asks_for_what_never_comes_is_found_waiting(tmp_path, monkeypatch):
    def polls():
        request = world().iall_reduce(np.ones(3))
        while not request.test():
            pass

    changed(monkeypatch, "messages", polls)
    made(tmp_path / "r", "messages")
    lines = index(tmp_path / "r").read_bytes().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if b'"is":"got"' in line)
    index(tmp_path / "r").write_bytes(b"".join(lines[:place]))
    outcome, _ = again(tmp_path / "r", 1, "messages")
    assert outcome.end.startswith("in message 1 of 1, iall_reduce on world, which was not answered any more")


def test_a_rank_that_ended_in_an_error_does_so_again(tmp_path, monkeypatch):
    def program():
        world().all_reduce(np.ones(2))
        raise DataError("no more")

    changed(monkeypatch, "messages", program)
    with pytest.raises(DataError):
        made(tmp_path / "r", "messages")
    ends = [lines_of(index(tmp_path / "r", rank))[-1]["why"] for rank in range(RANKS)]
    assert sorted(ends) == ["DataError ended the program", "RankStopped ended the program"]
    with pytest.raises(DataError, match="no more"):
        again(tmp_path / "r", ends.index("DataError ended the program"), "messages")


def test_only_the_ranks_that_were_asked_for_are_recorded(tmp_path):
    made(tmp_path / "r", "messages", ranks=[1])
    again(tmp_path / "r", 1, "messages")
    with pytest.raises(RecordingError, match=r"holds no recording of rank 0: it has ranks 1\."):
        RankReader(tmp_path / "r", 0)


def test_what_cannot_be_recorded_is_refused_on_every_rank(tmp_path):
    made(tmp_path / "r", "messages")
    for asked, said in (
        ({}, "holds a recording already"),
        ({"ranks": [2]}, "ranks are 0 to 1"),
        ({"steps": (4, 3)}, "steps 4:3"),
        ({"sent": "none"}, "kept as values or digest"),
    ):
        with pytest.raises(RecordingError, match=said):
            made(tmp_path / "r", "messages", **asked)

    def late():
        world().all_reduce(np.ones(1))
        with record(world(), tmp_path / "late"):
            pass

    with pytest.raises(RecordingError, match="right after world"):
        LocalWorld(2).run(late)


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path, monkeypatch, capfd):
    room = values.FIRST

    def write(file, data, at, write=values.os.pwrite):
        if at > 3000:
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(values.os, "pwrite", write)
    results = made(tmp_path / "r", "steps")
    monkeypatch.undo()
    assert room == values.FIRST
    assert len(results) == RANKS
    said = capfd.readouterr().err
    assert said.count("the recording ends here, training goes on") == RANKS
    assert "No space left on device" in said
    outcome, _ = again(tmp_path / "r", 1, "steps")
    assert "No space left" in outcome.end
    assert outcome.differences == []


# -- the command ------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
from mpitrain import record, world

def train():
    x = world().all_reduce(np.arange(4.0) * float(sys.argv[1]))
    return world().all_gather(x)

with record(world(), sys.argv[2], words=sys.argv):
    print("sum", train().sum())
"""


@pytest.fixture
def script(tmp_path):
    from mpitrain.comm.local import run_script

    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    assert run_script(2, str(path), ["1.0", str(tmp_path / "r")]) == 0
    return path


def test_a_script_must_be_named(tmp_path, script, capsys):
    with pytest.raises(RecordingError, match=r"(?s)A recording is data.*mpitrain replay .* --rank 1 SCRIPT 1.0"):
        main([str(tmp_path / "r"), "--rank", "1"])
    capsys.readouterr()
    assert main([str(tmp_path / "r"), "--rank", "1", str(script), "1.0", "x"]) == 0
    assert capsys.readouterr().out == "sum 24.0\nrank 1 replayed, bit by bit the same: 2 messages that it sent\n"
    assert main([str(tmp_path / "r"), "--rank", "1", "--keep-going", str(script), "1.5", "x"]) == 2
    assert "max |d| 1.5 at [3], in 3 of 4 elements" in capsys.readouterr().out


def test_a_folder_is_told_about(tmp_path, script, capsys):
    assert main([str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert "all steps of a run on 2 ranks (2 threads of one process)" in said
    assert "rank 1: 2 messages" in said
    index(tmp_path / "r").write_bytes(b"")
    main([str(tmp_path / "r")])
    said = capsys.readouterr().out
    assert "rank 0: 2 messages" in said
    assert "rank 1: " in said
    assert "is no index of a recording" in said
    index(tmp_path / "r", 0).unlink()
    for folder, why in ((tmp_path / "r", "is no index"), (tmp_path, "holds no recording")):
        with pytest.raises(RecordingError, match=why):
            main([str(folder)])


@pytest.mark.parametrize(
    ("words", "typed", "said"),
    [
        (["--at", "2"], "p x.tolist()\nn\nc\n", "[0.0, 2.0, 4.0, 6.0]"),
        (["--at", "2"], "w\nc\n", "return world().all_gather(x)"),
        (["--pdb"], "n\np __name__\nc\n", "'__main__'"),
        (["--pdb", "1.5"], "c\np x\nq\n", "here it ended"),
    ],
)
def test_it_can_be_debugged(tmp_path, script, monkeypatch, capsys, words, typed, said):
    import io

    factor = words.pop() if words[-1] == "1.5" else "1.0"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    call = [str(tmp_path / "r"), "--rank", "0", *words, str(script), factor, "x"]
    if factor == "1.5":
        with pytest.raises(ReplayDivergence):
            main(call)
    else:
        main(call)
    out = capsys.readouterr().out
    assert said in out


def test_it_stops_in_a_method_of_the_package_that_is_named(tmp_path, monkeypatch, capsys):
    """As docs/how-to/record-and-replay.md types it: a number of a line would not stay true."""
    import io
    from bdb import Breakpoint

    for name, none in (("next", 1), ("bplist", {}), ("bpbynumber", [None])):  # they are of all debuggers of a process
        monkeypatch.setattr(Breakpoint, name, none)
    trained(tmp_path, "--record-steps", "2:3")
    typed = "from mpitrain.parallel.tensor import ColumnLinear\nb ColumnLinear.forward\nc\np ('x is', x.shape)\nq\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    assert main([str(tmp_path / "r"), "--rank", "1", "--pdb"]) == 130
    out = capsys.readouterr().out
    assert "the first step that is made again" in out
    assert "tensor.py" in out
    assert "('x is', (" in out


def test_messages_that_can_be_stopped_at_are_told_and_others_refused(tmp_path, monkeypatch, capsys):
    import io

    trained(tmp_path, "--record-steps", "2:2")
    calls = [one for one in lines_of(index(tmp_path / "r")) if one.get("is") == "call"]
    numbers = [one["n"] for one in calls]
    of_steps = [one["n"] for one in calls if one["step"]]
    left_out = next(n for n in range(1, numbers[-1]) if n not in numbers)
    capsys.readouterr()
    assert main([str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    assert f"({of_steps[0]} to {of_steps[-1]} of recorded steps)" in said
    assert f"mpitrain replay {tmp_path / 'r'} --rank" in said
    for at in (left_out, numbers[-1] + 1):
        with pytest.raises(RecordingError, match=f"Messages {of_steps[0]} to {of_steps[-1]} are of recorded steps"):
            main([str(tmp_path / "r"), "--rank", "1", "--at", str(at)])
    sites = {one["site"]: one for one in calls if one["step"]}
    assert {site.partition(":")[0] for site in sites} >= {"data.py", "executor.py"}, sites
    for one, more in [*((one, []) for one in sites.values()), (calls[-1], ["--pdb"])]:
        monkeypatch.setattr("sys.stdin", io.StringIO("c\n"))
        main([str(tmp_path / "r"), "--rank", "1", "--at", str(one["n"]), *more])
        said = capsys.readouterr().out
        assert f"--- before message {one['n']}" in said
        file, _, line = one["site"].partition(":")
        assert f"{file}({line})" in said
        assert "first step that is made again" not in said


# -- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "layout"),
    [("float16, skipped steps", "pp2tp2"), ("bfloat16", "tp2"), ("PowerSGD", "dp3")],
)
def test_a_training_is_the_same_run_again(feature, layout):
    replays, compared = replay_layouts.judge(feature, layout, replay_layouts.random.Random(0))
    assert replays >= 2
    assert compared > 100


@pytest.mark.slow
@pytest.mark.parametrize("layout", replay_layouts.LAYOUTS)
@pytest.mark.parametrize("feature", ["dropout", "ZeRO 3", "local", "stale workers", "offload", "experts"])
def test_some_features_on_all_layouts(feature, layout):
    try:
        assert replay_layouts.judge(feature, layout, replay_layouts.random.Random(1))[0]
    except replay_layouts.Refused as error:
        pytest.skip(str(error))


def test_flags_that_name_files_and_places_are_left_out():
    flags = [
        "--lr",
        "-1e-3",
        "--config",
        "a.toml",
        "--dp=2",
        "--faults=kill rank=1",
        "--offload-to",
        "hdf5:/x",
        "--check",
    ]
    assert without(flags, ("--config", "--faults", "--offload-to")) == ["--lr", "-1e-3", "--dp=2", "--check"]


def trained(tmp_path, *flags):
    from mpitrain.train import main as train

    (tmp_path / "text").write_text("It says how much it will take, and takes as much. " * 300)
    words = ["--model", "gpt-tiny", "--batch", "8", "--steps", "3", "--sample-length", "0", "--dp", "2", "--tp", "2"]
    words += ["--data", str(tmp_path / "text"), "--run", str(tmp_path / "run"), "--record", str(tmp_path / "r"), *flags]
    LocalWorld(4, timeout=60).run(train, words)


@pytest.mark.parametrize("flags", [[], ["--record-sent", "digest", "--eval-every", "1"]])
def test_the_size_is_told_before_the_first_step(tmp_path, capsys, flags):
    trained(tmp_path, *flags)
    told = capsys.readouterr().out.partition("a step and rank, ")[2].partition(" MiB in all")[0]
    size = sum(path.stat().st_size for path in (tmp_path / "r").iterdir()) / 2**20
    assert abs(float(told) - size) < 0.12 * size


def test_a_disk_with_too_little_room_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    from mpitrain.replay import recorded as trainers_side

    monkeypatch.setattr(trainers_side, "_free", lambda folder: 1 << 20)
    with pytest.raises(RecordingError, match=r"needs about \d+ MiB, 1 MiB are free there"):
        trained(tmp_path)
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("rank", [0, 3])
def test_a_save_that_ends_in_the_recorded_steps_and_digests_are_no_difference(tmp_path, rank):
    flags = ["--async-save", "--save-every", "1", "--digests", "1", "--record-steps", "3:4"]
    trained(tmp_path, *flags)
    assert main([str(tmp_path / "r"), "--rank", str(rank)]) == 0
