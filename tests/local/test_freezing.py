"""Frozen weights on ranks that are threads: any layout is one rank, and what it costs is what was predicted."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_freezing as checks
from checks_layouts import numbers
from kept_state import TEXT
from resume_layouts import Matrix

from mpitrain.autograd.node import Visit
from mpitrain.autograd.tape import Tape
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.models.gpt import GPT
from mpitrain.optim.adam import AdamW
from mpitrain.pipeline.action import row_text
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.train import main


def ranks_of(how: dict[str, Any]) -> int:
    return int(how.get("dp", 1) * how.get("tp", 1) * how.get("cp", 1) * how.get("pp", 1))


def some(cases: Collection[str], default: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", some(checks.LAYOUTS, checks.BY_DEFAULT))
def test_frozen_weights_on_a_layout_are_those_of_one_rank(name: str) -> None:
    """Loss, norm, gradients, weights, moments and evaluation; frozen weights among the weights."""
    LocalWorld(ranks_of(checks.LAYOUTS[name]), timeout=60).run(lambda: checks.equals(world(), name))


@pytest.mark.parametrize("name", some(checks.BOOKS, checks.BOOKS_BY_DEFAULT))
def test_what_is_sent_and_held_is_what_was_predicted(name: str) -> None:
    """To the byte: no gradient of a frozen weight, nothing below the lowest trained one."""
    for check in (checks.sends, checks.holds):
        LocalWorld(ranks_of(checks.BOOKS[name]), timeout=60).run(lambda check=check: check(world(), name))


def executor_of(mesh: Mesh, **how: Any) -> tuple[GPT, Executor]:
    model = GPT(checks.DEEP, mesh, seed=3, **how)
    return model, Executor(model, AdamW(model.shares(), lr=1e-3), mesh, complete("1f1b", ranks=4, microbatches=1))


def test_frozen_stages_have_no_backward_and_nothing_of_an_optimizer() -> None:
    def body() -> tuple[str, int, int, int]:
        mesh = Mesh(world(), pp=4)
        model, executor = executor_of(mesh, freeze=("table", "positions", "blocks.0", "blocks.1"))
        executor.step(next(iter(numbers(checks.DEEP).batches(4, 0, 1, stop_step=1))))
        return row_text(executor.row), model.trains_from, len(executor.optimizer.parameters), executor.bytes_in_flight

    found = LocalWorld(4, timeout=60).run(body)
    assert [row.split("REDUCE")[0].split("COUNT")[1] for row, *_ in found] == [
        "@0 F0@0 SEND_F0@0 ",
        "@1 RECV_F0@1 F0@1 SEND_F0@1 ",
        "@2 RECV_F0@2 F0@2 SEND_F0@2 RECV_B0@2 B0@2 ",
        "@3 RECV_F0@3 F0@3 B0@3 SEND_B0@3 ",
    ]
    assert [numbers[1:] for numbers in (each[:3] for each in found)] == [(2, 0), (2, 0), (2, 12), (2, 15)]
    assert {each[3] for each in found} == {0}


def test_no_tape_holds_a_frozen_weight_that_comes_and_goes() -> None:
    """Nor a view of it, as the head's of a tied table: else whole weights would wait here for backward (zero 3)."""

    def body() -> list[Any]:
        mesh = Mesh(world(), dp=2)
        model = GPT(checks.TIED, mesh, freeze=("table", "*.attention.proj"), zero=3)
        with Tape() as tape:
            model(next(iter(numbers(checks.TIED).batches(4, mesh.dp.rank, 2, stop_step=1))))
        shapes = {p.full_shape for p in model.parameters() if len(p.full_shape) == 2}
        shapes |= {shape[::-1] for shape in shapes}
        saved = [item for node in tape.nodes for item in node.saved or ()]
        assert sum(type(item) is Visit for item in saved) > 8
        return [item.shape for item in saved if getattr(item, "shape", None) in shapes]

    assert LocalWorld(2, timeout=60).run(body) == [[], []]


def test_ranks_that_freeze_different_weights_are_told() -> None:
    def body(patterns: tuple[str, ...]) -> None:
        mesh = Mesh(world(), dp=2)
        model = GPT(checks.DEEP, mesh, freeze=patterns if mesh.dp.rank else ())
        Executor(model, AdamW(model.shares(), lr=1e-3), mesh, complete("1f1b", ranks=1, microbatches=1))

    with pytest.raises(ConfigError, match="rank 1 has frozen other parameters than the ranks beside it"):
        LocalWorld(2, timeout=60).run(body, ("blocks.0",))


def test_a_pattern_may_mean_what_another_stage_holds() -> None:
    def body(pattern: str) -> list[str]:
        mesh = Mesh(world(), pp=2)
        return GPT(checks.DEEP, mesh).freeze(pattern, exchange=mesh.pp.exchange)

    first, last = LocalWorld(2, timeout=60).run(body, "head")
    assert (first, last) == ([], ["head.weight"])
    with pytest.raises(ConfigError, match=r"'hed' means no parameter of the model\.\nNames look like .*head"):
        LocalWorld(2, timeout=60).run(body, "hed")


RING = ("one rank", "dp3, ZeRO 3", "pp3, zb-h1", "offload", "dp2 tp2, sequence parallel", "pp2, interleaved")


@pytest.mark.slow
def test_frozen_weights_are_saved_and_go_on_in_any_layout(tmp_path: Path) -> None:
    """All tensors to the bit, frozen ones too; the next step is that of one rank that never stopped."""
    matrix = Matrix(tmp_path, "frozen", "float64")
    for saves, loads in pairwise((*RING, RING[0])):
        assert matrix.pair(saves, loads) == []
    assert any(name == "weight/table.weight" for name in matrix.reference.states[0].tensors)


def test_a_run_goes_on_with_what_it_has_frozen(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--model", "gpt-tiny", "--batch", "4", "--eval-every", "0", "--sample-length", "0", "--run", str(tmp_path)]
    flags += ["--data", str(tmp_path / "text.txt"), "--steps", "2", "--stop-after", "1"]
    flags += ["--lr-groups", "table.*=0.5"]  # of what is frozen: no mistake
    with redirect_stdout(io.StringIO()) as told:
        LocalWorld(1).run(main, [*flags, "--freeze", "table,blocks.0"])
    assert "frozen       13 of 29 tensors" in told.getvalue()
    with pytest.raises(CheckpointError, match=r"was saved with freeze table,blocks\.0, now it is head"):
        LocalWorld(1).run(main, ["--run", str(tmp_path), "--resume", "latest", "--freeze", "head"])


def test_a_run_whose_frozen_weights_live_elsewhere_is_traced(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--model", "gpt-tiny", "--layers", "1", "--width", "8", "--heads", "2", "--seq-len", "8", "--batch", "1"]
    flags += ["--data", str(tmp_path / "text.txt"), "--steps", "1", "--eval-every", "0", "--sample-length", "0"]
    with redirect_stdout(io.StringIO()) as told:
        LocalWorld(1).run(
            main, [*flags, "--run", str(tmp_path), "--freeze", "table", "--offload", "parameters", "--trace"]
        )
    assert "frozen       1 of" in told.getvalue()


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--freeze table,: an empty pattern"):
        parse(["--freeze", "table,"])
    for patterns in ("head", "*,!head", "head.weight"):
        with pytest.raises(ConfigError, match=r"means no weight here, for with --tied the head is the token table"):
            parse(["--freeze", patterns, "--tied"])
        parse(["--freeze", patterns])
    with pytest.raises(ConfigError, match="--loss-scaling blocks with --freeze"):
        parse(["--freeze", "table", "--loss-scaling", "blocks", "--dtype", "float16"])
