"""What is typed at the console: conditions, files of commands, ranks in few characters."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from mpitrain.debug.console import terminal as terminals
from mpitrain.debug.console.clauses import Happening, ranges
from mpitrain.debug.console.commands import COMMANDS, GROUPS, named, overview, told
from mpitrain.debug.console.conditions import WORDS, parse
from mpitrain.debug.console.terminal import commands_of, commands_of_file
from mpitrain.debug.console.words import folded, runs
from mpitrain.errors import ConsoleError
from mpitrain.events import Event
from mpitrain.pipeline.action import Action


def at(kind, phase, name, rank=0, step=1, micro=None, site="?", **info):
    return Happening(Event(kind, phase, name, info), rank, step, micro, lambda: site)


def message(name, phase="begin", axis="tp", peer=-1, ranks=(0, 1), rank=0, **info):
    return at("message", phase, name, rank=rank, axis=axis, peer=peer, ranks=ranks, **info)


# ---------------------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("op gelu", "op gelu"),
        ("on op gelu and rank 3", "op gelu rank 3"),
        ("F3@1", "action F3@1"),
        ("STEP rank 0", "action STEP rank 0"),
        ("RECV_B", "action RECV_B"),
        ("SEND_F*@0 step 2-", "action SEND_F*@0 step 2-"),
        ("train.py:31", "at train.py:31"),
        ("param *.up.weight norm>1e3", "parameter *.up.weight norm > 1e3"),
        ("largest  <=  .5", "largest <= .5"),
        ("rank 0 , 2", "rank 0,2"),
        ("message wait irecv peer 3", "message wait irecv peer 3"),
        ("message wait rank 1", "message wait rank 1"),
        ("nan step 4-7,9", "nonfinite step 4-7,9"),
        ("state", "state"),
    ],
)
def test_a_condition_is_read_and_said_in_one_form(text, meant):
    condition = parse(text)
    assert str(condition) == meant
    assert str(parse(meant)) == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "break on what"),
        ("on", "break on what"),
        ("gelu", "none of action op message"),
        ("op", "its value is missing"),
        ("rank x", "a number, numbers"),
        ("rank -1", "a number, numbers"),
        ("step 1--2", "a number, numbers"),
        ("norm 5", "a comparison follows"),
        ("norm > nan", "a comparison follows"),
        ("norm > 1_0", "a comparison follows"),
        ("norm > __import__('os')", "a comparison follows"),
        ("at 31", "a file and a line"),
        ("op gelu op tanh", "stands there twice"),
        ("op gelu message send", "never one event"),
        ("action F0@0 parameter w", "never one event"),
        ("F0@0 nonfinite", "an action makes no one value"),
        ("state nonfinite", "never asked for together"),
        ("op " + "x" * 2000, "the most is 1000"),
    ],
)
def test_what_is_no_condition_is_refused_with_a_reason(text, why):
    with pytest.raises(ConsoleError, match=why):
        parse(text)


def test_each_clause_of_the_help_is_one_that_is_understood():
    values = {"at": "a.py:1", "rank": "1", "micro": "1", "step": "1", "peer": "1", "norm": "> 1", "largest": "< 1"}
    for word in WORDS:
        bare = word in ("nonfinite", "state")
        assert str(parse(word if bare else f"{word} {values.get(word, 'x')}")).startswith(word)


def test_ranges_of_numbers():
    assert [n for n in range(12) if ranges("0,2-4,9-")(n)] == [0, 2, 3, 4, 9, 10, 11]
    assert not ranges("0-")(None)  # outside of micro-batches


def test_a_message_is_also_the_one_that_does_not_wait_but_not_a_wait():
    condition = parse("message all_reduce")
    assert condition.holds(message("all_reduce"))
    assert condition.holds(message("iall_reduce"))
    assert not condition.holds(message("wait iall_reduce"))
    assert not condition.holds(message("all_gather"))
    assert not condition.holds(message("all_reduce", phase="end", result=np.ones(2)))  # before it, once
    assert parse("message wait").holds(message("wait irecv"))
    assert not parse("message wait").holds(message("irecv"))
    assert not parse("message iall_reduce").holds(message("all_reduce"))


def test_a_peer_is_a_rank_of_the_world():
    sends = message("send", peer=1, ranks=(2, 6))
    assert parse("peer 6").holds(sends)
    assert not parse("peer 1").holds(sends)
    assert not parse("peer 6").holds(message("all_reduce", ranks=(2, 6)))


def test_an_action_by_name_pattern_and_kind():
    event = at("action", "begin", "SEND_F3@1", action=Action("SEND_F", 3, 1), micro=3)
    for text in ("SEND_F3@1", "SEND_F*@1", "action SEND_F", "SEND_F3@1 micro 3"):
        assert parse(text).holds(event), text
    for text in ("F3@1", "SEND_F3@0", "action SEND", "action SEND_F micro 2", "action SEND_F step 2"):
        assert not parse(text).holds(event), text


def test_a_path_is_a_module_with_all_that_is_in_it():
    inside, beside = at("op", "begin", "gelu", path="blocks.1.mlp.up"), at("op", "begin", "gelu", path="blocks.10.mlp")
    condition = parse("path blocks.1")
    assert condition.holds(inside)
    assert not condition.holds(beside)
    assert parse("path blocks.*.mlp op gelu").holds(inside)


def test_a_line_is_that_of_the_file_wherever_it_lies():
    event = at("op", "begin", "gelu", site="train.py:31")
    assert parse("src/train.py:31").holds(event)
    assert not parse("rain.py:31").holds(event)


def made(*arrays, given=(), kind="op"):
    return at("op", "end", "f", output=arrays, inputs=given, saved=(), path="")


def test_not_finite_is_nan_infinity_and_a_minus_infinity_that_was_not_given():
    condition, low = parse("nonfinite"), np.array([1.0, -np.inf])
    assert condition.holds(made(np.array([np.nan])))
    assert condition.holds(made(np.array([1.0]), np.array([np.inf])))
    assert condition.holds(made(low, given=(np.ones(2),)))
    assert not condition.holds(made(low, given=(low,)))  # a mask is made of it
    assert not condition.holds(made(np.ones(3)))
    assert not condition.holds(made(np.arange(3)))
    assert not condition.holds(at("op", "begin", "f", inputs=(np.array([np.nan]),), path=""))
    assert condition.holds(message("all_reduce", phase="end", result=np.array([np.nan])))
    assert not condition.holds(message("iall_reduce", phase="end", result=(None, np.array([np.nan]))))  # not there yet
    assert condition.holds(at("arrival", "end", "irecv", axis="pp", peer=0, ranks=(0, 1), result=np.array([np.inf])))


def test_norms_and_magnitudes_in_any_precision():
    half = np.full(4, 300.0, np.float16)  # whose square is more than a half holds
    assert parse("norm > 599").holds(made(half))
    assert not parse("norm > 601").holds(made(half))
    assert parse("largest >= 300").holds(made(-half))
    assert not parse("largest > 300").holds(made(-half))
    assert parse("norm < 1").holds(made(np.array([0.1])))
    assert not parse("norm < 1").holds(made(np.array([np.nan])))
    assert parse("norm > 1e300").holds(made(np.array([np.nan])))  # NaN is above every limit


# ------------------------------------------------------------------------------------------------------------ commands


def test_every_command_has_its_place_in_the_help_within_100_columns():
    text = overview()
    assert max(map(len, text.split("\n"))) <= 100
    for command in COMMANDS:
        assert command.group in GROUPS
        assert f"{command.name:<10}{command.brief}" in text
        assert command.help.startswith(command.name)
        assert max(map(len, told(command).split("\n"))) <= 100, command.name
    shorts = [command.short for command in COMMANDS if command.short]
    assert len(set(shorts)) == len(shorts)
    assert not set(shorts) & {command.name for command in COMMANDS}


def test_a_beginning_that_only_one_command_has_will_do():
    assert named("wh").name == "where"
    assert named("s").name == "step"
    assert named("b").name == "break"
    with pytest.raises(ConsoleError, match="short for stack or step"):
        named("st")
    with pytest.raises(ConsoleError, match="did you mean break"):
        named("braek")
    with pytest.raises(ConsoleError, match="there are where rank"):
        named("xyzzy")


def test_commands_of_a_text():
    lines = commands_of("# first\nwhere; step op 2 # then\n\n ; \nquit", "look.txt")
    assert [tuple(line) for line in lines] == [
        ("where", "look.txt:2"),
        ("step op 2", "look.txt:2"),
        ("quit", "look.txt:5"),
    ]


def test_a_file_of_commands_is_a_short_text(tmp_path):
    path = tmp_path / "look.txt"
    for data, why in ((b"\xff\xfe", "not UTF-8"), (b"#" * 70000, "longer than 64 KiB")):
        path.write_bytes(data)
        with pytest.raises(ConsoleError, match=why):
            commands_of_file(str(path))
    with pytest.raises(ConsoleError, match="No such file"):
        commands_of_file(str(tmp_path / "none"))
    with pytest.raises(ConsoleError, match="not a file"):
        commands_of_file("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConsoleError, match="not a file"):
        commands_of_file(str(tmp_path / "pipe"))


# ------------------------------------------------------------------------------------------------------------- answers


def test_ranks_in_few_characters():
    assert [runs(ranks) for ranks in ([3], [0, 1], [0, 1, 2], [7, 0, 2, 3, 4, 9, 10])] == [
        "3",
        "0,1",
        "0-2",
        "0,2-4,7,9,10",
    ]


def test_long_lines_are_folded_behind_their_mark_and_indent():
    assert folded("! " + "word " * 30, 40)[1].startswith("!   word")
    assert folded("  " + "word " * 30, 40)[1].startswith("    word")
    assert max(map(len, folded("x-y " * 60, 50))) <= 50


# ------------------------------------------------------------------------------------------------------------- history


class Remembering:
    """What is used of readline."""

    def __init__(self, lines=()):
        self.lines = list(lines)

    def clear_history(self):
        self.lines = []

    def add_history(self, line):
        self.lines.append(line)

    def get_current_history_length(self):
        return len(self.lines)

    def get_history_item(self, number):
        return self.lines[number - 1]


def test_the_history_is_the_users_alone_and_no_link_is_followed(tmp_path):
    path = tmp_path / "state" / "mpitrain" / "console_history"
    terminals._remember(Remembering(["where", "step"]), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    terminals._remember(Remembering([f"rank {n}" for n in range(3000)]), path)
    again = Remembering()
    terminals._recall(again, path)
    assert again.lines == [f"rank {n}" for n in range(2000, 3000)]
    other = tmp_path / "other"
    other.write_text("secret\n")
    path.unlink()
    path.symlink_to(other)
    linked = Remembering()
    terminals._recall(linked, path)
    assert linked.lines == []
    terminals._remember(Remembering(["where"]), path)
    assert other.read_text() == "secret\n"
    assert not path.is_symlink()


def test_a_history_of_something_else_is_left_out_line_by_line(tmp_path):
    path = tmp_path / "history"
    path.write_bytes(b"where\n\x1b[2Jstep\n\xff\n" + b"y" * 5000 + b"\n")
    found = Remembering()
    terminals._recall(found, path)
    assert found.lines[0] == "where"
    assert all(line.isprintable() and len(line) <= 1000 for line in found.lines)
    assert terminals.history_file().name == "console_history"
