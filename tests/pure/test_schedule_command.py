"""`mpitrain schedule`: prints, draws and checks schedules by name and from files, and says what is wrong with them."""

import io
import os
import re
import shlex
import sys
import time

import pytest

from mpitrain.cli import main as cli
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.schedule.command import OPTIONS, main
from mpitrain.schedule.source import completed, read_rows, rows_text


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("words")` -> what the command prints on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(words):
        assert main(shlex.split(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def written(tmp_path):
    """`written(text)` -> the path of a file that holds it."""

    def written(text):
        path = tmp_path / "mine.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return written


def figures(printed):
    """The line of each rank, by the heads of the columns."""
    lines = [line for line in printed.splitlines() if re.match(r"rank +stage| +\d+ +[\d,]+ +[\d.]+ ", line)]
    heads = re.split(r" {2,}", lines[0].strip())
    return [dict(zip(heads, re.split(r" {2,}", line.strip()), strict=True)) for line in lines[1:]]


def lines_of_time(printed):
    """The table, and what is said of the whole."""
    return [line for line in printed.splitlines() if re.match(r"time|rank \d+\||makespan|bubble|blocking", line)]


# ------------------------------------------------------------------------------------------------------------- by name


def test_without_words_it_lists_every_schedule(run):
    printed = run("")
    for kind in SCHEDULES.values():
        assert f"{kind.name} " in printed
        assert kind.paper in printed
    assert "pipedream and pipedream-2bw use older weights" in printed


def test_every_schedule_prints_its_table_and_figures(run):
    for name in SCHEDULES:
        printed = run(name)
        assert printed.startswith(f"{name}: 4 ranks")
        assert "rank 3|" in printed
        assert len(figures(printed)) == 4
        assert "blocking sends" in printed


@pytest.mark.parametrize(
    ("words", "makespan", "bubble", "relative", "idle", "flying"),
    [  # T6.1, T7.1, T7.2, T9.1, T9.2, T10.1; fractions of section 6's two conventions
        ("gpipe", "33", "27.3", "37.5", "9", "8 8 8 8"),
        ("gpipe --costs b=0.5,w=0.5", "22", "27.3", "37.5", "6", "8 8 8 8"),
        ("1f1b", "33", "27.3", "37.5", "9", "4 3 2 1"),
        ("interleaved", "28.5", "15.8", "18.8", "4.5", "5.5 4.5 3.5 2.5"),
        ("interleaved --costs b=0.5,w=0.5", "19", "15.8", "18.8", "3", "5.5 4.5 3.5 2.5"),
        ("terapipe", "26.25", "8.6", "9.4", "2.25", "8 8 8 8"),
        ("zb-h1", "27", "11.1", "12.5", "3", "4 3 2 1"),
        ("1f1b --stages 1 --microbatches 3", "9", "0.0", "0.0", "0", "1"),
    ],
)
def test_the_figures_are_those_of_the_papers(run, words, makespan, bubble, relative, idle, flying):
    printed = run(words)
    assert re.search(r"^makespan +(\S+)$", printed, re.MULTILINE)[1] == makespan
    assert re.search(r"^bubble +(\S+) % of the makespan, (\S+) % of the ideal", printed, re.MULTILINE).groups() == (
        bubble,
        relative,
    )
    assert {rank["idle"] for rank in figures(printed)} == {idle}
    assert " ".join(rank["in flight"] for rank in figures(printed)) == flying


def test_it_says_whether_blocking_sends_would_hang(run):
    assert "blocking sends  would do" in run("gpipe")
    hang = "blocking sends  would hang (mpitrain's never block): rank 0 at SEND_F1@0; rank 1 at SEND_B0@1"
    assert hang in run("1f1b --stages 2 --microbatches 2")


def test_schedules_that_do_not_drain_print_which_version_of_the_weights_is_used(run):
    printed = run("pipedream --batches 10")  # T8.1
    for line in (
        "stage 0| 0 0 0 0 1 2 3 4 5 6",
        "stage 1| 0 0 0 1 2 3 4 5 6 7",
        "stage 2| 0 0 1 2 3 4 5 6 7 8",
        "stage 3| 0 1 2 3 4 5 6 7 8 9",
    ):
        assert line in printed.splitlines()
    assert [rank["versions"] for rank in figures(printed)] == ["4", "3", "2", "1"]
    printed = run("pipedream-2bw --batches 4")  # T8.4
    assert printed.count("| 0 0 0 0 0 0 0 0 1 1 1 1 2 2 2 2\n") == 4
    assert {rank["versions"] for rank in figures(printed)} == {"2"}
    assert "version" not in run("1f1b")


def test_bytes_in_flight_are_counted_where_sizes_are_given(run):
    printed = run("zb-h1 --bytes saved=10KiB,kept=6KiB")
    held = [int(rank["bytes in flight"].replace(",", "")) for rank in figures(printed)]
    assert held == [1024 * n for n in (40, 36, 32, 28)]  # (p - i) of B's and i of W's
    printed = run("gpipe --stages 2 --microbatches 2 --bytes saved=1:10,boundary=0")
    assert [rank["bytes in flight"] for rank in figures(printed)] == ["2", "20"]
    assert "bytes" not in run("gpipe")


def test_costs_and_sizes_are_of_a_rank_and_shared_by_its_passes_so_schedules_can_be_compared(run):
    work = {"gpipe": "", "interleaved": "--chunks 4", "zb-h1": "", "terapipe": "--slices 5"}
    for name, more in work.items():
        printed = run(f"{name} {more} --costs f=2,b=3,w=4 --bytes saved=1001,boundary=0")
        assert {rank["busy"] for rank in figures(printed)} == {"72"}
        held = [int(rank["bytes in flight"].replace(",", "")) for rank in figures(printed)]
        flying = [float(rank["in flight"]) for rank in figures(printed)]
        assert held == pytest.approx([1001 * micros for micros in flying], rel=1e-2)
    printed = run("interleaved")
    assert [rank["passes"] for rank in figures(printed)] == ["11", "9", "7", "5"]
    assert "F takes 1, B 2; shared by the stages of a rank" in printed
    assert "passes" not in run("1f1b")
    boundaries = figures(run("interleaved --bytes boundary=1000B"))
    assert {rank["bytes in flight"][-4:] for rank in boundaries} == {",000"}  # not shared by chunks
    by_stage = run("interleaved --stages 2 --costs f=1:1:1:1,b=1:1:1:1,w=1:1:1:1")
    assert {rank["busy"] for rank in figures(by_stage)} == {"48"}
    by_slice = run("terapipe --stages 2 --costs f=1:2,b=1:2,w=1:2")
    assert [rank["busy"] for rank in figures(by_slice)] == ["24", "48"]


def test_costs_may_differ_between_stages_and_messages_take_time(run):
    printed = run("gpipe --stages 2 --microbatches 1 --costs f=1:3,b=2,w=0,message=0.5")
    assert "F takes 1:3, B 2, a message 0.5" in printed
    assert "makespan        9" in printed  # 1 + 0.5 + 3 + 2 + 0.5 + 2


def test_a_table_is_as_wide_as_asked_for_and_as_the_terminal_else(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "64")
    for words, width in (("1f1b", 64), ("1f1b --width 40", 40), ("interleaved --stages 8 --width 80", 80)):
        assert width - 8 < max(map(len, run(words).splitlines())) <= width


# ---------------------------------------------------------------------------------------------------------- from a file


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_that_were_printed_are_read_back(run, written, name):
    micros, batches = {"pipedream": (1, 8), "pipedream-2bw": (3, 3)}.get(name, (3, 1))
    asked = f"{name} --stages 3 --microbatches {micros}"
    chunks, slices = (2 if name == "interleaved" else 1), (4 if name == "terapipe" else 1)
    rows = complete(name, ranks=3, microbatches=micros, chunks=chunks, slices=slices, batches=batches)

    printed = run(f"{asked} --rows")
    assert printed.startswith(f"# {name}: 3 ranks")
    assert read_rows(printed) == rows
    assert lines_of_time(run(f"--file {written(printed)}")) == lines_of_time(run(asked))

    compute = run(f"{asked} --compute-rows")
    assert not re.search(r"LOAD|SEND|RECV|STEP", compute)
    assert completed(read_rows(compute), batches if batches > 1 else None) == rows
    more = f" --batches {batches}" if batches > 1 else ""
    assert (f"read it with{more}" in compute) == (batches > 1)
    assert run(f"--file {written(compute)}{more} --rows").partition("\n")[2] == printed.partition("\n")[2]


def test_messages_of_the_file_are_kept_and_the_update_is_added(run, written):
    rows = "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 RECV_B1@0 B1@0\n"
    first = "RECV_F0@1 F0@1 B0@1 SEND_B0@1 RECV_F1@1 F1@1 B1@1 SEND_B1@1"
    careful = "RECV_F0@1 F0@1 B0@1 RECV_F1@1 SEND_B0@1 F1@1 B1@1 SEND_B1@1"
    assert "would hang" in run(f"--file {written(rows + first)}")
    assert "would do" in run(f"--file {written(rows + careful)}")
    assert f"LOAD0@1 LOAD1@1 COUNT@1 {careful} REDUCE@1 STEP@1" in run(f"--file {written(rows + careful)} --rows")


def test_a_file_has_comments_empty_lines_and_windows_ends(run, written):
    path = written(b"\xef\xbb\xbf# mine\r\n\r\n  F0@0\tF1@0 B1@0  B0@0 # rank 0\r\n")
    assert [rank["in flight"] for rank in figures(run(f"--file {path}"))] == ["2"]


def test_a_dash_reads_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"F0@0 B0@0")))
    assert run("--file -").startswith("standard input\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no rows"),
        ("# nothing\n\n", "there are no rows"),
        ("F0@0\nF0@1 X0@1 B0@1", "line 2, column 6: 'X0@1' is not an action"),
        ("F0@0 B0@0 STEP", "line 1, column 11: 'STEP' is not an action"),
        ("F0@0 B0@0\nF0@0 B0@0", "stage 0 is on ranks 0 and 1 (lines 1 and 2)"),
        ("F0@0 B0@0\nF0@999999999 B0@999999999", "no row has an F of stage 1"),
        ("F0@0 F1@0 B0@0", "line 1: B1@0 is missing"),
        ("F0@0 SEND_F0@0 B0@0\n\nF0@1 B0@1", "line 1: RECV_B0@0 is missing"),
        ("F0@0 SEND_F0@0 B0@0\n\nF0@1 B0@1", "leave all SEND, RECV out, and they are added"),
        ("# mine\n\n B0@0  F0@0 # F0@0", "line 3, column 2: B0@0 comes before F0@0 (column 8), which it needs"),
        ("F0@0 B0@0 F0@0", "line 1, column 11: F0@0 stands twice, first in column 1"),
        ("F0@0 B0@0\n#\nLOAD0@1", "line 3 has no F"),
        ("F0@0 B0@0 STEP@0", "the rows have STEP but no LOAD, COUNT, REDUCE.\nWay out: leave STEP out"),
        ("LOAD0@0 COUNT@0 F0@0 B0@0 REDUCE@0 STEP@0\nF0@1 B0@1", "line 2: LOAD0@1 is missing; leave all LOAD, COUNT"),
        ("F" + "9" * 5000 + "@0", "is not an action"),
        ("x" * 100_000, f"line 1, column 1: '{'x' * 60}...' is not an action"),
        ("\n".join(f"F0@{stage}" for stage in range(1025)), "there are 1,025 rows, at most 1,024 are read"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_the_name_of_its_file(written, text, words, capsys):
    path = written(text)
    with pytest.raises(ScheduleError, match=re.escape(words)) as caught:
        main(["--file", path])
    assert str(caught.value).startswith(path)
    assert cli(["schedule", "--file", path]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ScheduleError: {path}")
    assert len(printed.err.splitlines()) <= 5
    assert len(printed.err) < 1000


def test_a_deadlock_is_drawn_up_to_where_it_stands(written, capsys):
    path = written("# circle\nF0@0 B0@0 F1@0 B1@0\n\n  F0@1 F1@1 B0@1 B1@1")
    with pytest.raises(ScheduleError) as caught:
        main(["--file", path])
    places = "rank 0 at RECV_B0@0 (line 2, column 6); rank 1 at RECV_F1@1 (line 4, column 8)"
    assert str(caught.value) == f"{path}: deadlock: {places}"
    assert capsys.readouterr().out.splitlines() == [
        "time    0",
        "rank 0| F0  .",
        "rank 1|  . F0",
        "",
        "Here it stands:",
        "rank 0 waits at RECV_B0@0 for SEND_B0@1 of rank 1",
        "rank 1 waits at RECV_F1@1 for SEND_F1@0 of rank 0",
    ]


def test_where_a_model_must_place_its_stages_is_said_of_files_that_place_them_otherwise(run, written):
    back = "F0@0 F0@3 B0@3 B0@0\nF0@1 F0@2 B0@2 B0@1"
    printed = " ".join(run(f"--file {written(back)} --width 60").split())
    assert "placement stage 0 on 0, 1 on 1, 2 on 1, 3 on 0. To be trained," in printed
    assert "stage q on rank q mod 2" in printed
    assert "placement" not in run("interleaved")


def test_a_file_that_is_none_is_refused_before_it_is_read(tmp_path, written):
    os.mkfifo(tmp_path / "pipe")
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)
    for path, words in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "pipe", "is not a regular file"),
        (large, "is larger than 4 MiB"),
        (written(b"F0@0 \xff"), "byte 5 is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=words):
            main(["--file", str(path)])


# -------------------------------------------------------------------------------------------------------- other options


def test_a_picture_is_written_and_only_where_it_can_be(run, tmp_path):
    path = tmp_path / "my picture.svg"
    plain = run(f"1f1b --svg '{path}'")
    assert "rank 0|" in plain
    text = path.read_text()
    assert "1f1b: 4 ranks, 8 micro-batches" in text
    run(f"1f1b --svg '{path}' --arrows")
    assert len(path.read_text()) > len(text)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        main(["gpipe", "--svg", str(tmp_path / "no/folder.svg")])


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("1fb", ConfigError, "1fb: there is no such schedule.  Did you mean 1f1b?  Schedules: gpipe 1f1b "),
        ("--stages 3", ConfigError, "give the name of a schedule first, or --file FILE"),
        ("gpipe --file x", ConfigError, "a schedule or a file, not both"),
        ("--file x --stages 3", ConfigError, "--stages: is read off the rows of --file"),
        ("gpipe 1f1b", ConfigError, "1f1b: a word that belongs to no option"),
        ("gpipe --stages 0", ConfigError, "--stages 0: must be a whole number from 1 to 1024"),
        ("gpipe --stages 1000 --microbatches 1000", ConfigError, "1,000,000 forward passes are too many"),
        ("gpipe --rows --compute-rows", ConfigError, "give one of them"),
        ("gpipe --arrows", ConfigError, "--arrows is of the picture that --svg FILE writes"),
        ("gpipe --costs f", ConfigError, "--costs f: must read NAME=NUMBER, NAME one of f, b, w, message"),
        ("gpipe --costs f=1,f=2", ConfigError, "--costs: f stands twice"),
        ("gpipe --costs f=-1", ConfigError, "--costs f=-1: must be a number from 0"),
        ("gpipe --costs f=nan", ConfigError, "--costs f=nan: must be a number"),
        ("gpipe --costs message=1:2", ConfigError, "--costs message: is one number"),
        ("gpipe --costs f=1:2", ScheduleError, "costs of f are given for 2 stages, the schedule has 4"),
        ("gpipe --bytes saved=1.5MiB", ConfigError, "--bytes saved=1.5MiB: must be a whole number of bytes, KiB"),
        ("gpipe --bytes kept=1:2", ScheduleError, "sizes of kept must be 4 numbers"),
        ("gpipe --chunks 2", ScheduleError, "gpipe has one chunk"),
        ("1f1b --batches 2", ScheduleError, "1f1b drains for every update"),
        ("interleaved --microbatches 6", ScheduleError, "6 do not divide by 4"),
        ("pipedream --microbatches 4", ConfigError, "--microbatches 4 must be 1.\nWay out: --batches"),
        ("pipedream-2bw --microbatches 3", ScheduleError, "at least as many micro-batches as ranks"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_way_out(words, error, message):
    with pytest.raises(error, match=re.escape(message)):
        main(shlex.split(words))


def test_updates_of_the_file_and_batches_do_not_go_together(written):
    with pytest.raises(ScheduleError, match="updates of their own; leave out --batches"):
        main(["--file", written(rows_text(complete("1f1b", ranks=1, microbatches=2))), "--batches", "2"])
    with pytest.raises(ScheduleError, match="3 micro-batches do not divide into 2 batches"):
        main(["--file", written("F0@0 B0@0 F1@0 B1@0 F2@0 B2@0"), "--batches", "2"])


def test_help_names_every_option_and_the_command_line_knows_the_word(capsys):
    assert cli(["schedule", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in OPTIONS.values():
        assert option.flag in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert cli(["--help"]) == 0
    assert "mpitrain schedule NAME" in capsys.readouterr().out
    assert cli(["schedul"]) == 2
    assert "schedule" in capsys.readouterr().err


def test_a_schedule_of_usual_size_takes_less_than_a_second(run):
    start = time.process_time()
    run("1f1b --stages 16 --microbatches 64")
    assert time.process_time() - start < 1
