"""What the debugging console shows of all ranks: values, states, differences, tapes, the way back, memory, the step."""

import gc
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the sessions are
from console_session import CLASSES, op, points, session, to
from inspect_layouts import LAYOUTS, run

from mpitrain import collectives
from mpitrain.autograd.tensor import Tensor
from mpitrain.comm.alone import Alone
from mpitrain.comm.world import World, world
from mpitrain.debug.console.backward import backward
from mpitrain.debug.console.follow import Follow
from mpitrain.debug.console.held import memory
from mpitrain.debug.console.shown import keep, names, show
from mpitrain.debug.console.so_far import report
from mpitrain.debug.console.tapes import tape
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError
from mpitrain.events import Event
from mpitrain.models.mlp import MLP

UP = "blocks.0.up.weight"


def looks(*looks, focus=0, width=100):
    """Looks at all ranks with several inspectors: each (function, words)."""

    def look(watches):
        said = []
        for function, words in looks:
            try:
                said.append(function(watches, words, focus, width))
            except ConsoleError as error:
                said.append(f"ConsoleError: {error}")
        return said

    return look


def told(text):
    """The lines of a text that say that something is wrong."""
    return re.findall(r"^! (.*(?:\n    \S.*)*)", text, re.M)


def of(text, first):
    """The cells of the line that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(first))
    return re.split(r"\s{2,}", line.strip())


def bump(rank, name=UP, at=(3, 1), by=1.0, step=1):
    """Before a step, another value in one weight of one rank."""

    def meddle(model, mesh, now):
        if mesh.world.rank == rank and now == step:
            for p in model.parameters():
                if p.name == name:
                    p.data[at] += by

    return meddle


# -- show: parameters -------------------------------------------------------------------------------------------------


def test_a_weight_has_its_states_its_parts_and_ranks_that_hold_the_same_share_a_line():
    [[text]] = session([(to("F0@0"), looks((show, UP)))], dp=2, tp=2)
    head, _, columns, *rows = text.splitlines()
    assert re.split(r"\s{3,}", head) == [UP, "(4, 8) float64", "dp Replicate, tp Shard(1)", "after 0 updates"]
    assert columns.split() == ["ranks", "part", "shape", "min", "max", "mean", "norm"]
    assert [re.split(r"\s{2,}", row)[:3] for row in rows[:2]] == [
        ["0,2", "[:, 0:4]", "(4, 4)"],
        ["1,3", "[:, 4:8]", "(4, 4)"],
    ]
    assert rows[2:] == ["the same on ranks 0,2 and on ranks 1,3, as it should be"]


def test_numbers_are_those_of_the_array():
    def look(watches):
        data = watches[1].parameters[UP].data
        numbers = data.min(), data.max(), data.mean(), np.sqrt((data**2).sum())
        return show(watches, UP, 0), [f"{number:.4g}" for number in numbers]

    [(text, numbers)] = session([(to("F0@0"), look)], dp=2, tp=2)
    assert of(text, "1,3")[3:] == numbers


def test_a_rank_that_differs_is_named_with_how_many_elements_where_first_and_how_far():
    [[text]] = session([(to("F0@0", 2), looks((show, UP)))], meddle=bump(3), dp=2, tp=2)
    [line] = told(text)
    assert line.startswith("rank 3 differs from rank 1 in 1 of 16 elements, first at [3, 1]: ")
    assert line.endswith("|d| 1")
    assert "the same on" not in text
    assert of(text, "0,2")
    assert of(text, "1 ")
    assert of(text, "3 ")


def test_the_one_that_differs_from_most_is_the_odd_one():
    [[text]] = session([(to("F0@0", 2), looks((show, UP)))], meddle=bump(0), dp=4)
    [line] = told(text)
    assert line.startswith("rank 0 differs from ranks 1,2,3 in 1 of 32 elements, first at [3, 1]")


def test_ranks_that_have_not_made_the_update_yet_are_not_compared_with_those_that_have():
    def goal(view, event):  # rank 0 alone goes past the update
        if view.number == 0:
            return event.name == "LOAD0@0" and view.step == 2
        return (
            event.kind == "message"
            and event.phase == "end"
            and view.inside("action") is not None
            and view.action.kind == "STEP"
        )

    [[text]] = session([(goal, looks((show, UP)))], dp=2, ranks=2)
    assert told(text) == []
    assert "not compared: rank 0 after 1 update; rank 1 after 0 updates" in text


def test_slices_show_elements_and_places_count_in_what_is_shown():
    looked = looks((show, f"{UP}[3]"), (show, f"{UP}[2:4, -3]"), (show, f"{UP}[..., 0:1]"))
    [[row, part, dots]] = session([(to("F0@0", 2), looked)], meddle=bump(3), dp=2, tp=2)
    assert told(row)[0].startswith("rank 3 differs from rank 1 in 1 of 4 elements, first at [1]")
    assert told(part)[0].startswith("rank 3 differs from rank 1 in 1 of 2 elements, first at [1]")
    assert told(dots) == []
    assert "ranks 0,2:" in row
    assert len(re.search(r"rank 3:\n\[(.*)\]", row)[1].split()) == 4


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "show what?"),
        ("blocks.0.up.weigth", "no parameter 'blocks.0.up.weigth'; near: blocks.0.up.weight"),
        ("up.weight", "up.weight is the end of 2 names: blocks.0.up.weight, blocks.1.up.weight"),
        (f"{UP}.gard", f"{UP} has no gard; it has grad, master, moments, first_moment, second_moment"),
        (f"{UP}[9]", r"blocks.0.up.weight has the shape (4, 4), which [9] does not fit"),
        (f"{UP}[0, 0, 0]", r"which [0, 0, 0] does not fit"),
        (f"{UP}[0", "has no ] at its end"),
        (f"{UP}[open('x')]", "is no number and no slice"),
        (f"{UP}[::0]", "step 0"),
        ("grad", "no rank is in a backward"),
        ("%77", "there is no %77; the tapes go up to %"),
        ("%x", "'%x' is no value of a tape"),
        ("batch.foo", "there is no batch.foo; there is batch.inputs, batch.targets"),
        ("*.foo", "no parameter is like '*.foo'"),
    ],
)
def test_what_cannot_be_shown_is_said_with_what_can(words, error, stopped):
    with pytest.raises(ConsoleError, match=re.escape(error)) as caught:
        show(stopped, words, 0)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.fixture(scope="module")
def stopped():
    """Watches of four ranks, after a run that was left in the forward of its second step."""
    kept = []

    def look(watches):
        kept.extend(watches)

    class Done(Exception):
        pass

    def stop(view, event):
        if view.step == 2 and event.name == "linear" and event.phase == "end" and view.number == 3:
            raise Done
        return False

    with pytest.raises(Done):
        session([(to("F0@0"), look), (stop, look)], dp=2, tp=2)
    return kept


def test_the_end_of_a_name_is_enough_and_names_are_known():
    [(text, known)] = session([(to("F0@0"), lambda w: (show(w, "head.bias", 0), names(w)))], dp=2, tp=2)
    assert text.startswith("head.bias   (3,) float64   dp Replicate, tp Invariant")
    assert text.endswith("ranks 0,1,2,3:\n[0. 0. 0.]")  # few elements are shown unasked
    assert {UP, "head.bias", "input", "output", "grad", "batch"} <= set(known)


def test_a_list_marks_the_parameters_that_differ():
    [[text]] = session([(to("F0@0", 2), looks((show, "blocks.*.weight")))], meddle=bump(3), dp=2, tp=2)
    marked = [line for line in text.splitlines() if line.startswith("! ")]
    assert marked[0].split()[1] == UP
    assert marked[0].endswith("differs")
    assert marked[1] == "! 1 of 4 differ between ranks that should hold the same"
    assert len(text.splitlines()) == 6


def test_what_is_not_finite_is_said():
    found = []

    def look(watches):
        watches[2].parameters[UP].data[1, 2] = np.nan
        found.append(show(watches, UP, 0))
        watches[2].parameters[UP].data[1, 2] = 0.5

    session([(to("F0@0"), look)], dp=2, tp=2, steps=1)
    assert "rank 2 holds 1 of 16 elements that are not finite, first at [1, 2]" in told(found[0])


# -- show: gradients and moments --------------------------------------------------------------------------------------


def test_a_gradient_is_partial_until_it_is_summed():
    stops = [
        (to("B0@0"), looks((show, f"{UP}.grad"))),
        (to("B1@0"), looks((show, f"{UP}.grad"), (show, "blocks.0.down.bias.grad"))),
        (to("REDUCE@0", phase="end"), looks((show, f"{UP}.grad"))),
        (to("STEP@0", phase="end"), looks((show, f"{UP}.grad"))),
    ]
    (none,), (adding, invariant), (summed,), (used,) = session(stops, dp=2, tp=2)
    assert "ranks 0,1,2,3: none in this step yet" in none
    assert adding.splitlines()[0].endswith("dp Partial, tp Shard(1)   step 1, 1 time added to")
    assert len(re.findall(r"^\d  ", adding, re.M)) == 4  # each its own
    assert "same" not in adding
    assert "dp Partial, tp Invariant" in invariant
    assert "the same on ranks 0,1 and on ranks 2,3, as it should be" in invariant
    assert "dp summed, tp Shard(1)" in summed
    assert "the same on ranks 0,2 and on ranks 1,3" in summed
    assert "as it was used" in used
    assert of(used, "0,2")[-1] != of(summed, "0,2")[-1]  # it was clipped


def test_a_sum_that_a_rank_was_left_out_of_shows_in_the_gradient():
    def look(watches):
        watches[1].parameters[UP].grad[0, 0] += 0.5
        text = show(watches, f"{UP}.grad", 0)
        watches[1].parameters[UP].grad[0, 0] -= 0.5
        return text

    [text] = session([(to("STEP@0"), look)], dp=4)
    assert told(text)[0].startswith("rank 1 differs from ranks 0,2,3 in 1 of 32 elements, first at [0, 0]: ")


def test_a_gradient_that_is_a_multiple_of_the_others_is_called_one():
    def look(watches):
        watches[1].parameters[UP].grad *= 2.0
        text = show(watches, f"{UP}.grad", 0)
        watches[1].parameters[UP].grad *= 0.5
        return text

    [text] = session([(to("STEP@0"), look)], dp=4)
    assert re.sub(r"\s+", " ", told(text)[0]).endswith("all of it by the factor 2")


def test_moments_have_their_names_states_and_comparison():
    def look(watches):
        before = show(watches, f"{UP}.moments", 0)
        watches[2].moments["first_moment"][UP].array[0, 1] += 1e-3
        after = show(watches, f"{UP}.first_moment", 0)
        watches[2].moments["first_moment"][UP].array[0, 1] -= 1e-3
        return before, after, show(watches, f"{UP}.master", 0)

    [(both, odd, master)] = session([(to("F0@0", 2), look)], dp=2, tp=2)
    titles = re.findall(r"^blocks\S+", both, re.M)
    assert titles == [f"{UP}.first_moment", f"{UP}.second_moment"]
    assert told(both) == []
    assert told(odd)[0].startswith("rank 2 differs from rank 0 in 1 of 16 elements, first at [0, 1]")
    assert "the weights themselves" in re.sub(r"\s+", " ", master)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rows_that_ranks_deal_out_are_shown_as_such(zero):
    stops = [(to("STEP@0"), looks((show, UP), (show, f"{UP}.grad"), (show, f"{UP}.second_moment")))]
    [[weight, grad, moment]] = session(stops, dp=4, zero=zero)
    assert ("dp Replicate" in weight) == (zero < 3)
    assert ("whole while its part works" in weight) == (zero == 3)
    assert "dp Shard(0)" in grad
    assert re.findall(r"^(\d)  +\[(\d):\d, :\]", grad, re.M) == [("0", "0"), ("1", "1"), ("2", "2"), ("3", "3")]
    assert "dp Shard(0)" in moment
    assert told(weight + grad + moment) == []


def test_a_stage_has_its_own_parameters_and_the_others_say_so():
    [[text]] = session([(to("F0@0"), looks((show, UP)))], dp=2, pp=2)
    assert "ranks 2,3: of another stage" in text
    assert "the same on ranks 0,1" in text


# -- show: what ranks are in the middle of ----------------------------------------------------------------------------


def test_inputs_and_outputs_of_an_op_have_their_states():
    stops = [
        (op("linear", "blocks.0.down"), looks((show, "input"), (show, "output"))),
        (op("linear", "blocks.0.down", "end"), looks((show, "output"), (show, "input.1[0]"))),
        (op("all_reduce", "blocks.0.down", "end"), looks((show, "output"))),
    ]
    (given, early), (made, weight), (summed,) = session(stops, dp=2, tp=2)
    assert re.findall(r"^input\S+.*", given, re.M)[0].split("   ")[:3] == [
        "input.0",
        "float64",
        "dp Shard(0), tp Shard(1)",
    ]
    assert "F0@0, op" in given
    assert early.startswith("ConsoleError: nothing was made yet")
    assert "dp Shard(0), tp Partial" in made
    assert "same" not in made
    assert "input.1[0]" in weight
    assert "dp Replicate, tp Shard(0)" in weight
    assert "dp Shard(0), tp Invariant" in summed
    assert "the same on ranks 0,1 and on ranks 2,3, as it should be" in summed


def test_gradients_of_a_backward_have_the_dual_states():
    stops = [
        (op("linear.backward", "blocks.0.down"), looks((show, "grad"), (show, "input_grad"))),
        (op("linear.backward", "blocks.0.down", "end"), looks((show, "input_grad"))),
    ]
    (grad, early), (made,) = session(stops, dp=2, tp=2)
    assert "dp Shard(0), tp Replicate" in grad  # of a Partial value
    assert early.startswith("ConsoleError: no backward has ended")
    first, second = made.split("\n\ninput_grad.1")
    assert "dp Shard(0), tp Shard(1)" in first
    assert "dp Partial, tp Shard(0)" in second


def test_a_value_that_should_be_the_same_and_is_not_is_told():
    def spoil(watches):
        [t] = watches[1].op.info["outputs"]
        t.data[0, 1] += 0.25
        return show(watches, "output", 0), show(watches, f"%{t.slot}", 0)

    [(text, slot)] = session([(op("all_reduce", "blocks.0.down", "end"), spoil)], dp=2, tp=2, steps=1)
    assert told(text)[0].startswith("rank 1 differs from rank 0 in 1 of 12 elements, first at [0, 1]")
    assert told(slot)[0].startswith("rank 1 differs from rank 0 in 1 of 12 elements, first at [0, 1]")
    assert "made by all_reduce of blocks.0.down" in slot


def test_values_of_a_tape_are_found_where_a_node_keeps_them_and_else_are_gone_unless_they_are_kept():
    def slots(watches):
        recorded = watches[0].tape
        saved = next(node for node in recorded.nodes if node.function.title() == "linear" and node.inputs[0] >= 0)
        lost = next(node for node in recorded.nodes if node.function.title() == "linear" and "down" in node.path)
        return saved.inputs[0], lost.outputs[0]

    def look(watches):
        mine, lost = slots(watches)
        return show(watches, f"%{mine}", 0), show(watches, f"%{lost}", 0)

    def keeping(watches):
        return keep(watches, "on", 0), keep(watches, "", 0)

    (saved, gone), (on, still), (_, kept) = session(
        [(to("B0@0"), look), (to("F1@0"), keeping), (to("B1@0"), look)], dp=2, tp=2, micros=2
    )
    assert "F0@0 of step 1" in saved
    assert re.search(r"^\d", saved, re.M)
    assert "gone, since nobody needs it any more; after keep on later ones stay" in gone
    assert on == still == "values of tapes are kept from now on"
    assert "F1@0 of step 1" in kept
    assert "gone" not in kept


def test_ranks_at_other_ops_are_not_compared():
    def goal(view, event):
        return event.kind == "op" and event.phase == "end" and event.name == ("copy" if view.number else "linear")

    [[text]] = session([(goal, looks((show, "output")))], dp=1, tp=2, ranks=2)
    assert told(text) == []
    assert re.search(r"linear of blocks.0.up", text)
    assert re.search(r"copy of blocks.0.up", text)


def test_messages_show_what_goes_and_what_has_come():
    def at_sum(phase):
        return lambda view, event: (
            event.kind == "message"
            and event.phase == phase
            and event.info["axis"] == "dp+cp"
            and view.action.kind == "REDUCE"
        )

    (before,), (after,) = session(
        [(at_sum("begin"), looks((show, "input"))), (at_sum("end"), looks((show, "output")))], dp=2, ranks=2, steps=1
    )
    assert "all_reduce on dp+cp, call" in before
    assert len(re.findall(r"^\d  ", before, re.M)) == 2
    assert "the same on ranks 0,1, as it should be" in after


def test_a_buffer_that_waits_for_a_message_is_no_input():
    def waits(view, event):
        return event.kind == "message" and "irecv" in event.name

    [[text]] = session([(waits, looks((show, "input")))], pp=2, ranks=2, steps=1)
    assert re.search(r"^ConsoleError: no rank is in|^ranks? .*: has none just now", text, re.M)
    assert "not finite" not in text


def test_events_of_files_are_taken_no_notice_of():
    def look(watches):
        for phase in ("begin", "end"):
            watches[0](Event("disk", phase, "write", {"path": "x"}))

    session([(to("F0@0"), look)], dp=2, ranks=1 + 1, steps=1)
    watch = Watch(World(Alone(), "none"))
    for phase in ("begin", "end"):
        watch(Event("disk", phase, "write", {"path": "x"}))
    assert watch.course.ops == 0


def test_weights_in_the_middle_of_an_update_are_not_compared():
    def look(watches):
        weight = watches[1].parameters[UP].data
        weight[0, 0] += 1.0
        before = told(show(watches, UP, 0))
        for watch in watches:
            watch.executor.optimizer.updates += 1  # as it is while the update goes on
        try:
            return before, show(watches, UP, 0), show(watches, f"{UP}.first_moment", 0)
        finally:
            weight[0, 0] -= 1.0
            for watch in watches:
                watch.executor.optimizer.updates -= 1

    def within(view, event):
        is_there = event.kind == "message" and event.phase == "end" and view.action is not None
        return is_there and view.action.kind == "STEP"

    [(before, weight, moment)] = session([(within, look)], dp=2, ranks=2, steps=1)
    assert before[0].startswith("rank 1 differs from rank 0")
    for text in (weight, moment):
        assert told(text) == []
        assert "in the middle of update 1" in text


def test_the_micro_batch_is_compared_over_the_ranks_that_work_on_it_together():
    stops = [(to("F0@0"), looks((show, "batch")))]
    [[text]] = session(stops, dp=2, tp=2)
    assert told(text) == []
    assert re.findall(r"^batch\S*", text, re.M) == ["batch.inputs", "batch.targets"]
    assert "dp Shard(0), tp Invariant" in text

    def other(watches):
        watches[3].batch.inputs[0, 0] += 1
        return show(watches, "batch.inputs", 0)

    [odd] = session([(to("F0@0"), other)], dp=2, tp=2, steps=1)
    assert told(odd)[0].startswith("rank 3 differs from rank 2 in 1 of ")
    assert "were given other rows of the batch" in told(odd)[1]


# -- tapes ------------------------------------------------------------------------------------------------------------


def test_a_tape_lists_its_nodes_with_states_and_what_has_begun():
    [[text]] = session([(op("linear", "blocks.0.down"), looks((tape, "")))], dp=2, tp=2)
    head, *lines = text.splitlines()
    assert head == "tape of F0@0 of step 1 on rank 0, float64: 2 nodes; 192 B wait for backward"
    assert lines[0].strip() == "%0 = blocks.0.up.weight  (4, 4)"
    assert re.split(r"\s{2,}", lines[2].strip()) == [
        "0",
        "%1 = linear(const, %0)",
        "(3, 4)",
        "dp S(0) tp S(1)",
        "blocks.0.up",
    ]
    assert lines[-1] == "      > linear has begun in blocks.0.down"


def test_the_place_on_a_tape_is_that_of_the_walk_and_what_was_walked_is_marked():
    stops = [
        (op("linear.backward", "head"), looks((tape, "all"), (tape, "2 0:3"))),
        (op("gelu_tanh.backward", "blocks.0", "end"), looks((tape, "all"))),
        (to("REDUCE@0"), looks((tape, "all"), (tape, "F0@0"), (tape, "F9@0"))),
    ]
    (first, some), (later,), (over, gone, none) = session(stops, dp=2, tp=2)
    marks = [line[6] for line in first.splitlines() if re.match(r" +\d+ ", line)]
    assert marks == [*" " * 11, ">", "-"]
    assert "1 walked back" in first.splitlines()[0]
    assert "on rank 2" in some
    assert "... 10 nodes more" in some
    marks = [line[6] for line in later.splitlines() if re.match(r" +\d+ ", line)]
    assert marks.index(">") == 1
    assert set(marks[2:]) == {"-"}
    assert "12 walked back" in later.splitlines()[0]
    assert "13 walked back; 0 B wait" in over.splitlines()[0]
    assert ">" not in [line[6] for line in over.splitlines() if re.match(r" +\d+ ", line)]
    assert "F9@0" in none
    assert gone.startswith(("ConsoleError", "tape of F0@0"))


def test_tapes_of_ranks_of_one_program_are_the_same_and_a_node_that_one_lacks_is_shown():
    [[same, bad]] = session([(to("B0@0"), looks((tape, "diff 0 3"), (tape, "diff 0")))], dp=2, tp=2, steps=1)
    assert re.search(r"are the\s+same: 13 nodes", same)
    assert bad == "ConsoleError: tape diff takes two ranks: tape diff 0 2"

    class Odd(MLP):
        def forward_stage(self, stage, batch, *inputs, carry=None):
            (loss,) = super().forward_stage(stage, batch, *inputs)
            return (loss * 1.0,) if world().rank == 1 else (loss,)

    [[text]] = session(
        [(to("B0@0"), looks((tape, "diff 0 1")))],
        dp=2,
        ranks=2,
        steps=1,
        model_of=lambda mesh: Odd((4, 8, CLASSES), mesh, seed=1, dtype=np.float64),
    )
    assert text.startswith("! tapes of rank 0 (F0@0 of step 1) and rank 1 (F0@0 of step 1): 1 place differs\n")
    assert "- rank 0 alone, + rank 1 alone" in text
    assert [line.split()[1] for line in text.splitlines() if re.match(r" +\d+ [-+]", line)] == ["+"]
    assert "scale(" in text


def test_tapes_of_other_shapes_differ_and_stages_do_so_by_design():
    stops = [(lambda view, event: event.kind == "action" and event.name.startswith("B"), looks((tape, "diff 0 2")))]
    [[text]] = session(stops, dp=2, pp=2, steps=1)
    assert told(text) == []
    assert re.search(r"stages 0\s+and\s+1\s+of\s+a\s+pipeline", text)


def test_a_recomputed_part_has_a_tape_of_its_own():
    [[text, said]] = session(
        [(op("gelu_tanh.backward", "blocks.1"), looks((tape, ""), (backward, "")))], dp=2, tp=2, recompute=True
    )
    assert "tape of B0@0 of step 1" in text.splitlines()[0]
    assert "gelu_tanh" in text
    assert said.splitlines()[2].startswith("node   %")


# -- the way back -----------------------------------------------------------------------------------------------------


def test_a_step_of_the_way_back_shows_what_came_and_what_it_gives():
    stops = [
        (op("linear.backward", "blocks.0.down"), looks((backward, ""), (backward, "3"))),
        (op("linear.backward", "blocks.0.down", "end"), looks((backward, ""))),
        (to("STEP@0"), looks((backward, ""))),
    ]
    (before, other), (after,), (none,) = session(stops, dp=2, tp=2)
    assert before.startswith("B0@0 of step 1 on rank 0: node 2 of 13 (F0@0 of step 1), linear.backward about to run")
    assert "on rank 3" in other
    assert before.count("not made yet") == 2
    assert of(after, "gives  %4")[:4] == ["gives", "%4", "blocks.0.down.weight", "dp P tp S(0)"]
    assert "final with this node: blocks.0.down.weight" in after
    assert "not made yet" not in after
    assert re.search(r"^next   %\d+ = gelu_tanh", after, re.M)
    assert none == "ConsoleError: rank 0 is not on the way back; go there: to B0@0, then step op"


def test_a_gradient_that_should_be_the_same_and_is_not_is_told_on_the_way_back():
    def spoil(watches):
        grad = watches[1].op.info["grad"]
        grad[0, 0] += 1.0
        text = backward(watches, "", 0)
        grad[0, 0] -= 1.0
        return text

    [text] = session([(op("all_reduce.backward", "blocks.0.down"), spoil)], dp=2, tp=2, steps=1)
    assert told(text)[0].startswith("grad: rank 1 differs from rank 0 in 1 of 12 elements, first at [0, 0]")


# -- follow -----------------------------------------------------------------------------------------------------------


def followed(name, **how):
    """What following a parameter tells in two steps."""
    lines, follows = [], []

    def begin(watches):
        follows.append(Follow(name, lines.append, watches))

    def hear(watch, event):
        for each in follows:
            each.hear(watch, event)

    session([(to("LOAD0@0"), begin)], hear=hear, **how)
    return lines, follows[0].rest()


def test_a_followed_parameter_tells_each_touch_once_with_the_numbers_of_all_ranks():
    lines, rest = followed(UP, dp=2, tp=2, steps=1)
    assert lines[0] == f"follow {UP}  (4, 8) on ranks 0,1,2,3   dp Replicate, tp Shard(1)"
    what = [re.sub(r"\s{2,}.*", "", line.removeprefix("up.weight step 1").strip(), flags=re.S) for line in lines[1:]]
    assert what[:4] == [
        "F0@0: used by linear of blocks.0.up",
        "B0@0: linear.backward adds",
        "F1@0: used by linear of blocks.0.up",
        "B1@0: linear.backward adds",
    ]
    assert what[4] == "REDUCE@0: summed by all_reduce on dp+cp"
    assert what[5].startswith("STEP@0: updated, lr 0.01, gradient scaled by 0.")
    assert len(what) == 6
    assert rest == ""
    assert re.search(r"\|w\| \S+ \(0,2\)  \S+ \(1,3\)", lines[1])
    assert re.search(r"\|g\| \S+ \(0,2\)\s+\S+ \(1,3\)", lines[5])
    assert not any(line.startswith("!") for line in lines)


def test_a_followed_parameter_tells_where_ranks_part():
    lines, _ = followed(UP, dp=4, meddle=bump(2))
    first = next(line for line in lines if "here they part" in line)
    assert first.startswith("up.weight step 2  F0@0: used by linear of blocks.0.up")
    assert "rank 2 differs from ranks 0,1,3 in 1 of 32 elements, first at [3, 1]" in re.sub(r"\s+", " ", first)
    assert not any("part" in line for line in lines if "step 1" in line)


class Stale(MLP):
    """One that computes with a copy of a weight."""

    def forward_stage(self, stage, batch, *inputs, carry=None):
        layer = self.blocks[0].up
        if not hasattr(self, "copied"):
            self.copied = Tensor(layer.weight.data.copy())
        weight, layer.weight = layer.weight, self.copied
        try:
            return super().forward_stage(stage, batch, *inputs)
        finally:
            layer.weight = weight


def test_a_followed_parameter_that_nobody_uses_is_told_at_the_end_of_the_step():
    lines, _ = followed(
        UP, dp=2, ranks=2, model_of=lambda mesh: Stale((4, 8, CLASSES), mesh, seed=1, dtype=np.float64), steps=2
    )
    assert [line for line in lines if line.startswith("! ")] == [
        f"! up.weight step {step}  STEP@0: no op of a forward used it in this step   (ranks 0,1)" for step in (1, 2)
    ]


def test_a_touch_that_a_rank_did_not_make_is_told_when_the_step_is_over():
    class Skips(MLP):
        def forward_stage(self, stage, batch, *inputs, carry=None):
            (loss,) = super().forward_stage(stage, batch, *inputs)
            return (loss + (self.head.weight * 0.0).sum(),) if world().rank == 1 else (loss,)

    lines, _ = followed(
        "head.weight",
        dp=2,
        ranks=2,
        model_of=lambda mesh: Skips((4, 8, CLASSES), mesh, seed=1, dtype=np.float64),
        steps=1,
    )
    assert any(
        re.match(r"! head.weight rank 0 did not: used by scale .*in F0@0 of\s+step 1", line) for line in lines
    ), lines


@pytest.mark.parametrize(
    ("how", "sum_of"),
    [
        ({"dp": 4, "zero": 2}, "after the sum over ranks"),
        ({"dp": 4, "zero": 3}, "after the sum over ranks"),
        ({"dp": 2, "pp": 2, "schedule": "zb-h1"}, "summed by all_reduce on dp+cp"),
        ({"dp": 2, "tp": 2, "recompute": True}, "summed by all_reduce on dp+cp"),
    ],
)
def test_following_is_right_with_other_ways_to_train(how, sum_of):
    lines, rest = followed(UP, **how)
    assert rest == ""
    assert not any(line.startswith("!") for line in lines)
    assert sum(sum_of in line for line in lines) == 2
    assert sum("STEP@0: updated" in line for line in lines) == 2
    assert sum(" adds " in line for line in lines) == 4


def test_a_parameter_can_be_followed_before_there_is_a_model():
    lines, follows = [], []

    def begin(watches):
        follows.extend(Follow(name, lines.append, watches) for name in ("1.up.weight", "nothing"))
        return not any(watch.parameters for watch in watches)

    def hear(watch, event):
        for each in follows:
            each.hear(watch, event)

    def first(view, event):
        return event.kind == "message"

    assert session([(first, begin)], hear=hear, pp=2, dp=2, steps=1) == [True]
    assert lines[:2] == [
        f"follow {name}: pending, until there is a model that runs" for name in ("1.up.weight", "nothing")
    ]
    assert "follow blocks.1.up.weight  (4, 8) on ranks 2,3   dp Replicate" in lines
    assert [line for line in lines if line.startswith("! ")] == ["! follow: no parameter 'nothing'"]
    told_of = [line for line in lines if line.startswith("up.weight step 1")]
    assert "F0@1: used by linear of blocks.1.up" in told_of[0]  # also what came before all ranks were known
    assert "STEP@1: updated" in told_of[-1]
    assert len(told_of) == 6


def test_only_a_parameter_can_be_followed():
    def look(watches):
        for name in ("nothing", f"{UP}.grad"):
            with pytest.raises(ConsoleError, match="no parameter"):
                Follow(name, print, watches)

    session([(to("F0@0"), look)], dp=2, ranks=2, steps=1)


# -- memory and the step so far ---------------------------------------------------------------------------------------


def test_memory_has_a_column_for_each_rank():
    [[text, one, bad]] = session([(to("B0@0"), looks((memory, ""), (memory, "1"), (memory, "9")))], dp=2, tp=2)
    rows = {row[0]: row[1:] for row in (re.split(r"\s{2,}", line) for line in text.splitlines())}
    assert rows["memory now"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert rows["weights"] == rows["gradients"]
    assert rows["activations"][0] != "0 B"
    assert "all" in rows
    assert "at the peak" in rows
    assert told(text) == []
    assert one.startswith("memory of rank 1\n")
    assert bad == "ConsoleError: there is no rank 9; ranks are 0, 1, 2, 3"


class Leaks(MLP):
    """One that keeps what it has computed."""

    def forward_stage(self, stage, batch, *inputs, carry=None):
        self.seen = [*getattr(self, "seen", []), self.blocks[0].up.bias * 2.0]
        return super().forward_stage(stage, batch, *inputs)


def test_what_lives_on_from_step_to_step_is_told_with_who_keeps_it():
    stops = [(to("COUNT@0", 4), looks((memory, ""))), (to("COUNT@0", 5), looks((memory, "")))]
    (early,), (late,) = session(
        stops, dp=2, ranks=2, steps=5, model_of=lambda mesh: Leaks((4, 8, CLASSES), mesh, seed=1, dtype=np.float64)
    )
    said = [re.sub(r"\s+", " ", each) for each in told(late)]
    assert any(re.match(r"ranks 0,1: values grow with each step: .* when steps .*4, 5 began", each) for each in said), (
        said
    )
    assert "ranks 0,1: of step 1: 2 times values (8,) float64, 64 B, kept as Leaks.seen" in said
    kept = [each for each in said if "tapes of steps that are over kept alive" in each]
    assert kept[0].startswith(
        "ranks 0,1: 6 tapes of steps that are over kept alive, by what is kept as Leaks.seen: F0@0 of"
    )
    assert told(early)


def test_a_clean_run_keeps_nothing_from_step_to_step_and_the_console_neither():
    stops = [(to("COUNT@0", 5), looks((memory, "")))]
    [[text]] = session(stops, dp=2, tp=2, steps=5)
    assert told(text) == []
    rows = {row[0]: row[1:] for row in (re.split(r"\s{2,}", line) for line in text.splitlines())}
    assert set(rows.get("activations", ["0 B"])) == {"0 B"}
    assert set(rows.get("values", ["0 B"])) == {"0 B"}


class Plain:
    """A batch of a class that nobody knows."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    @property
    def count(self):
        return len(self.targets)

    def split(self, parts):
        return [Plain(*pair) for pair in zip(np.split(self.inputs, parts), np.split(self.targets, parts), strict=True)]


def test_batches_that_a_script_holds_are_no_leak():
    def hold(model, mesh, step):
        model.held = [*getattr(model, "held", []), points(step, mesh)]

    class Given(MLP):
        def forward_stage(self, stage, batch, *inputs, carry=None):
            self.held = [*getattr(self, "held", []), batch]
            return super().forward_stage(stage, batch, *inputs)

    [[text]] = session(
        [(to("COUNT@0", 5), looks((memory, "")))],
        dp=2,
        ranks=2,
        steps=5,
        meddle=hold,
        model_of=lambda mesh: Given((4, 8, CLASSES), mesh, seed=1, dtype=np.float64),
        batch_of=Plain,
    )
    assert told(text) == []


def test_the_console_holds_no_tape_over_a_step_nor_frames_of_what_went_wrong():
    def model_of(mesh):
        model = Doubled((4, 8, CLASSES), mesh, seed=1, dtype=np.float64)
        model.twice = lambda loss: collectives.all_reduce(loss, mesh.tp)
        return model

    def look(watches):
        return [watch.tape for watch in watches], [watch.trouble for watch in watches], memory(watches, "", 0)

    gc.disable()  # a cycle would hold what it holds
    try:
        [(tapes, troubles, text)] = session([(to("COUNT@0", 5), look)], tp=2, ranks=2, steps=5, model_of=model_of)
    finally:
        gc.enable()
    assert tapes == [None, None]
    assert all(troubles)
    assert told(text) == []
    assert "activations" not in text


class Doubled(MLP):
    """One whose loss is summed once more."""

    def forward_stage(self, stage, batch, *inputs, carry=None):
        (loss,) = super().forward_stage(stage, batch, *inputs)
        return (self.twice(loss),)


def test_the_report_tells_what_each_rank_has_done_and_sent():
    stops = [
        (to("LOAD0@0"), looks((report, ""))),
        (to("B1@0"), looks((report, ""))),
        (to("STEP@0", phase="end"), looks((report, ""))),
    ]
    (_,), (middle,), (end,) = session(stops, dp=2, tp=2)
    assert middle.splitlines()[0].startswith("step 1 so far; sums of losses: F0@0 ")
    assert of(middle, "0,1,2,3 ")[:4] == ["0,1,2,3", "1", "B1@0", "6 of 9: LOAD0-1 COUNT F0 B0 F1"]
    assert re.search(r"^tp +all_reduce +\d+ +[\d.]+ (B|KiB)$", middle, re.M)
    assert re.search(r"^step 1 so far: loss \d\.\d+, gradient norm \S+, lr 0.01$", end, re.M)


def test_ranks_that_stand_in_the_same_place_with_different_numbers_of_calls_are_told():
    class Extra(MLP):
        def forward_stage(self, stage, batch, *inputs, carry=None):
            if world().rank < 2:
                self.axis.all_reduce(np.ones(2))
            return super().forward_stage(stage, batch, *inputs)

    def model_of(mesh):
        model = Extra((4, 8, CLASSES), mesh, seed=1, dtype=np.float64)
        model.axis = mesh.tp
        return model

    def look(watches):
        traffic = watches[1].course.traffic["tp", "all_reduce"]
        traffic.calls += 1
        text = report(watches, "", 0)
        traffic.calls -= 1
        return text

    [text] = session(
        [(to("COUNT@0", phase="end"), lambda w: None), (to("F0@0", phase="end"), look)],
        dp=2,
        tp=2,
        steps=1,
        model_of=model_of,
    )[1:]
    assert re.search(r"calls of all_reduce on tp: rank 0 \d+; rank 1 \d+", told(text)[0])


def test_a_mistake_in_states_is_noted_and_the_run_goes_on():
    def model_of(mesh):
        model = Doubled((4, 8, CLASSES), mesh, seed=1, dtype=np.float64)
        model.twice = lambda loss: collectives.all_reduce(loss, mesh.tp)
        return model

    [trouble, text] = session(
        [(to("B0@0"), lambda w: [each.trouble for each in w]), (to("B1@0"), lambda w: report(w, "", 0))],
        dp=2,
        tp=2,
        steps=1,
        model_of=model_of,
    )
    assert all("all_reduce of an Invariant value over tp" in each for each in trouble), trouble
    assert len(set(trouble)) == 1
    assert told(text)[-1].startswith("ranks 0,1,2,3, by the rules of states: at test_inspectors.py:")


@pytest.mark.parametrize("width", [60, 100])
def test_nothing_is_wider_than_the_terminal(width):
    every = [(show, UP), (show, "*"), (show, "input"), (show, f"{UP}[0]"), (tape, "all"), (memory, ""), (report, "")]
    [said] = session([(op("linear", "blocks.1.down"), looks(*every, width=width))], meddle=bump(3), dp=2, tp=2)
    for text in said:
        assert max(map(len, text.splitlines())) <= width, text


def _layouts(places):
    return [pytest.param(how, id=str(place)) for place, how in enumerate(LAYOUTS) if place in places]


FAST = (7, 15)  # tensor parallel with buckets; ZeRO 3 in a pipeline


@pytest.mark.parametrize("how", _layouts(FAST))
def test_nothing_is_called_wrong_in_a_run_that_is_right(how):
    looks, odd = run(how)
    assert looks > 8
    assert odd == []


@pytest.mark.slow
@pytest.mark.parametrize("how", _layouts(set(range(99)) - set(FAST)))
def test_nothing_is_called_wrong_on_any_layout(how):
    _, odd = run(how)
    assert odd == []
