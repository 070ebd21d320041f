"""`mpitrain compare`: no layout parts from one rank, and what was changed is named where it was changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import ALONE, case, compared, other_gradients, other_values, run

import mpitrain.parallel.tensor
from mpitrain import kernels
from mpitrain.autograd.ops.attention import Attention
from mpitrain.autograd.ops.fused import GeluTanh, LayerNorm, Linear
from mpitrain.autograd.ops.residual import Residual
from mpitrain.collectives import AllReduce
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.compare.command import main
from mpitrain.compare.report import of_walk, what
from mpitrain.data.tokens import Batch
from mpitrain.debug.recorder import record
from mpitrain.errors import ConfigError, DataError
from mpitrain.nn.layers import Gelu
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.stages import Links
from mpitrain.pipeline.executor import Executor
from mpitrain.train import main as train

TINY = "--layers 1 --width 16 --heads 2 --seq-len 16 --batch 4 --steps 4 --log-every 100".split()
EXPERTS = {"experts": 4, "top_k": 2, "router": "topk", "capacity_factor": 1.0, "moe_every": 2, "z_loss": 1e-3}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder, case(), ALONE)
    return folder


# ------------------------------------------------------------------------------------------------------ no false alarm


@pytest.mark.parametrize(
    "layout",
    [
        "tp2,sp",
        "cp2,ring",
        "cp2,ulysses",
        "pp2,terapipe,s2",
        "pp2,dp2,tp2,zb-h1,zero1",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp4", "tp2", "pp2,interleaved,v1", "dp2,zero3")),
    ],
)
def test_no_layout_parts_from_one_rank(layout: str, one_rank: Path, tmp_path: Path) -> None:
    of = case(layout)
    run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is None, of_walk(found)
    assert found.steps == [1, 2]
    assert max(found.largest.values()) < 0.01  # far from being taken for another run
    assert found.compared["forward"] >= 50
    assert found.compared["backward"] >= 100  # it has looked at nearly everything


def test_values_of_which_only_rounding_is_left_do_not_part(tmp_path: Path) -> None:
    options = {"kv_heads": 2, "seq_len": 1}  # the softmax over one key is 1: queries have no gradient
    of = case("tp2", **options)
    run(tmp_path / "one", case(**options), ALONE)
    run(tmp_path / "many", of, of.layout)
    found = compared(tmp_path / "one", tmp_path / "many")
    assert found.first is None, of_walk(found)


def test_an_op_that_one_run_makes_more_often_is_not_compared(one_rank: Path, tmp_path: Path) -> None:
    """Nobody knows which of them is which; the next op that both have as often tells."""

    def twice(self: Gelu, x: Any, bias: Any = None) -> Any:
        forward(self, x * 0.5, bias)
        return forward(self, x, bias)

    forward = Gelu.forward
    of = case("dp2")
    with put(Gelu, "forward", twice):
        run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is None, of_walk(found)
    assert found.left_out > 0


def test_parts_that_are_made_again_have_the_same_ops(one_rank: Path, tmp_path: Path) -> None:
    of = case("dp2", recompute="full", recompute_modules="*.*,blocks.*.mlp.up")
    run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is None, of_walk(found)
    assert found.left_out == 0
    assert found.compared["backward"] == 128


@pytest.mark.parametrize(
    ("layout", "dtype"), [("dp2,ep2", np.float32), pytest.param("dp2,ep2,tp2,sp", np.float64, marks=pytest.mark.slow)]
)
def test_experts_do_not_part(layout: str, dtype: Any, tmp_path: Path) -> None:
    alone, of = case(**EXPERTS), case(layout, **EXPERTS)
    run(tmp_path / "one", alone, ALONE, dtype)
    run(tmp_path / "many", of, of.layout, dtype)
    found = compared(tmp_path / "one", tmp_path / "many")
    assert found.first is None, of_walk(found)
    assert found.compared["forward"] >= 70


def test_an_uneven_vocabulary_and_grouped_heads_do_not_part(tmp_path: Path) -> None:
    options = {"kv_heads": 2, "tied": True, "seq_len": 12}
    of = case("tp4", **options)  # 17 words over 4 ranks: 5, 5, 5, 2; two ranks share a head of keys
    run(tmp_path / "one", case(**options), ALONE, np.float32)
    run(tmp_path / "many", of, of.layout, np.float32)
    found = compared(tmp_path / "one", tmp_path / "many")
    assert found.first is None, of_walk(found)


# ------------------------------------------------------------------------------------------ what was changed is named


def scaled(x: Any) -> Any:
    return x * (1 + 1e-7)


def swapped(*at: Any) -> Callable[[Any], Any]:
    """Rows, tokens or columns 0 and 1 change places."""

    def change(x: Any) -> Any:
        y = x.copy()
        y[(*at, [0, 1])] = y[(*at, [1, 0])]
        return y

    return change


ALL = slice(None)
VALUES = {
    "scaled in the middle": (other_values(GeluTanh, "blocks.1.mlp", scaled), "gelu_tanh in blocks.1.mlp"),
    "rows": (other_values(LayerNorm, "norm", swapped()), "layer_norm in norm"),
    "tokens": (other_values(Attention, "blocks.0.attention", swapped(ALL)), "attention in blocks.0.attention"),
    "columns": (other_values(Linear, "blocks.0.mlp.up", swapped(..., ALL)), "linear in blocks.0.mlp.up"),
    "a message": (other_values(AllReduce, "blocks.0.mlp.down", scaled), "all_reduce in blocks.0.mlp.down"),
    "a residual": (other_values(Residual, "blocks.0.drop2", scaled), "residual in blocks.0.drop2"),
}
GRADIENTS = {
    "of a weight": (other_gradients(Linear, "blocks.1.mlp.up", 1, scaled), "linear.backward in blocks.1.mlp.up", 1),
    "of a value": (other_gradients(Linear, "blocks.0.attention.proj", 0, scaled), "in blocks.0.attention.proj", 0),
    "rows": (other_gradients(Attention, "blocks.0.attention", 0, swapped()), "attention.backward in blocks.0", 0),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_op_whose_value_is_another_one_is_named(name: str, one_rank: Path, tmp_path: Path) -> None:
    mistake, expected = VALUES[name]
    of = case("tp2")
    with mistake:
        run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is not None
    assert (found.first.step, found.first.phase) == (1, "forward")
    assert expected in what(found.first)
    assert all(len(line) <= 100 for line in of_walk(found))


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_op_whose_gradient_is_another_one_is_named(name: str, one_rank: Path, tmp_path: Path) -> None:
    mistake, expected, which = GRADIENTS[name]
    of = case("pp2,tp2")
    with mistake:
        run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.which) == (1, "backward", which)
    assert expected in what(found.first)


@contextmanager
def other_weights(name: str, ranks: tuple[int, ...], change: Callable[[Any], Any]) -> Iterator[None]:
    """Some ranks begin with other numbers in a parameter."""
    before = Executor.__init__

    def init(self: Executor, model: Any, *args: Any, **kwargs: Any) -> None:
        before(self, model, *args, **kwargs)
        for p in model.parameters():
            if p.name == name and world().rank in ranks:
                p.data[...] = change(p.data)

    Executor.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.__init__ = before  # type: ignore[method-assign]


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def other_rows(self: Batch, parts: int) -> list[Batch]:
    """Micro-batches of which two rows of inputs have changed places, without their targets."""
    self.inputs[[0, 1]] = self.inputs[[1, 0]]
    return split(self, parts)


class Distorted:
    """A message of which a little more arrives."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def wait(self) -> Any:
        return self.request.wait() * 1.001


expect = Links.expect
split = Batch.split
MISTAKES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str, str]] = {
    "the last bit of a weight": (
        "dp2",
        lambda: other_weights("blocks.1.mlp.up.bias", (0, 1), lambda x: np.nextafter(x, 1.0)),
        "weights before",
        "weight blocks.1.mlp.up.bias before the first step",
    ),
    "a replica": (
        "dp2",
        lambda: other_weights("norm.weight", (1,), lambda x: x * 1.5),
        "weights before",
        "weight norm.weight before the first step",
    ),
    "rows of the batch": ("tp2", lambda: put(Batch, "split", other_rows), "batch", "batch: inputs"),
    "what comes from a stage": (
        "pp2",
        lambda: put(Links, "expect", lambda *where: [Distorted(request) for request in expect(*where)]),
        "message",
        "message: from stage 0 to stage 1",
    ),
    "no sum over ranks": (
        "tp2",
        lambda: put(mpitrain.parallel.tensor, "leave", lambda y, axis, sequence_parallel: y),
        "states",
        "states: residual_norm",
    ),
    "no sum of gradients": ("dp2", lambda: put(FlatReducer, "finish", lambda self: None), "gradient", "gradient of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_op_is_named_too(name: str, one_rank: Path, tmp_path: Path) -> None:
    layout, mistake, phase, expected = MISTAKES[name]
    of = case(layout)
    with mistake():
        run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is not None
    assert (found.first.phase, found.first.step) == (phase, 0 if phase == "weights before" else 1)
    assert expected in what(found.first)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"weight_decay": 0.2}, "weight of"),
        pytest.param({"lr": 2e-3}, "learning rate", marks=pytest.mark.slow),
        pytest.param({"clip": 0.0}, "weight of", marks=pytest.mark.slow),
    ],
)
def test_another_setting_is_named_by_what_it_changes(
    option: dict[str, Any], expected: str, one_rank: Path, tmp_path: Path
) -> None:
    of = case("dp2", **option)
    run(tmp_path, of, of.layout)
    found = compared(one_rank, tmp_path)
    assert found.first is not None
    assert found.first.step == 1
    assert expected in what(found.first)


def test_of_one_layout_the_rank_and_the_bytes_are_told(tmp_path: Path) -> None:
    of = case("dp2,tp2")
    run(tmp_path / "a", of, of.layout, np.float32)
    run(tmp_path / "b", of, of.layout, np.float32)
    same = compared(tmp_path / "a", tmp_path / "b")
    assert same.first is None
    assert same.bits is None
    assert "the same everywhere" in "\n".join(of_walk(same))

    def on_one_rank(x: Any) -> Any:
        return x * 1.5 if world().rank == 3 else x

    with other_values(GeluTanh, "blocks.0.mlp", on_one_rank):
        run(tmp_path / "c", of, of.layout, np.float32)
    found = compared(tmp_path / "a", tmp_path / "c")
    assert found.first is not None
    assert "gelu_tanh in blocks.0.mlp" in what(found.first)
    assert found.first.ranks == (3,)


def test_ranks_that_should_hold_the_same_and_do_not_are_the_reason_and_not_sums_within_rounding(tmp_path: Path) -> None:
    of = case("tp2")
    run(tmp_path / "a", of, of.layout, np.float32)
    with (
        other_values(GeluTanh, "blocks.0.mlp", lambda x: x * np.float32(1 + 3e-7)),
        other_values(LayerNorm, "norm", lambda x: x * np.float32(1 + 3e-7 * world().rank)),
    ):
        run(tmp_path / "b", of, of.layout, np.float32)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert found.bits is not found.first
    said = of_walk(found)
    assert said[0].startswith("They part at step 1, forward: ")
    assert said[2] == "  problem  in run 2 rank 1 of axis tp holds other bytes than the ranks beside"
    assert not [line for line in said if "bytes differ first" in line or "rounding may make" in line]
    assert "  values   equal within rounding: " in "\n".join(said)
    assert "  earlier  other bytes, within rounding, from step 1, forward: gelu_tanh in blocks.0.mlp on" in said


def test_other_kernels_are_no_other_run_but_other_bytes(tmp_path: Path) -> None:
    levels, level = kernels.levels(), kernels.level()
    if len(levels) < 2:
        pytest.skip("this machine has one level of kernels")
    of = case("dp2")
    run(tmp_path / "a", of, of.layout, np.float32)
    kernels.select(next(each for each in levels if each != level))
    try:
        run(tmp_path / "b", of, of.layout, np.float32)
    finally:
        kernels.select(level)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.first is None, of_walk(found)
    assert found.bits is not None
    assert found.bits.is_op
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert (main(runs), main([*runs, "--bytes"])) == (0, 1)


@pytest.mark.slow
def test_a_late_pipeline_is_told_to_be_another_run(
    one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = case("pp2,pipedream-2bw", clip=0.0)
    run(tmp_path / "a", of, of.layout)
    run(tmp_path / "b", of, of.layout)
    assert compared(tmp_path / "a", tmp_path / "b").first is None
    assert main([str(one_rank), str(tmp_path / "a")]) == 1
    assert "updates without draining" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- recordings


def test_recordings_are_compared_message_by_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", "0.001"), ("c", "0.01")):
        flags = [*TINY, "--steps", "2", "--dp", "2", "--lr", lr, "--record", str(tmp_path / name)]
        LocalWorld(2).run(lambda flags=flags, name=name: train([*flags, "--run", str(tmp_path / f"run-{name}")]))
    capsys.readouterr()
    assert main([str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "are the same, by the checksums of their bytes" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    said = capsys.readouterr().out
    assert "They part at step 1, what rank 0 holds: weight of own/table.weight after step 1" in said
    assert "its bytes differ, and those of" in said
    assert "beside   rank 1, weight of own/table.weight after step 1" in said
    last = tmp_path / "c" / "rank-00001.index.jsonl"
    last.write_bytes(last.read_bytes()[:9000])
    (tmp_path / "c" / "rank-00000.index.jsonl").unlink()
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    said = capsys.readouterr().out
    assert "note     rank 0 is recorded in run 1 only" in said
    assert "note     the recording of rank 1 of run 2 was cut after" in said


def test_only_recordings_of_the_same_steps_are_compared(tmp_path: Path) -> None:
    for name, steps in (("all", None), ("part", (2, 3))):

        def program(name: str = name, steps: tuple[int, int] | None = steps) -> None:
            with record(world(), tmp_path / name, steps=steps):
                world().all_reduce(np.ones(3))

        LocalWorld(2).run(program)
    with pytest.raises(DataError, match=r"all has all steps, .*part steps 2 to 3: message by message"):
        main([str(tmp_path / "all"), str(tmp_path / "part")])


def test_what_is_sent_is_told_with_the_largest_distance(tmp_path: Path, capsys: Any) -> None:
    for name, by in (("a", 1.0), ("c", 1.5)):

        def program(name: str = name, by: float = by) -> None:
            with record(world(), tmp_path / name):
                world().all_reduce(np.ones(3) * by)

        LocalWorld(2).run(program)
    assert main([str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    said = capsys.readouterr().out
    assert "They part at message 1 of rank 0: all_reduce on world" in said
    assert "what is sent differs: max |d| 0.5 at [0]" in said


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_values_are_compared_with_digests_of_values(factor: float, tmp_path: Path, capsys: Any) -> None:
    for name, sent, by in (("values", "values", 1.0), ("digest", "digest", factor)):

        def program(name: str = name, sent: str = sent, by: float = by) -> None:
            with record(world(), tmp_path / name, sent=sent):
                world().all_reduce(np.ones(3) * by)

        LocalWorld(2).run(program)
    assert main([str(tmp_path / "values"), str(tmp_path / "digest")]) == (factor != 1.0)
    assert ("what is sent differs; its values are not recorded in both" in capsys.readouterr().out) == (factor != 1.0)


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of the trainer: two alike, of which one has no digests, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        for name, more in {
            "a": ["--digests", "2"],
            "plain": ["--save-every", "2"],
            "other": ["--lr", "0.01", "--save-every", "2"],
            "other-digests": ["--lr", "0.01", "--digests", "2"],
        }.items():
            train([*TINY, *more, "--run", str(folder / name)])
    return folder


def test_the_command_says_what_differs(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained / "a"), str(trained / "other-digests")]) == 1
    said = capsys.readouterr().out
    assert "settings   lr" in said
    assert "They part at step 1, learning rate" in said
    assert all(len(line) <= 100 for line in said.splitlines() if str(trained) not in line)
    assert main([str(trained / "a"), str(trained / "other-digests"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["digests"]["first"]["what"] == "learning rate"
    assert told["parted"]


def test_runs_without_digests_are_compared_by_metrics_and_checkpoints(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trained / "a"), str(trained / "plain")]) == 0
    assert "No difference beyond 1e-05 in the metrics of 4 steps" in capsys.readouterr().out
    assert main([str(trained / "plain"), str(trained / "other")]) == 1
    said = capsys.readouterr().out
    assert "Their metrics part at step 1: lr" in said
    assert "Their checkpoints part at step 2" in said
    assert main([str(trained / "plain"), str(trained / "plain")]) == 0


@pytest.mark.parametrize("words", ["one", "one --bytes", "--json one two", "one two --tolerance 9"])
def test_a_wrong_command_line_is_refused(words: list[str]) -> None:
    with pytest.raises((ConfigError, DataError)):
        main(words)


def test_a_folder_with_nothing_in_it_is_refused(tmp_path: Path, one_rank: Path) -> None:
    with pytest.raises(DataError, match="nothing can"):
        main([str(tmp_path), str(one_rank)])
    with pytest.raises(DataError, match="is no folder"):
        main([str(one_rank), str(tmp_path / "missing")])


def test_ranks_and_steps_that_are_not_there_are_no_difference(
    one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = case("dp2,zero3")
    run(tmp_path, of, of.layout)
    last = tmp_path / "digests" / "rank-00001.jsonl"
    whole = last.read_bytes()
    last.unlink()
    assert main([str(one_rank), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "digests of 1 of them only" in said
    assert "note     run 2: only ranks 0 have digests" in said
    last.write_bytes(whole[: whole.rindex(b'{"is": "step"')])
    assert main([str(one_rank), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "No difference beyond rounding in step 1." in said
    assert "note     run 2: rank 1 has no digests of step 2" in said


def test_a_file_of_another_rank_is_refused(one_rank: Path, tmp_path: Path) -> None:
    (tmp_path / "digests").mkdir()
    (tmp_path / "digests" / "rank-00001.jsonl").write_bytes((one_rank / "digests" / "rank-00000.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"rank-00001\.jsonl: is the file of rank 0, by its first line"):
        main([str(one_rank), str(tmp_path)])
