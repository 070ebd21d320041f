"""What stands in the terminal, letter by letter."""

import io
import subprocess
import sys

import pytest

from mpitrain.report import Terminal, bar, duration, start_block, step_line


def line(step, **values):
    usual = {"loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 41234.4, "seconds_left": 90}
    return step_line(step, 3563, **{**usual, **values})


def test_the_lines_of_steps_stand_in_columns():
    text = [
        line(1, loss=5.59842, grad_norm=12.3456, lr=2.34e-5, tokens_per_s=980, seconds_left=float("inf")),
        line(100, loss=2.62111, val_loss=2.60344, grad_norm=0.8712, lr=2.5e-3, seconds_left=208.4),
        line(3563, loss=1234567.0, val_loss=float("nan"), grad_norm=1e9, lr=0, tokens_per_s=1234567, seconds_left=0),
    ]
    assert text == [
        "step    1/3563  loss 5.5984              grad 12.346  lr 2.34e-05       980 tok/s  left ?",
        "step  100/3563  loss 2.6211  val 2.6034  grad  0.871  lr 2.50e-03    41,234 tok/s  left 3:28",
        "step 3563/3563  loss  1e+06  val    nan  grad  1e+09  lr 0.00e+00  1,234,567 tok/s  left 0:00",
    ]


@pytest.mark.parametrize(
    ("scales", "end"),
    [
        ((2.0**31, 2.0**30), "  scale 2^31 -> 2^30"),
        ((2.0**16, 2.0**16), "  scale 2^16"),
        ((1.0, 0.25), "  scale 1 -> 2^-2"),
        ((2.0**13, 2.0**12.5), "  scale 2^13 -> 5.8e+03"),
    ],
)
def test_the_line_of_a_skipped_step_ends_with_its_scale(scales, end):
    assert line(7, skipped=True, scales=scales) == (
        f"step    7/3563  loss 2.0000              grad   skip  lr 1.00e-03    41,234 tok/s  left 1:30{end}"
    )
    assert line(7, scales=scales) == line(7)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (6.6, "0:07"),
        (59.6, "1:00"),
        (208, "3:28"),
        (3599.7, "1:00:00"),
        (3723, "1:02:03"),
        (183840, "2d 03:04"),
        (-3, "0:00"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_start_block_has_two_columns():
    facts = [("model", "gpt-mini"), ("parameters", "470,528"), ("mesh", "dp 8\n0 1 2 3\n4 5 6 7"), ("empty", "")]
    assert start_block("mpitrain 0.1.0", facts) == (
        "mpitrain 0.1.0\n"
        "  model        gpt-mini\n"
        "  parameters   470,528\n"
        "  mesh         dp 8\n"
        "               0 1 2 3\n"
        "               4 5 6 7\n"
        "  empty"
    )
    assert start_block("title", []) == "title"


def test_the_bar_fills_its_width_exactly():
    assert bar(0, 4, "loss 2.0", 30) == "  0% ───────────────  loss 2.0"
    assert bar(1, 4, "loss 2.0", 30) == " 25% ━━━────────────  loss 2.0"
    assert bar(4, 4, "loss 2.0", 30, "#.") == "100% ###############  loss 2.0"
    assert bar(1, 4, "a text that is too long", 20) == " 25% a text that is "
    for width in range(1, 60):
        assert len(bar(7, 9, "loss 1.2345  left 3:21", width)) == width


class Screen(io.StringIO):
    encoding = "utf-8"


def test_without_a_person_there_are_plain_lines_only():
    screen = Screen()
    terminal = Terminal.of_launcher(screen, {"COLUMNS": "40"})
    terminal.heading("start\nmore")
    terminal.progress(1, 4, "loss")
    terminal.line("step 1")
    terminal.end()
    assert screen.getvalue() == "start\nmore\nstep 1\n"


def test_with_a_person_lines_push_the_bar_down():
    screen = Screen()
    terminal = Terminal.of_launcher(screen, {"MPITRAIN_TTY": "1", "COLUMNS": "31", "NO_COLOR": "1"})
    terminal.progress(0, 4, "loss 2.0")
    terminal.line("step 1")
    terminal.progress(1, 4, "loss 2.0")
    terminal.end()
    terminal.line("done")
    first, second = "  0% ───────────────  loss 2.0", " 25% ━━━────────────  loss 2.0"
    clear = "\r\033[K"
    assert screen.getvalue() == f"{clear}{first}{clear}step 1\n{first}{clear}{second}{clear}done\n"


def test_colour_is_left_out_where_it_is_not_wanted_or_nobody_watches():
    for environ, coloured in [
        ({"MPITRAIN_TTY": "1"}, True),
        ({"MPITRAIN_TTY": "1", "NO_COLOR": ""}, True),
        ({"MPITRAIN_TTY": "1", "NO_COLOR": "0"}, False),
        ({}, False),
    ]:
        screen = Screen()
        terminal = Terminal.of_launcher(screen, environ)
        terminal.heading("start")
        terminal.progress(1, 2, "")
        assert ("\033[34m" in screen.getvalue()) == ("\033[1m" in screen.getvalue()) == coloured


def test_colour_takes_no_room():
    screen = Screen()
    Terminal(screen, live=True, width=31).progress(1, 4, "loss 2.0")
    plain = screen.getvalue()
    for code in ("\033[34m", "\033[2m", "\033[0m", "\r\033[K"):
        plain = plain.replace(code, "")
    assert plain == " 25% ━━━────────────  loss 2.0"


@pytest.mark.parametrize("columns", ["", "0", "-3", "x", "9" * 5000, "²"])
def test_a_width_that_is_no_width_is_80(columns):
    screen = Screen()
    Terminal.of_launcher(screen, {"MPITRAIN_TTY": "1", "COLUMNS": columns, "NO_COLOR": "1"}).progress(1, 2, "")
    assert len(screen.getvalue()) == len("\r\033[K") + 79


def test_a_stream_that_knows_no_unicode_gets_ascii():
    screen = io.StringIO()
    Terminal(screen, live=True, width=31, colour=False).progress(1, 4, "loss 2.0")
    assert screen.getvalue().isascii()


def test_a_reader_that_has_gone_does_not_end_the_run():
    """`train | head -1`: the pipe breaks, the terminal falls silent, and nothing fails at exit."""
    code = (
        "import sys\n"
        "from mpitrain.report import Terminal\n"
        "t = Terminal.of_launcher(sys.stdout)\n"
        "for n in range(20000): t.line(f'line {n}')\n"
        "print('went on', file=sys.stderr)\n"
    )
    run = subprocess.run(
        ["bash", "-c", f'set -o pipefail; {sys.executable} -c "$0" | head -1', code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "line 0\n", "went on\n")


def test_without_a_stdout_nothing_is_printed():
    Terminal.of_launcher(None).line("nobody hears this")
