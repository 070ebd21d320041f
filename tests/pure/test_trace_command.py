"""`mpitrain trace`: what it prints and writes of traces that are made up, and what it says of wrong words."""

import gzip
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the made-up traces are
from traces import ranks_of, send, together, trace_of

from mpitrain.cli import folded
from mpitrain.cli import main as cli
from mpitrain.debug.trace.records import MEMORY, RankTrace, Trace
from mpitrain.errors import ConfigError, DataError, LaunchError
from mpitrain.trace import command
from mpitrain.trace.findings import findings
from mpitrain.trace.known import know
from mpitrain.trace.perfetto import events, write_perfetto
from mpitrain.trace.step_report import step_report
from mpitrain.trace.summary import summary
from mpitrain.trace.words import ranges

MS = 10**6
HOSTILE = "\x1b[2J\x1b]0;pwned\x07\u202e\r\n\x00"


def a_run(size=8, steps=3, clocks=None, reads=None, word=""):
    """Pairs of tp on stages of pp: each step F, a sum over tp for which the odd rank is late, a message, STEP."""
    tp = [(at, at + 1) for at in range(0, size, 2)]
    pp = [(at, at + size // 2) for at in range(size // 2)]
    ranks = ranks_of(size, clocks, reads, tp=tp, pp=pp)
    for rank in ranks:
        rank.facts = {
            "model": f"gpt-mini{word}",
            "command": ["train.py", word or "--tp", "2"],
            "layout": {"pp": 2, "edp": size // 4, "ep": 1, "cp": 1, "tp": 2},
            "coords": {"pp": rank.rank // (size // 2), "edp": rank.rank // 2 % (size // 4), "tp": rank.rank % 2},
            "schedule": {"name": "gpipe", "microbatches": 1, "chunks": 1, "slices": 1},
            "traffic": {"steps": 1, "lines": [["tp", "layers", "all_reduce", 1, 32.0]]},
        }
    for number in range(1, steps + 1):
        at = 100 * MS * (number - 1)
        for rank in ranks:
            rank.step = number
            about = {"loss": 3.0 - number / 10, "tokens": 256}
            rank.steps.append({"step": number, "start": at, "stop": at + 90 * MS, "ops": number == 2, **about})
            rank.action = "LOAD"
            rank.span("action", "LOAD0@0", at, at)
        for first, second in tp:
            pair = ranks[first], ranks[second]
            for rank in pair:
                rank.action = "F"
                rank.span("action", "F0@0", at + MS, at + 41 * MS)
                rank.depth = 1
                if number == 2:
                    rank.span("op", f"linear{word}", at + 2 * MS, at + 20 * MS, path=f"blocks.0.mlp{word}")
                    rank.depth = 2
            enter = {first: at + 10 * MS, second: at + 20 * MS - number}
            together(pair, "tp", enter, {first: at + 20 * MS, second: at + 20 * MS})
            for rank in pair:
                rank.depth = 0
        for source, dest in pp:
            ranks[source].action, ranks[dest].action = "SEND_F", "RECV_F"
            send(ranks[source], ranks[dest], "pp", at + 50 * MS, at + 60 * MS, at + 45 * MS, blocks=number % 2 == 0)
        for rank in ranks:
            rank.action = "STEP"
            rank.span("action", "STEP@0", at + 70 * MS, at + 90 * MS)
            rank.action = ""
    return ranks


def known_run(**how):
    ranks = a_run(**how)
    trace = trace_of(ranks)
    for rank in trace.ranks:
        owner = f"activations{how.get('word', '')}"
        rank.strings.append(owner)
        rank.memory = np.array([(30 * MS, 2, len(rank.strings) - 1, 1 << 20)], MEMORY)
        rank.memory["time"] += 100 * MS
        rank.host += how.get("word", "")
    return know(trace)


def lines_of(text, width=100):
    lines = text.splitlines()
    assert max(map(len, lines)) <= width, max(lines, key=len)
    assert all(line == line.rstrip() for line in lines)
    return lines


# --------------------------------------------------------------------------------------------------------- the summary


def test_the_summary_is_readable_on_a_hundred_columns():
    text = summary(findings(known_run(), "runs/a"))
    lines = lines_of(text)
    assert lines[0] == "runs/a: 8 ranks on 1 host, pp 2 x dp 2 x tp 2"
    assert "a step takes 90.00 ms, the median of 2 (step 1, which warms up, took 90.00 ms and is left out)" in " ".join(
        text.split()
    )
    heads = [line.split()[0] for line in lines if re.match("[A-Z]{3,} ", line)]
    assert heads == ["TIME", "MESSAGES", "SENT", "OPS", "MEMORY"]
    table = next(at for at, line in enumerate(lines) if line.split()[:2] == ["rank", "place"])
    assert lines[table].split() == [
        *("rank", "place", "compute", "update", "pp", "tp", "rest", "waits", "for", "rank", "delays", "idle")
    ]
    first = lines[table + 1].split()
    assert first[:4] == ["0", "pp0", "dp0", "tp0"]
    # 30 of 90 ms of F outside of the sum, 20 of STEP, 10 in the sum, all of it waiting
    assert first[4:12] == ["33.3", "22.2", "0.0", "11.1", "33.3", "11.1", "1", "11.1"]
    assert "to the byte" in text


def test_one_wide_layout_and_many_ranks_fit_too():
    ranks = ranks_of(
        40,
        **{
            name: [tuple(range(at, at + 2)) for at in range(0, 40, 2)]
            for name in ("edp+ep+cp+tp", "dp+cp", "tp", "pp", "ends", "cp")
        },
    )
    for rank in ranks:
        rank.step = 1
        rank.steps.append({"step": 1, "start": 0, "stop": 10**9, "ops": False})
        rank.span("action", "LOAD0@0", 0, 0, action="LOAD")
    for at, axis in enumerate(ranks[0].axes):
        for members in {rank.axes[axis] for rank in ranks}:
            of = [ranks[member] for member in members]
            together(of, axis, [at * 10**8 + r * MS for r in range(40)], [at * 10**8 + 50 * MS] * 40)
    known = know(trace_of(ranks))
    lines = lines_of(summary(findings(known, "runs/wide")))
    assert any("others" in line for line in lines)
    assert any("(24 ranks more" in line for line in lines)
    page = lines_of(step_report(known, "runs/wide", 1))
    assert "These 8 of 40 ranks delay the others most" in page[-1]


def test_a_trace_without_steps_and_one_without_anything_are_told_all_the_same():
    ranks = ranks_of(2)
    together(ranks, "world", [0, 60 * MS], [80 * MS, 100 * MS])
    text = summary(findings(know(trace_of(ranks)), "mine"))
    assert "none: the trace is looked at as a whole" in text
    assert "TIME of the trace" in text
    assert "compute" not in text
    assert re.search(r"world +all_reduce +2 +1 +32 +train.py:5", text)
    lines_of(text)
    lines_of(summary(findings(know(Trace([RankTrace(0, 2), RankTrace(1, 2)])), "empty")))


def test_what_is_missing_is_told():
    ranks = a_run()
    del ranks[3]
    trace = trace_of(ranks)
    trace.ranks[0].dropped = 1234
    trace.ranks[1].steps.pop()
    text = " ".join(summary(findings(know(trace), "runs/a")).split())
    assert "no file of rank 3, of 8" in text
    assert "1,234 spans did not fit (most on rank 0: 1,234)" in text
    assert "steps 3, which are in the files of some ranks alone, or of none" in text


def test_errors_of_clocks_are_told():
    reads = {"a": lambda true: true, "b": lambda true: true + 10**9}
    text = summary(findings(known_run(clocks=["a", "b"] * 4, reads=reads), "runs/a"))
    assert "nothing bounds the clock" in text or "off by at most" in text
    lines_of(text)


@pytest.mark.parametrize("show", ["summary", "step"])
def test_no_sign_of_a_file_reaches_the_terminal(show):
    known = known_run(word=HOSTILE)
    for lane in known.lanes:
        lane.rank.strings[lane.rank.strings.index("tp")] = f"tp{HOSTILE}"
    text = summary(findings(known, "x")) if show == "summary" else step_report(known, "x", 2)
    assert "linear?" in text
    assert all(sign == "\n" or sign.isprintable() for sign in text)


def test_facts_of_any_shape_are_survived():
    """What stands in the head of a file is anybody's."""
    odd = [None, 3, -1.5, "x", [], [[[]]], {}, {"a": {"b": []}}, {"tp": "two"}, {"name": 3, "microbatches": -1}]
    for value in odd:
        ranks = a_run()
        for rank in ranks:
            rank.facts = dict.fromkeys(("model", "command", "layout", "coords", "schedule", "traffic", "memory"), value)
        known = know(trace_of(ranks))
        found = findings(known, "x")
        lines_of(summary(found))
        lines_of(step_report(known, "x", 2))
        json.dumps(found.as_json(), allow_nan=False)


def test_json_says_what_the_summary_says():
    found = json.loads(json.dumps(findings(known_run(), "runs/a").as_json(), allow_nan=False))
    assert found["steps_judged"] == [2, 3]
    assert found["step_ns_median"] == 90 * MS
    assert found["shares"][0]["axes"]["tp"]["waits"] == pytest.approx(10 * MS, abs=3)
    assert found["sent"]["kinds"][0]["axis"] == "tp"
    assert found["clocks"]["exact"] is True


# ------------------------------------------------------------------------------------------------------ the step report


def test_the_report_of_a_step_of_eight_ranks_is_one_page():
    lines = lines_of(step_report(known_run(), "runs/a", 2))
    assert len(lines) <= 50
    assert lines[0] == "step 2 of runs/a: 90.00 ms, loss 2.8000, 256 tokens"
    ranks = [line for line in lines if re.match("rank [0-7]  +computed", line)]
    assert len(ranks) == 8
    at = lines.index(ranks[0])
    assert lines[at : at + 4] == [
        "rank 0       computed  50.00 ms, 55.6 %: F 30.00, STEP 20.00, most in linear 8.00",
        "pp0 dp0 tp0  sent      64 B in 2 calls: tp 32 B, pp 32 B",
        "             waited    10.00 ms, 11.1 %: rank 1 10.00 (tp all_reduce)",
        "             held      1.00 MiB: activations 1.00",
    ]
    assert "sent      32 B in 1 call: tp 32 B" in "\n".join(lines), "a receive is no call that sends"
    assert "waited    15.00 ms, 16.7 %: rank 5 10.00 (tp all_reduce), rank 0 5.00 (pp recv)" in "\n".join(lines)


def test_a_strip_shows_what_a_rank_did_most_in_each_moment():
    lines = step_report(known_run(), "runs/a", 2).splitlines()
    strips = {line[:6]: line[7:] for line in lines[3:12] if line.startswith("rank")}
    assert len(strips) == 8
    first = strips["rank 0"]
    assert len(first) == 93
    # 90 ms on 93 letters: F from 1 ms, the wait from 10 to 20, F to 41, nothing, STEP from 70
    assert re.fullmatch(r" F{8,10}\.{10,11}F{20,22} {28,31}U{20,21}", first), first
    assert re.search(r" \.{5}p{10,11} ", strips["rank 4"]), strips["rank 4"]
    assert any("F computing" in line and "U update" in line and ". waiting" in line for line in lines)


def test_ranks_can_be_chosen():
    text = step_report(known_run(), "runs/a", 1, [6, 2])
    assert re.findall(r"^rank (\d)  +computed", text, re.M) == ["2", "6"]
    assert "ops and memory were not noted in this step" in text
    with pytest.raises(DataError, match="has no rank 9; it has 0-7"):
        step_report(known_run(), "runs/a", 1, [9, 2])
    with pytest.raises(DataError, match="holds no step 7 from its begin to its end on every rank; it has 1-3"):
        step_report(known_run(), "runs/a", 7)


# ------------------------------------------------------------------------------------------------------------- perfetto


PHASES = {
    "X": {"pid", "tid", "ts", "dur", "name", "cat", "args"},
    "i": {"pid", "tid", "ts", "s", "name", "cat", "args"},
    "s": {"pid", "tid", "ts", "id", "name", "cat"},
    "f": {"pid", "tid", "ts", "id", "name", "cat", "bp"},
    "C": {"pid", "ts", "name", "args"},
    "M": {"pid", "name", "args"},
}


def check_format(found):
    """By the document of the format: keys and kinds of values of each phase, slices that nest, arrows that bind."""
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    slices, starts, ends = {}, {}, {}
    for event in found["traceEvents"]:
        phase = event["ph"]
        assert set(event) - {"ph"} - ({"tid"} if phase == "M" else set()) == PHASES[phase], event
        assert type(event["pid"]) is int
        assert type(event["name"]) is str
        if phase == "M":
            kinds = {"process_name": "name", "process_labels": "labels", "thread_name": "name"}
            kinds["process_sort_index"] = "sort_index"
            assert list(event["args"]) == [kinds[event["name"]]]
            continue
        assert event["ts"] >= 0
        if phase == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        elif phase in "sf":
            (starts if phase == "s" else ends).setdefault(event["id"], []).append(event)
            assert event.get("bp", "e") == "e"
        elif phase == "C":
            assert all(type(value) is int for value in event["args"].values())
    for of_track in slices.values():
        stack = []
        for ts, minus, name in sorted(of_track):
            while stack and stack[-1] <= ts + 1e-9:
                stack.pop()
            end = ts - minus
            assert not stack or end <= stack[-1] + 1e-3, f"{name} overlaps what it is in"
            stack.append(end)
    assert starts.keys() == ends.keys()
    for number, (start,) in starts.items():
        (end,) = ends[number]
        for event in (start, end):
            of_track = slices[event["pid"], event["tid"]]
            assert any(ts <= event["ts"] < ts - minus for ts, minus, _ in of_track), "an arrow binds to no slice"
        assert start["ts"] <= end["ts"]
    return slices, starts


def test_perfetto_files_keep_to_the_format(tmp_path):
    known = known_run()
    for name in ("a.json", "a.json.gz"):
        size = write_perfetto(known, str(tmp_path / name))
        data = (tmp_path / name).read_bytes()
        assert size == len(data)
        found = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
        slices, arrows = check_format(found)
        assert set(slices) == {(rank, 0) for rank in range(8)}
        assert len(arrows) == 3 * 4 + 3 * 4  # a message a pair and step, and one rank of each pair waits for the other
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names[5] == "rank 5 pp1 dp0 tp1"


def test_what_other_threads_move_has_tracks_of_its_own():
    ranks = a_run()
    for start, stop in ((5, 50), (20, 30), (45, 60), (60, 70)):
        ranks[2].span("copy", "read", start * MS, stop * MS)
    ranks[2].span("disk", "write", 5 * MS, 500 * MS)
    found = list(events(know(trace_of(ranks))))
    slices, _ = check_format({"displayTimeUnit": "ms", "traceEvents": found})
    assert {track for rank, track in slices if rank == 2} == {0, 1, 2, 3}


def test_hostile_names_are_only_text_in_perfetto(tmp_path):
    write_perfetto(known_run(word=HOSTILE), str(tmp_path / "a.json"))
    data = (tmp_path / "a.json").read_bytes()
    assert b"\x1b" not in data
    check_format(json.loads(data))


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("words")` -> what the command prints of a trace that is made up, whatever folder is named."""
    monkeypatch.setattr(command, "read", lambda folder: trace_of(a_run()))

    def run(words):
        assert cli(shlex.split(words)) == 0
        return capsys.readouterr().out

    return run


def test_the_command_prints_the_summary_a_step_or_json(run):
    assert run("trace runs/a").startswith("runs/a: 8 ranks on 1 host")
    assert run("trace runs/a --step 2").startswith("step 2 of runs/a: 90.00 ms")
    assert re.findall(r"^rank (\d)  +computed", run("trace runs/a --step 2 --ranks 0,5"), re.M) == ["0", "5"]
    assert json.loads(run("trace runs/a --json"))["title"] == "runs/a"
    assert run("trace --help").startswith("usage: mpitrain trace RUN")
    assert run("trace").startswith("usage: mpitrain trace RUN")


def test_the_command_writes_files(run, tmp_path):
    said = run(f"trace runs/a --html {tmp_path}/a.html --perfetto {tmp_path}/a.json.gz")
    assert len(said.splitlines()) == 2
    assert (tmp_path / "a.html").read_text().startswith("<!")
    check_format(json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--json", "the folder of the run comes first"),
        ("x --json --step 2", "give one of them"),
        ("x --ranks 0", "--ranks chooses ranks of --step N"),
        ("x --step 2 --ranks 0,a", "must be numbers of ranks, parted by commas"),
        ("x --step -2", "must be a whole number from 0"),
        ("x --stop 2", "Did you mean --step?"),
        ("x y", "a word that belongs to no option"),
        ("x --perfetto /nowhere/a.json", "cannot be written"),
    ],
)
def test_wrong_words_are_refused(words, said, monkeypatch):
    monkeypatch.setattr(command, "read", lambda folder: trace_of(a_run()))
    with pytest.raises(ConfigError) as error:
        command.main(shlex.split(words))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 5


def test_what_is_no_file_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read", lambda folder: trace_of(a_run()))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for flag in ("--html", "--perfetto"):
        for name in ("link", "pipe", "."):
            with pytest.raises(ConfigError, match="is there and is no file"):
                command.main(["x", flag, str(tmp_path / name)])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


def test_an_output_that_is_full_or_has_no_such_signs_is_no_traceback(monkeypatch):
    monkeypatch.setattr(command, "read", lambda folder: trace_of(a_run()))
    written = io.BytesIO()
    monkeypatch.setattr(command.sys, "stdout", io.TextIOWrapper(written, "ascii"))
    command.main(["runs/\u00fc"])
    assert written.getvalue().startswith(b"runs/?: 8 ranks")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(command.sys, "stdout", full)
        with pytest.raises(ConfigError, match="the output cannot be written: No space left"):
            command.main(["x"])


def test_of_very_many_steps_the_first_and_the_last_are_named():
    assert ranges([1, 2, 3, *range(11, 1000, 10)]) == "1-3, 11, 21, 31, 41 ... 991"


def test_a_folder_without_a_trace_is_told(tmp_path):
    with pytest.raises(DataError, match="holds no trace"):
        command.main([str(tmp_path)])


def test_it_is_one_process(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(LaunchError, match="is one process"):
        command.main(["x"])


def test_headings_are_bold_for_a_person_alone(monkeypatch):
    monkeypatch.setattr(command.sys, "stdout", type("Tty", (), {"isatty": lambda self: True})())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert command._mark("x") == "\033[1mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert command._mark("x") == "x"


def test_a_terminal_does_not_break_a_message_within_a_word(monkeypatch):
    text = "DataError: runs/nothere: No such file or directory.  Train with --trace, or name the folder.\nIt is short."
    assert folded(text) == text  # a file has no width
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    lines = folded(text).split("\n")
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == text.split()
    assert lines[-1] == "It is short."
