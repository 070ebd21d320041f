"""The console: where ranks stop, what it says of them, and what it changes, which is nothing."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sessions import Asker, masked, play, plays

from mpitrain.comm.local import run_script
from mpitrain.debug.console import commands, completion
from mpitrain.debug.console.conditions import Condition
from mpitrain.debug.console.console import Console
from mpitrain.debug.console.terminal import Terminal, commands_of
from mpitrain.debug.console.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "examples" / "14_console.py"

SUMS = """\
import numpy as np
from mpitrain.comm.world import world

w = world()
for turn in range(2):
    w.all_reduce(np.ones(4))
    if w.rank == 0:
        request = w.isend(np.ones(2), 1)
    if w.rank == 1:
        w.recv((2,), np.float64, 0)
"""

RING = """\
import numpy as np
from mpitrain.comm.world import world

w = world()
w.send(np.ones(3), (w.rank + 1) % w.size)
w.recv((3,), np.float64, (w.rank - 1) % w.size)
"""

RAISES = """\
import numpy as np
from mpitrain.comm.world import world

w = world()


def work(x):
    if w.rank == 1:
        raise KeyError("gone")
    return w.all_reduce(x)


work(np.ones(2))
"""

LEAVES = """\
import sys
import numpy as np
from mpitrain.comm.world import world

w = world()
if w.rank == 1:
    sys.exit(int(sys.argv[1]))
w.all_reduce(np.ones(2))
"""

TRAINS = """\
import sys
import numpy as np
from mpitrain import Executor, Mesh, Module, Parameter, Sgd, Tensor, one_stage, with_update, world
from mpitrain.autograd.ops import gelu_tanh, linear
from mpitrain.nn import init
from mpitrain.nn.loss import cross_entropy


class Batch:
    count = 4

    def __init__(self, x):
        self.x = x

    def split(self, m):
        return [Batch(x) for x in np.split(self.x, m)]


class Net(Module):
    def __init__(self):
        super().__init__("net")
        self.up = Parameter("net.up", (3, 5), init=init.fan_in())
        self.down = Parameter("net.down", (5, 2), init=init.fan_in())

    def forward(self, batch):
        h = gelu_tanh(linear(Tensor(batch.x), self.up))
        return cross_entropy(linear(h, self.down), np.zeros(4, np.int64))


mesh = Mesh(world())
net = Net()
net.materialize(mesh, seed=1, dtype=np.float64)
executor = Executor(net, Sgd(net.parameters(), lr=0.1), mesh, with_update(one_stage(2)))
x = np.ones((8, 3)) + world().rank
for step in range(3):
    if sys.argv[1:] == ["nan"] and step == 1 and world().rank == 1:
        x[5, 0] = np.nan
    executor.step(Batch(x))
"""


SAVES = """
if world().rank == 0:
    np.save(sys.argv[1], np.concatenate([p.data.ravel() for p in net.parameters()]))
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def reasons(printed):
    """Why ranks stopped at breakpoints, as `rank 1: message send`, without the number."""
    lines = [line for line in printed.splitlines() if line.startswith("rank ") and ", breakpoint " in line]
    return [line.replace(", breakpoint 1", "") for line in lines]


# ------------------------------------------------------------------------------------------------------------ sessions


def test_ranks_go_in_lock_step_and_those_that_are_not_told_to_stay(script):
    transcript = """
        rank 0> where
          rank  step  action  what                   at
        > 0-2      -  -       before its first line
        rank 0> step
          rank  step  action  what                                   at
        > 0-2      -  -       next all_reduce (4,) float64 on world  script.py:6
        rank 0> finish
          rank  step  action  what                                    at
        > 0-2      -  -       after all_reduce (4,) float64 on world  script.py:6
        rank 0> step rank 2
          rank  step  action  what                                    at
        > 0,1      -  -       after all_reduce (4,) float64 on world  script.py:6
          2        -  -       next all_reduce (4,) float64 on world   script.py:6
        rank 0> step rank 0-1
          rank  step  action  what                                    at
        > 0        -  -       next isend (2,) float64 on world to 1   script.py:8
          1        -  -       next recv (2,) float64 on world from 0  script.py:10
          2        -  -       next all_reduce (4,) float64 on world   script.py:6
        rank 0> waits
        nobody waits
        rank 0> continue rank 2
          rank  step  action  what                                             at
        > 0        -  -       next isend (2,) float64 on world to 1            script.py:8
          1        -  -       next recv (2,) float64 on world from 0           script.py:10
          2        -  -       waits for 0,1: all_reduce (4,) float64 on world  script.py:6
        rank 0> waits
        rank 2 waits for ranks 0,1: all_reduce (4,) float64 on world, call 2, at script.py:6
        rank 0> c
    """
    assert plays(script(SUMS), 3, transcript) == 0


def test_a_step_of_a_pipeline():
    transcript = """
        rank 0> to F1@1
          rank  step  action     what                                                     at
        > 0-3      1  RECV_B1@0  wait for 4-7 (one each): irecv (3, 8, 16) float64 on pp  executor.py:N
          4-7      1  F1@1       next                                                     executor.py:N
        rank 0> pipeline
        step 1
        time    0              5              10
        rank 0| F0 F1  .  . B0--- F2>B1--- F3 B2---  . B3---
        rank 4|  . F0 B0--->F1 B1--- F2 B2--- F3 B3---  .  .

        rank 0 in RECV_B1@0, which waits for rank 4; rank 4 before F1@1
        rank 0> waits
        rank 0 waits for rank 4, 1 for 5, 2 for 6, 3 for 7: irecv (3, 8, 16) float64 on pp, call 1, tag 7,
          at executor.py:N
        under way, and nobody waits for it just now:
          0 <- 4, 1 <- 5, 2 <- 6, 3 <- 7  irecv (3, 8, 16) float64 on pp, tag 7, from stages.py:N: not
            sent yet
          0 <- 4 (2 times), 1 <- 5 (2 times), 2 <- 6 (2 times), 3 <- 7 (2 times)  irecv (3, 8, 16) float64
            on pp, tag 11, from stages.py:N: not sent yet
        rank 0> finish
          rank  step  action     what                                                     at
        > 0-3      1  RECV_B1@0  wait for 4-7 (one each): irecv (3, 8, 16) float64 on pp  executor.py:N
          4-7      1  -          after F1@1                                               executor.py:N
        rank 0> pipeline
        step 1
        time    0              5              10
        rank 0| F0 F1  .  . B0--- F2>B1--- F3 B2---  . B3---
        rank 4|  . F0 B0--- F1>B1--- F2 B2--- F3 B3---  .  .

        rank 0 in RECV_B1@0, which waits for rank 4; rank 4 before B1@1
        rank 0> next
          rank  step  action     what                                                     at
        > 0-3      1  RECV_B1@0  wait for 4-7 (one each): irecv (3, 8, 16) float64 on pp  executor.py:N
          4-7      1  B1@1       next                                                     executor.py:N
        rank 0> where all
          rank  step  action     what                                         at
        > 0        1  RECV_B1@0  waits for 4: irecv (3, 8, 16) float64 on pp  executor.py:N
          1        1  RECV_B1@0  waits for 5: irecv (3, 8, 16) float64 on pp  executor.py:N
          2        1  RECV_B1@0  waits for 6: irecv (3, 8, 16) float64 on pp  executor.py:N
          3        1  RECV_B1@0  waits for 7: irecv (3, 8, 16) float64 on pp  executor.py:N
          4        1  B1@1       next                                         executor.py:N
          5        1  B1@1       next                                         executor.py:N
          6        1  B1@1       next                                         executor.py:N
          7        1  B1@1       next                                         executor.py:N
        rank 0> quit 5
    """
    assert plays(LESSON, 8, transcript) == 5


def test_next_goes_over_what_is_within_and_finish_to_its_end():
    transcript = """
        rank 0> to F0@0
          rank  step  action     what                                         at
        > 0        1  F0@0       next                                         executor.py:N
          1        1  RECV_F0@1  waits for 0: irecv (6, 8, 16) float64 on pp  executor.py:N
        rank 0> next
          rank  step  action     what                                         at
        > 0        1  SEND_F0@0  next                                         executor.py:N
          1        1  RECV_F0@1  waits for 0: irecv (6, 8, 16) float64 on pp  executor.py:N
        rank 0> to op gelu_tanh
          rank  step  action  what                                           at
        > 0        1  F1@0    next gelu_tanh (6, 8, 64) (64,)  blocks.0.mlp  gpt.py:N
          1        1  F0@1    next gelu_tanh (6, 8, 64) (64,)  blocks.1.mlp  gpt.py:N
        rank 0> next
          rank  step  action  what                                                at
        > 0        1  F1@0    next linear (6, 8, 64) (64, 16)  blocks.0.mlp.down  tensor.py:N
          1        1  F0@1    next linear (6, 8, 64) (64, 16)  blocks.1.mlp.down  tensor.py:N
        rank 0> finish
          rank  step  action  what                                           at
        > 0        1  F1@0    after linear -> (6, 8, 16)  blocks.0.mlp.down  tensor.py:N
          1        1  F0@1    after linear -> (6, 8, 16)  blocks.1.mlp.down  tensor.py:N
        rank 0> to F9@0
        ! no rank has F9@0 in its row; that of rank 0: LOAD0@0 LOAD1@0 LOAD2@0 LOAD3@0 COUNT@0 F0@0
        !   SEND_F0@0 F1@0 SEND_F1@0 RECV_B0@0 B0@0 F2@0 SEND_F2@0 RECV_B1@0 B1@0 F3@0 SEND_F3@0 RECV_B2@0
        !   B2@0 RECV_B3@0 B3@0 REDUCE@0 STEP@0
        rank 0> to B3@0
          rank  step  action  what                                           at
        > 0        1  B3@0    next                                           executor.py:N
          1        1  STEP@1  waits for 0: all_reduce (4,) float64 on world  update.py:N
        rank 0> to step 2
          rank  step  action   what  at
        > 0        2  LOAD0@0  next  executor.py:N
          1        2  LOAD0@1  next  executor.py:N
    """
    assert plays(LESSON, 2, transcript) == 3


def test_an_action_that_no_rank_has_is_found_out_with_the_first_row(script):
    lines = masked(play(script(TRAINS), 2, ["to F7@0", "to F7@0", "to F*@0", "quit"])[1])
    assert lines[1].startswith("! no rank has F7@0 in its row; that of rank 0: LOAD0@0 LOAD1@0 COUNT@0 F0@0")
    assert [line.split()[:4] for line in lines if "LOAD0@0  next" in line] == [["1", "1", "LOAD0@0", "next"]]
    assert sum(line == lines[1] for line in lines) == 2
    assert lines[-2].split()[1:5] == ["0,1", "1", "F0@0", "next"]


def test_breakpoints_are_counted_switched_off_and_gone():
    transcript = """
        rank 0> break F0@1 rank 2
          1 keep  0 hits   action F0@1 rank 2
        rank 0> tbreak op linear rank 0
          2 once  0 hits   op linear rank 0
        rank 0> break message all_reduce axis tp
          3 keep  0 hits   message all_reduce axis tp
        rank 0> disable 3
        rank 0> c
        rank 0, breakpoint 2: op linear rank 0
          rank  step  action     what                                                        at
        > 0        1  F0@0       next linear (6,8,16) (16,24) (24,)  blocks.0.attention.qkv  tensor.py:N
          1        1  F0@0       in all_reduce (6, 8, 16) float64 on tp                      sequence.py:N
          2        1  RECV_F0@1  after irecv (6, 8, 16) float64 on pp from 0                 executor.py:N
          3        1  RECV_F0@1  after irecv (6, 8, 16) float64 on pp from 1                 executor.py:N
        rank 0> c
        rank 2, breakpoint 1: action F0@1 rank 2
          rank  step  action     what                                              at
          0        1  F1@0       in all_reduce (6, 8, 16) float64 on tp            sequence.py:N
          1        1  F1@0       waits for 0: all_reduce (6, 8, 16) float64 on tp  sequence.py:N
        > 2        1  F0@1       next                                              executor.py:N
          3        1  RECV_F0@1  in wait irecv (6, 8, 16) float64 on pp from 1     executor.py:N
        rank 2> breaks
          1 keep  1 hit    action F0@1 rank 2
          3 off   0 hits   message all_reduce axis tp
        rank 2> enable
        rank 2> delete 1
        rank 2> c
        rank 2, breakpoint 3: message all_reduce axis tp
          rank  step  action     what                                              at
          0        1  F1@0       in all_reduce (6, 8, 16) float64 on tp            sequence.py:N
          1        1  F1@0       waits for 0: all_reduce (6, 8, 16) float64 on tp  sequence.py:N
        > 2        1  F0@1       next all_reduce (6, 8, 16) float64 on tp          sequence.py:N
          3        1  RECV_F0@1  in wait irecv (6, 8, 16) float64 on pp from 1     executor.py:N
        rank 2> delete
        rank 2> breaks
        no breakpoints; break makes one
        rank 2> delete 7
        ! there is no breakpoint 7; there: none
        rank 2> continue
    """
    assert plays(LESSON, 4, transcript) == 0


# ------------------------------------------------------------------------------------------------------------- the end


def test_a_deadlock_stands_still_to_be_looked_at(script):
    printed = play(script(RING), 3, ["continue", "waits", "stack", "continue", "where", "quit"])
    code, lines = printed[0], masked(printed[1])
    assert code == 1
    assert lines[1].startswith("! ")
    assert "deadlock: no rank can go on" in lines[1]
    assert "> 0-2      -  -       wait for 0-2 (one each): send (3,) float64 on world  script.py:5" in lines
    assert "! a ring: 0 -> 1 -> 2 -> 0: none of them can ever go on" in lines
    waits = "rank 0 waits for rank 1, 1 for 2, 2 for 0: send (3,) float64 on world, call 1, at script.py:5"
    assert waits in lines
    assert "#0  script.py:5  <module>  w.send(np.ones(3), (w.rank + 1) % w.size)" in lines
    assert "! the run is over: ranks can be looked at, and do not go on; quit leaves" in lines


def test_an_exception_stands_still_where_it_was_raised(script):
    path = script(RAISES)
    transcript = f"""
        rank 0> c
        Traceback (most recent call last):
          File "{path}", line 13, in <module>
            work(np.ones(2))
          File "{path}", line 9, in work
            raise KeyError("gone")
        ! rank 1 failed: KeyError: 'gone'
        this is the end of the run: all ranks stand as they were; quit leaves
          rank  step  action  what                                           at
          0        -  -       waits for 1: all_reduce (2,) float64 on world  script.py:10
        > 1        -  -       has failed: KeyError                           script.py:9
        rank 1> stack
        #0  script.py:9   work      raise KeyError("gone")
        #1  script.py:13  <module>  work(np.ones(2))
        rank 1> list
        {str(path)[:91]}, rank 1
           4   w = world()
           5
           6
           7   def work(x):
           8       if w.rank == 1:
           9->         raise KeyError("gone")
          10       return w.all_reduce(x)
          11
          12
          13   work(np.ones(2))
        rank 1> rank 0
          rank  step  action  what                                           at
        > 0        -  -       waits for 1: all_reduce (2,) float64 on world  script.py:10
          1        -  -       has failed: KeyError                           script.py:9
        rank 0> stack
        #0  script.py:10  work      return w.all_reduce(x)
        #1  script.py:13  <module>  work(np.ones(2))
        rank 0> quit
    """
    assert plays(path, 2, transcript) == 1


@pytest.mark.parametrize(("code", "said"), [(7, "! rank 1 left with exit code 7"), (0, "> 0        -  -       waits")])
def test_a_rank_that_leaves_early(script, code, said):
    ended, printed = play(script(LEAVES), 2, ["c", "waits"], [str(code)])
    assert ended == (code or 1)
    assert said in printed
    assert ("! rank 1 has ended, and will never come" in printed) == (code == 0)


def test_exit_codes(script):
    assert play(script(SUMS), 2, ["c"])[0] == 0
    assert play(script(SUMS), 2, [])[0] == 3  # used up, and ranks stand
    assert play(script(SUMS), 2, ["quit"])[0] == 0
    assert play(script(SUMS), 2, ["quit 9"])[0] == 9
    assert play(script(RAISES), 2, ["c", "quit 9"])[0] == 9
    assert play(script(RAISES), 2, ["c"])[0] == 1
    assert play(script("import sys; sys.exit(4)"), 2, ["c"])[0] == 4
    assert "quit 256: an exit code is" in play(script(SUMS), 2, ["quit 256"])[1]


# --------------------------------------------------------------------------------------------------------- breakpoints


@pytest.mark.parametrize(
    ("condition", "stops"),
    [  # by rank how often, of two micro-batches in three steps
        ("op gelu_tanh", {0: 6, 1: 6}),
        ("op gelu_tanh*", {0: 12, 1: 12}),
        ("op gelu_tanh.backward rank 1 micro 1", {1: 3}),
        ("F1@0 rank 1", {1: 3}),
        ("action B rank 0 step 2-", {0: 4}),
        ("STEP@0 step 2", {0: 1, 1: 1}),
        ("parameter net.up rank 0 step 1", {0: 4}),  # in forward and in backward
        ("message all_reduce axis dp+cp step 3 rank 1", {1: 2}),  # in COUNT and REDUCE
        ("message all_* step 3 rank 1", {1: 3}),  # in STEP, too
        ("message send", {}),
        ("script.py:26 rank 0 step 1", {0: 4}),  # two ops
        ("step 2", {0: 1, 1: 1}),
        ("step 2 rank 1", {1: 1}),
        ("micro 1 rank 0", {0: 6}),  # LOAD1, and after F0 and B0 again
        ("rank 0", {0: 27}),  # each of nine actions
        ("path net rank 1", {1: 3}),
        ("path net.up", {}),
        ("norm > 1e9", {}),
        ("op linear norm > 0 rank 1 step 2", {1: 4}),
        ("parameter net.up norm > 0 rank 1 step 2", {1: 4}),
        ("nonfinite", {}),
        ("state", {}),
    ],
)
def test_ranks_stop_where_a_condition_holds_and_nowhere_else(script, condition, stops):
    code, printed = play(script(TRAINS), 2, [f"break {condition}", *["c"] * (sum(stops.values()) + 1)])
    found = Counter(int(line.split()[1].rstrip(":,")) for line in reasons(printed))
    assert code == 0
    assert found == stops


def test_the_first_value_that_is_not_finite_stops_all_ranks_with_the_value_there(script):
    seen = []

    def look(console):
        event = console.view.event
        seen.append((console.focus, event.kind, event.phase, event.name, console.view.step))

    printed = play(script(TRAINS), 2, ["break nonfinite", "c", look, "quit"], ["nan"])[1]
    assert seen == [(1, "op", "end", "linear", 2)]
    assert "  linear made float64 (4, 5) 5 NaN of 20" in printed


def test_a_condition_on_a_parameter_is_about_its_own_part_of_the_gradient(script):
    condition = "break parameter net.down norm > 0 step 1 rank 0 micro 0"
    printed = play(script(TRAINS), 2, [condition, "c", "c", "quit"])[1]
    assert "  net.down: float64 (5, 2)" in printed  # the weight, where it is used
    assert "  net.down, part of its gradient: float64 (5, 2)" in printed


def test_a_breakpoint_on_a_parameter_that_no_model_has_is_refused_or_removed_with_the_first_action(script):
    printed = play(script(TRAINS), 2, ["break parameter ups", "c", "break parameter ups", "breaks", "quit"])[1]
    assert "breakpoint 1 is removed: no parameter is called ups; near: net.up" in printed
    assert "! no parameter is called ups; near: net.up" in printed
    assert "no breakpoints; break makes one" in printed


def test_the_end_of_a_parameters_name_is_enough_for_a_breakpoint(script):
    code, printed = play(script(TRAINS), 2, ["break parameter up rank 0 op *.backward", "c", "c", "breaks", "quit"])
    assert code == 0
    assert printed.count("linear.backward") == 2
    assert "  1 keep  2 hits   parameter net.up rank 0 op *.backward" in printed


def test_what_was_never_reached_is_said_at_the_end(script):
    code, printed = play(script(TRAINS), 2, ["break op foo", "break F0@0 step 3 rank 1", "c", "to op bar"])
    assert code == 0
    assert printed.splitlines()[-2:] == [
        "op bar was never reached: the run had 3 steps",
        "breakpoint 1 (op foo) was never hit",
    ]


def test_what_the_rules_of_states_object_to_is_told_once_and_can_be_waited_for():
    path = ROOT / "examples" / "bugs" / "01_worse_on_more_ranks.py"
    printed = play(path, 2, ["break state", "c", "c", "quit"])[1]
    assert printed.count("linear adds a bias to a Partial product over tp") == 1
    assert reasons(printed) == ["rank 0: state", "rank 1: state"]


def test_kinds_of_actions_need_no_number(script):
    commands = ["to STEP", "next F 2", "w", "next F0@0", "next W", "to step 1", "tbreak B rank 1", "c", "quit"]
    code, printed = play(script(TRAINS), 2, commands)
    places = [line.split()[2:5] for line in printed.splitlines() if line.startswith("> ")]
    assert places[:4] == [["1", "STEP@0", "next"], *[["2", "F1@0", "next"]] * 2, ["3", "F0@0", "next"]]
    assert "! no rank has W in its row; that of rank 0: LOAD0@0" in printed
    assert "! step 1 is over: ranks are in step 3" in printed
    assert reasons(printed) == ["rank 1: action B rank 1"]
    assert code == 0


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("class E(Exception): __str__ = lambda self: 1 / 0\nraise E", "! rank 0 failed: E: its text cannot be made"),
        ("raise ValueError('\x1b[31mred\x07 \\udcff')", "! rank 0 failed: ValueError: ?[31mred? ?"),
        ("raise SystemExit('no \x1b[2Jdata')", "! rank 0 left with exit code 1: no ?[2Jdata"),
        ("raise KeyboardInterrupt", "! rank 0 failed: KeyboardInterrupt\n"),
    ],
)
def test_what_an_error_says_is_told_and_moves_no_cursor(script, raised, said):
    code, printed = play(script(f"from mpitrain import world\nworld()\n{raised}\n"), 1, ["c", "list", "stack", "q"])
    assert said in printed
    assert "\x1b" not in printed
    assert code == 1


def test_an_output_that_cannot_be_written_ends_no_run_and_no_session(script):
    words = [sys.executable, "-m", "mpitrain", "debug", "--no-history", "-n", "2", "-c", "where; c", str(script(SUMS))]
    with open("/dev/full", "w") as full:
        run = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "the output cannot be written: No space left on device\n")


@pytest.mark.slow
def test_ranks_that_catch_everything_end_all_the_same(script):
    path = script("from mpitrain import world\nwhile True:\n    try:\n        world().barrier()\n    except: pass\n")
    words = [sys.executable, "-m", "mpitrain", "debug", "--no-history", "-n", "2", "-c", "step; quit 5", str(path)]
    run = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert run.returncode == 5
    assert "! after 10 s ranks have not ended, which catch all errors: rank 0 at script.py:" in run.stdout


def test_stepping_changes_no_number(script, tmp_path):
    path = script(TRAINS + SAVES)
    assert run_script(2, str(path), [str(tmp_path / "plain.npy")]) == 0
    looks = ["break nonfinite", "break largest > 1e9", "next action 3", "follow net.up", *["step op"] * 5, "step 20"]
    looks += ["keep on", "to B1@0", "finish", "show net.up", "to step 3", "report", "c"]
    code, printed = play(path, 2, looks, [str(tmp_path / "stepped.npy")])
    assert (code, [line for line in printed.splitlines() if line.startswith("!")]) == (0, [])
    plain, stepped = (np.load(tmp_path / name, allow_pickle=False) for name in ("plain.npy", "stepped.npy"))
    assert plain.tobytes() == stepped.tobytes()


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("wher is", "! where, or where all for a line for each rank"),
        ("rank 9", "! there is no rank 9: ranks are 0 to 1"),
        ("rank x", "! rank x: a number is needed"),
        ("step 0", "! step 0: '0' is neither action, op, message, an action (F, F3@1), nor a number"),
        ("step 1 1 F op", "! step 1 1 F op: 'op' is neither action"),
        ("to rank 2", "! there is no rank 2: ranks are 0 to 1"),
        ("break peer 2-", "! there is no rank 2-: ranks are 0 to 1"),
        ("to step 0", "! steps are counted from 1"),
        ("break micro 5-2", "! micro 5-2: a range ends with its larger number"),
        ("show *", "! there are no parameters yet: no model has run"),
        ("step rank", "! step: rank is followed by a number, numbers (0,2) or a range (4-7)"),
        ("step rank 7", "! there is no rank 7: ranks are 0 to 1"),
        ("finish 3", "! finish takes no more than ranks: finish rank 2"),
        ("to", "! to where?"),
        ("pipeline", "! rank 0 has begun no step yet"),
        ("list", "! rank 0 is in no line of its script"),
        ("stack", "! rank 0 is in no line of its script"),
        ("breaks all", "! breaks takes nothing behind it, not 'all'"),
        ("pdb", "! pdb runs code, which somebody types at a terminal"),
        ("help xyzzy", "! 'xyzzy' is no command"),
        ("x" * 2000, "! a command of 2000 characters; the most is 1000"),
        ("unfollow w", "! w is not followed; followed: nothing"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_session_goes_on(script, command, said):
    code, printed = play(script(SUMS), 2, [command, "where", "quit"])
    assert said in printed
    assert code == 0
    assert "before its first line" in printed


def test_a_script_of_commands_ends_with_the_first_that_cannot_be_done(script):
    out = io.StringIO()
    terminal = Terminal(commands_of("where\nrank 9\nstep", "look.txt"), io.StringIO(), out)
    assert Console(2, str(script(SUMS)), [], terminal).run() == 2
    assert "! look.txt:2: this command cannot be done; what follows it is left out" in out.getvalue()
    assert "> step" not in out.getvalue()


def test_commands_of_standard_input_are_echoed(script):
    out = io.StringIO()
    terminal = Terminal([], io.StringIO("# look\nwhere; step\n\nquit 6\n"), out)
    assert Console(2, str(script(SUMS)), [], terminal).run() == 6
    assert [line for line in out.getvalue().splitlines() if "> " in line and line.startswith("rank")] == [
        "rank 0> where",
        "rank 0> step",
        "rank 0> quit 6",
    ]


def test_a_mistake_of_the_console_costs_neither_the_session_nor_the_run(script, monkeypatch):
    def fails(self, event):
        raise RuntimeError("oh")

    monkeypatch.setattr(Watch, "__call__", fails)
    monkeypatch.setattr(Condition, "holds", fails)
    monkeypatch.setattr(commands.looking.under_way, "told", lambda views: 1 / 0)
    code, printed = play(script(SUMS), 2, ["break op gelu", "step", "waits", "breaks", "c"])
    assert code == 0
    assert printed.count("which from here on knows less: RuntimeError at test_console.py") == 2  # once a rank
    assert printed.count("breakpoints are off: RuntimeError at test_console.py") == 1
    assert "  1 off   0 hits   op gelu" in printed
    assert "! waits failed by a mistake of the console, ZeroDivisionError at test_console.py" in printed


def test_tab_offers_what_may_come_next():
    offered = {}

    def ask(console):
        for before, text in [
            ("", "wh"),
            ("", "b"),
            ("break ", "par"),
            ("break op ", "gelu"),
            ("break op gelu ", "ra"),
            ("break rank ", ""),
            ("break message ", "all_"),
            ("break axis ", ""),
            ("break parameter ", "blocks.0.mlp"),
            ("to ", "F1"),
            ("where; step ", ""),
            ("step rank ", ""),
            ("help ", "pi"),
            ("delete ", ""),
            ("xyzzy ", ""),
            ("show ", "blocks.0.mlp.down.w"),
        ]:
            offered[before + text] = completion.candidates(console, before, text)

    play(LESSON, 4, ["break nonfinite", "to op gelu_tanh", ask, "quit"])
    assert offered["wh"] == ["where "]
    assert offered["b"] == ["backward", "break", "breaks"]
    assert offered["break par"] == ["parameter "]
    assert "gelu_tanh" in offered["break op gelu"]
    assert offered["break op gelu ra"] == ["rank "]
    assert offered["break rank "] == ["0", "1", "2", "3"]
    assert offered["break message all_"] == ["all_gather", "all_reduce", "all_to_all"]
    assert {"pp", "tp", "world"} <= set(offered["break axis "])
    assert "blocks.0.mlp.up.weight" in offered["break parameter blocks.0.mlp"]
    assert offered["to F1"] == ["F1@0", "F1@1"]
    assert {"action", "message", "op", "rank", "F", "STEP"} <= set(offered["where; step "])
    assert offered["step rank "] == ["0", "1", "2", "3"]
    assert offered["help pi"] == ["pipeline "]
    assert offered["delete "] == ["1 "]
    assert offered["xyzzy "] == []
    assert any("blocks.0.mlp.down.weight" in word for word in offered["show blocks.0.mlp.down.w"])


def test_a_line_of_a_help_is_never_wider_than_the_terminal(script):
    narrow = Asker(["help", "help break", "help show", "quit"])
    narrow._width = 80
    console = narrow.console = Console(2, str(script(SUMS)), [], narrow)
    assert console.run() == 0
    assert max(map(len, narrow.out.getvalue().splitlines()[1:])) <= 80


# -------------------------------------------------------------------------------------------------------- command line


def debug(*words, stdin=""):
    command = [sys.executable, "-m", "mpitrain", "debug", *map(str, words)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_takes_a_file_of_commands_and_words_for_the_script(script, tmp_path):
    (tmp_path / "look.txt").write_text("c  # to the end\n")
    code, out, err = debug("-n", 2, "--commands", tmp_path / "look.txt", "-c", "waits; quit", script(LEAVES), "7")
    assert (code, err) == (7, "")
    assert "! rank 1 left with exit code 7" in out
    assert "rank 1> waits" in out


def test_a_wrong_command_line_is_refused_with_the_way_out(script):
    path = script(SUMS)
    for words, said in (
        (["-n", "0", path], "-n 0: the number of ranks must be a whole number from 1 to 1024"),
        ([path], "usage: mpitrain debug -n RANKS"),
        (["-n", "2", "--listen", path], "--listen: no such option of mpitrain debug"),
        (["-n", "2", "--commands", "/dev/zero", path], "--commands /dev/zero: not a file"),
        (["-n"], "-n: a value is missing"),
    ):
        code, out, err = debug(*words)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
