"""`mpitrain verify` on threads: what is recorded, what is found, and what the command says.

Most tests record functions in this process; those of the command start child processes, as users do.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from often import some

import mpitrain.models.decoder
import mpitrain.models.gpt
import mpitrain.parallel.sequence
import mpitrain.parallel.tensor
import mpitrain.pipeline.executor
from mpitrain.autograd import Tensor, ops
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.debug.capture import Record
from mpitrain.errors import ConfigError, LaunchError, NumericsError
from mpitrain.models.mlp import MLP
from mpitrain.nn import init as initial
from mpitrain.nn.module import PRECISION, Module
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Sgd
from mpitrain.optim.adam import AdamW
from mpitrain.parallel.data import FlatReducer, Reducer
from mpitrain.pipeline.action import row_text
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import with_update
from mpitrain.pipeline.schedules import SCHEDULES, compute_rows, one_stage
from mpitrain.pipeline.update import Update
from mpitrain.spec import Spec
from mpitrain.verify import cases, sweep
from mpitrain.verify.command import EXPERTS, _summary, main
from mpitrain.verify.every import all_layouts
from mpitrain.verify.here import record, record_on, replay
from mpitrain.verify.judge import Verdict, judge
from mpitrain.verify.layouts import WAYS, Layout, parse
from mpitrain.verify.proof import Outcome
from mpitrain.verify.report import _several
from mpitrain.verify.suspect import hints

ROOT = Path(__file__).resolve().parents[2]
ONE_RANK = Layout(())


# ---------------------------------------------------------------------------------------------------- a small training


@dataclass(frozen=True)
class Points:
    inputs: np.ndarray
    targets: np.ndarray

    @property
    def count(self) -> int:
        return len(self.targets)

    def split(self, num_microbatches: int) -> list[Points]:
        rows = np.array_split(np.arange(self.count), num_microbatches)
        return [Points(self.inputs[part], self.targets[part]) for part in rows]


def points(step: int, rank: int, size: int) -> Points:
    random = np.random.default_rng(step)
    inputs, targets = random.normal(size=(12, 3)).astype(np.float32), random.integers(4, size=12)
    return Points(inputs[rank::size], targets[rank::size])


class Added(Reducer):
    """A reducer that knows in which order gradients became final."""

    def __init__(self, inner: FlatReducer) -> None:
        self.inner, self.names = inner, []

    def add(self, p: Any) -> None:
        self.names.append(p.name)

    def finish(self) -> None:
        self.inner.finish()


def mlp(steps: int = 3, clip: float = 0.0, keep: list[Any] | None = None, spoil: float = 0.0) -> Executor:
    """Train an MLP on the surrounding world; it asks for float32."""
    mesh = Mesh(world())
    model = MLP((3, 8, 4), mesh, seed=1)
    reducer = Added(FlatReducer(model.flats, mesh))
    executor = Executor(
        model,
        Sgd(model.parameters(), lr=0.1, momentum=0.9),
        mesh,
        with_update(one_stage(2)),
        reducer=reducer,
        clip=clip,
    )
    for step in range(steps):
        if spoil and step == 1:
            model.parameters()[0].data[0, 0] = spoil
        executor.step(points(step, mesh.dp.rank, mesh.dp.size))
        if keep is not None:
            keep.append((reducer.names, [p.data.copy() for p in model.parameters()], executor.report))
    return executor


# ------------------------------------------------------------------------------------------------- what is recorded


def test_a_run_is_recorded_in_float64_and_rank_order_though_the_script_asks_for_neither():
    ((begin, *steps),) = record(1, mlp)
    assert [r.facts["is"] for r in (begin, *steps)] == ["begin", "step", "step", "step"]
    assert all(array.dtype == np.float64 for r in (begin, *steps) for array in r.arrays.values())
    assert begin.arrays["weight"].std() > 0
    seen: list[bool] = []
    record(2, lambda: seen.append(world().deterministic))
    assert seen == [True, True]
    [executor] = LocalWorld(1).run(mlp)
    assert executor.model.parameters()[0].data.dtype == np.float32  # nothing is left behind


def test_recording_changes_no_bit_of_a_run():
    kept: list[Any] = []

    def plain() -> None:
        world().set_deterministic()
        PRECISION.set(np.float64)
        mlp(clip=0.01, keep=kept)

    LocalWorld(1).run(plain)
    ((_, *steps),) = record(1, lambda: mlp(clip=0.01))
    for recorded, (_, weights, report) in zip(steps, kept, strict=True):
        assert recorded.arrays["weight"].tobytes() == b"".join(w.tobytes() for w in weights)
        assert (recorded.facts["loss"], recorded.facts["norm"]) == (report.loss, report.grad_norm)


def test_gradients_are_those_before_clipping():
    ((_, *plain),) = record(1, lambda: mlp(steps=1))
    ((_, *clipped),) = record(1, lambda: mlp(steps=1, clip=0.001))
    assert plain[0].arrays["gradient"].tobytes() == clipped[0].arrays["gradient"].tobytes()
    assert clipped[0].facts["norm"] == pytest.approx(np.linalg.norm(clipped[0].arrays["gradient"]), rel=1e-12)
    assert clipped[0].facts["norm"] > 0.001
    assert not np.array_equal(plain[0].arrays["weight"], clipped[0].arrays["weight"])


class Single(Module):
    """A model of one parameter, whose vector of all slabs is that of one."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__("single")
        self.weight = Parameter("weight", (3, 1), init=initial.ones)
        self.materialize(mesh)

    def forward(self, batch: Points) -> Any:
        return ops.linear(Tensor(batch.inputs), self.weight, None).sum()


def test_what_is_recorded_does_not_change_any_more():
    def train() -> None:
        mesh = Mesh(world())
        model = Single(mesh)
        executor = Executor(model, Sgd(model.parameters(), lr=0.1), mesh, with_update(one_stage(1)), clip=0.001)
        for step in range(2):
            executor.step(points(step, 0, 1))

    ((begin, first, second),) = record(1, train)
    assert begin.arrays["weight"].tolist() == [1.0, 1.0, 1.0]
    for step in (first, second):
        assert np.linalg.norm(step.arrays["gradient"]) == pytest.approx(step.facts["norm"], rel=1e-12)
    assert first.arrays["weight"].tobytes() != second.arrays["weight"].tobytes()


def test_gradients_stand_in_the_order_in_which_backward_makes_them_final():
    kept: list[Any] = []
    ((_, first, *_),) = record(1, lambda: mlp(keep=kept))
    assert first.facts["order"] == kept[0][0][: len(first.facts["order"])]
    assert len(first.facts["order"]) == 6


def test_the_optimizers_state_is_recorded_under_its_own_names():
    ((_, first, *_),) = record(1, mlp)
    assert list(first.arrays) == ["gradient", "weight", "velocity"]
    case = sweep.Case(0, ONE_RANK, 5, {**sweep.case_of(4).options, "optimizer": "adamw"})
    ((_, first, *_),) = record(1, lambda: sweep.train(case, ONE_RANK))
    assert list(first.arrays) == ["gradient", "weight", "first_moment", "second_moment"]


def test_a_run_ends_after_the_steps_that_were_asked_for():
    reached: list[int] = []

    def train() -> None:
        mlp(steps=5)
        reached.append(1)

    for steps, end in ((2, []), (5, []), (6, [1, 1])):
        reached.clear()
        for records in record(2, train, steps):
            assert sum(r.facts["is"] == "step" for r in records) == min(steps, 5)
        assert reached == end


def test_several_executors_are_told_apart_and_their_steps_counted_together():
    def train() -> None:
        mlp(steps=2)
        mlp(steps=2)

    (records,) = record(1, train, steps=3)
    assert [(r.facts["is"], r.facts["executor"], r.facts.get("step")) for r in records] == [
        ("begin", 0, None), ("step", 0, 1), ("step", 0, 2), ("begin", 1, None), ("step", 1, 1),
    ]  # fmt: skip
    assert judge(records, record(3, train, steps=3)).ok


def test_what_a_script_trains_in_a_world_of_its_own_is_not_recorded():
    def train() -> None:
        LocalWorld(1).run(mlp)
        mlp()
        LocalWorld(2).run(mlp)

    for records in record(2, train):
        assert [r.facts["is"] for r in records] == ["begin", "step", "step", "step"]
        assert records[0].facts["sizes"]["edp"] == 2


def test_a_step_that_is_cut_short_leaves_its_gradient_and_its_loss():
    kept: list[list[Record]] = [[]]
    with pytest.raises(NumericsError):
        record_on(kept, lambda: mlp(spoil=np.nan))
    *_, last = kept[0]
    assert last.facts["step"] == 2
    assert np.isnan(last.facts["loss"])
    assert list(last.arrays) == ["gradient"]
    assert np.isnan(last.arrays["gradient"]).any()


# -------------------------------------------------------------------------------------------- layouts, and their faults

MODEL = {"layers": 1, "width": 16, "heads": 4, "seq_len": 8, "batch": 8, "microbatches": 2, "dropout": 0.1, "lr": 1e-3}


def prove(layout: str, **options: Any) -> tuple[Verdict, dict[str, str]]:
    """A GPT in a layout against one rank; the verdict, and the hints if it differs."""
    case = sweep.Case(3, parse(layout), 17, {**MODEL, **options})
    alone = record(1, lambda: sweep.train(case, ONE_RANK))[0]
    tried: dict[Layout, Verdict] = {}

    def verdict_of(some: Layout) -> Verdict:
        if some not in tried:
            tried[some] = judge(alone, record(some.ranks, lambda: sweep.train(case, some)))
        return tried[some]

    verdict = verdict_of(case.layout)
    if verdict.first is None:
        return verdict, {}
    parts = [(part, "equal" if verdict_of(part).ok else "differs") for part in case.layout.parts()]
    return verdict, {hint.label: hint.text for hint in hints(verdict.first, case.layout, parts)}


WITHOUT_STAGES = [str(layout) for n in (3, 4) for layout in all_layouts(n) if not layout.schedule]


@pytest.mark.parametrize("layout", some(WITHOUT_STAGES, 5))
def test_every_layout_of_three_and_four_ranks_is_equal(layout):
    options = {"heads": 3, "width": 12, "seq_len": 18, "batch": 12} if parse(layout).ranks == 3 else {}
    if parse(layout).spreads_experts:
        options |= {"experts": 12, "top_k": 2, "capacity_factor": 1.0, "z_loss": 0.01, "jitter": 0.1}
    verdict, _ = prove(layout, tied=parse(layout).ranks == 3, **options)
    assert verdict.ok, verdict.first
    assert verdict.worst()[0].share < 0.01  # so far below its bound that any fault would stand out


PIPELINES = [
    *[f"pp2,{name}" for name, kind in SCHEDULES.items() if kind.versions is None],
    *("pp4", "pp2,dp2,zb-h1", "pp2,tp2,sp,interleaved,v2", "pp2,cp2,ulysses,gpipe", "pp2,tp2,terapipe,s3"),
]


@pytest.mark.parametrize("layout", some(PIPELINES))
def test_a_pipeline_is_equal_with_every_schedule(layout):
    verdict, _ = prove(layout, layers=4, tied=True)
    assert verdict.ok, verdict.first
    assert verdict.worst()[0].share < 0.01


STALE = ["pp2,pipedream", "pp3,pipedream", "pp2,dp2,tp2,pipedream", "pp2,pipedream-2bw", "pp2,tp2,pipedream-2bw"]


def stale(layout: str, **options: Any) -> tuple[list[list[Record]], list[Record], list[Record]]:
    """What a pipeline that never drains has recorded, its replay, and plain training on one rank."""
    whole = parse(layout).schedule == "pipedream"
    how = {"layers": 3, "batch": 12, "microbatches": 1, "clip": 0.0} if whole else {"layers": 2, "tied": True}
    case = sweep.Case(3, parse(layout), 17, {**MODEL, **how, **options})
    kept = record(case.layout.ranks, lambda: sweep.train(case, case.layout))
    plain = record(1, lambda: sweep.train(case, ONE_RANK))[0]
    return kept, replay(case.layout.schedule, kept, lambda: sweep.train(case, ONE_RANK)), plain


@pytest.mark.parametrize("layout", some(STALE, 2))
def test_a_pipeline_that_never_drains_is_equal_to_its_replay_and_not_to_plain_training(layout):
    """T8.3, T8.4."""
    kept, again, plain = stale(layout)
    verdict = judge(again, kept)
    assert verdict.ok, verdict.first
    assert verdict.steps == sum(cases.STALE_ROWS)
    assert verdict.worst()[0].share < 0.01
    assert not judge(plain, kept).ok
    assert {facts["batch"] for facts, _ in again[1:]} == {0}
    assert [facts["batch"] for facts, _ in kept[0][1:]] == [0, 1, 2, 3, 0, 1]


def test_a_replay_leaves_a_run_alone_where_nothing_is_late():
    kept = record(2, lambda: mlp(steps=3))
    assert judge(replay("pipedream", kept, lambda: mlp(steps=3)), kept).ok


def test_a_replay_of_other_micro_batches_is_refused():
    kept = record(1, lambda: mlp(steps=3))
    for each in kept[0][1:]:
        each.facts["compute"] = "F0@0 B0@0"
    with pytest.raises(ConfigError, match="makes step after step of 1 micro-batches,\nbut here it makes steps of 2"):
        replay("pipedream", kept, lambda: mlp(steps=3))


def test_steps_that_overlap_are_recorded_with_their_numbers_and_end_with_their_row():
    case = sweep.Case(3, parse("pp2,pipedream"), 17, {**MODEL, "microbatches": 1, "clip": 0.0})
    for steps, made in ((1, 4), (4, 4), (5, 6)):
        for begin, *records in record(2, lambda: sweep.train(case, case.layout), steps):
            assert [facts["step"] for facts, _ in records] == list(range(1, made + 1))
            assert all(facts["loss"] > 0 and facts["updates"] == facts["step"] for facts, _ in records)
            last = begin.facts["coords"]["pp"] == 1
            losses = [facts["own loss"] / facts["targets"] for facts, _ in records]
            assert losses == [facts["loss"] if last else 0.0 for facts, _ in records]


@pytest.mark.parametrize("stage_layers", ["0,2,0", "2,0,0", "0,0,2", "1,0,1"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_without_a_block_are_equal_and_hold_nothing(stage_layers, tied):
    """C46.  A stage in the middle has no parameter, no gradient and no optimizer state at all."""
    how = {"layers": 2, "tied": tied, "stage_layers": stage_layers, "batch": 6, "clip": 0.1}
    verdict, _ = prove("pp3", **how)
    assert verdict.ok, verdict.first
    case = sweep.Case(3, parse("pp3"), 17, {**MODEL, **how})
    records = record(3, lambda: sweep.train(case, case.layout))
    empty = [rank for rank, blocks in enumerate(stage_layers.split(",")) if blocks == "0"]
    assert [not each[0].facts["parameters"] for each in records] == [rank == 1 and 1 in empty for rank in range(3)]
    assert [each[1].facts["own loss"] != 0 for each in records] == [False, False, True]
    names = [[name for name, *_ in each[0].facts["parameters"]] for each in records]
    assert ("table.weight" in names[2]) == tied


@pytest.mark.parametrize("layout", some(PIPELINES))
def test_the_order_of_the_computations_is_recorded(layout):
    case = sweep.Case(3, parse(layout), 17, {**MODEL, "layers": 4})
    records = record(case.layout.ranks, lambda: sweep.train(case, case.layout))
    counts, pp = dict(case.layout.counts), case.layout.sizes["pp"]
    chunks, slices = counts.get("v", 2), counts.get("s", 4)
    name = case.layout.schedule or "1f1b"
    rows = compute_rows(
        name,
        ranks=pp,
        microbatches=2,
        chunks=chunks if name == "interleaved" else 1,
        slices=slices if name == "terapipe" else 1,
    )
    for begin, first, second in records:
        expected = row_text(rows[begin.facts["coords"]["pp"]])
        assert first.facts["compute"] == second.facts["compute"] == expected


def test_a_tied_gradient_that_is_not_summed_over_the_ends_is_found(monkeypatch):
    """C44."""
    monkeypatch.setattr(mpitrain.pipeline.executor, "sum_over_ends", lambda parameters, mesh, done: None)
    verdict, found = prove("pp2,dp2", tied=True, layers=2)
    assert (verdict.first.step, verdict.first.what) == (1, "gradient of table.weight")
    assert found["alone"] == "pp2 differs, dp2 equal"
    assert found["replicas"].endswith("along pp (the two stages that share it)")
    assert found["suspect"] == "pp"


def test_a_norm_of_each_stage_is_found(monkeypatch):
    """C28."""
    whole = Update._agree

    def own(self, *of_step):
        squares = self._measure([1.0])[1]
        self.report = replace(whole(self, *of_step), grad_norm=math.sqrt(squares))
        return self.report

    monkeypatch.setattr(Update, "_agree", own)
    verdict, _ = prove("pp2", layers=2, clip=0.01)
    assert verdict.first.what == "norm"
    assert "rank 0 reports" in verdict.first.problem


def test_noise_in_a_keys_bias_is_no_difference_however_small_the_rate():
    """Without clipping AdamW moves a key's bias by more than its bound, in every layout by other noise."""
    verdict, _ = prove("cp4,ring", clip=0.0, lr=1e-4, kv_heads=1)
    assert verdict.ok, verdict.first
    assert verdict.moved.number > 0
    assert verdict.moved.error > 0


def after_finish(then):
    """A FlatReducer that does one thing more, or another."""
    whole = FlatReducer.finish

    def finish(self):
        then(self, whole)

    return finish


def doubled(self, whole):
    whole(self)
    for flat, axis in self._work:
        if "tp" not in flat.axes or axis.size > 1:
            flat.grads *= axis.size


def averaged(self, whole):
    whole(self)
    for flat, axis in self._work:
        flat.grads /= axis.size


def not_summed(self, whole):
    for flat, _ in self._work:
        for p in flat.parameters:
            p.settle()


@pytest.mark.parametrize("layout", ["dp2", "dp2,tp2"])
@pytest.mark.parametrize(
    ("fault", "how"),
    [
        (doubled, "2 times the value everywhere: doubled over an axis of size 2"),
        (averaged, "1/2 of the value everywhere: not summed, or averaged"),
        (not_summed, "other factors elsewhere"),
    ],
)
def test_a_wrong_sum_of_gradients_is_found_where_it_happens(monkeypatch, layout, fault, how):
    monkeypatch.setattr(FlatReducer, "finish", after_finish(fault))
    verdict, found = prove(layout)
    assert (verdict.first.step, verdict.first.what) == (1, "gradient of head.weight")  # which backward finishes first
    assert how in found["how"]
    assert found["suspect"] == "dp"
    assert ("along dp" in found.get("replicas", "")) == (fault is not_summed)


def test_a_product_that_is_not_summed_over_tp_is_found_in_the_loss(monkeypatch):
    monkeypatch.setattr(mpitrain.parallel.tensor, "leave", lambda y, axis, sequence_parallel: y)
    verdict, found = prove("dp2,tp2")
    assert verdict.first.kind in ("loss before it is summed", "loss")
    assert found["alone"] == "dp2 equal, tp2 differs"
    assert found["suspect"] == "tp"


def test_an_input_whose_gradient_is_not_summed_over_tp_is_found_in_the_gradients(monkeypatch):
    monkeypatch.setattr(mpitrain.parallel.tensor, "enter", lambda x, axis, sequence_parallel: x)
    verdict, found = prove("tp2")
    assert verdict.first.kind == "gradient"
    assert verdict.first.name == "blocks.0.attention.proj.bias"  # of the op in front of the up-projection
    assert found["suspect"] == "tp"


def test_norms_whose_gradients_are_not_summed_with_sequence_parallelism_are_found(monkeypatch):
    """C39."""
    monkeypatch.setattr(mpitrain.models.decoder, "between", lambda sequence_parallel: Spec(None))
    verdict, found = prove("dp2,tp2,sp")
    assert (verdict.first.step, verdict.first.kind) == (1, "gradient")
    assert found["alone"] == "dp2 equal, tp2 equal, tp2,sp differs"
    assert found["suspect"] == "tp2,sp"


def test_parameters_that_are_counted_on_every_rank_are_found_in_the_norm(monkeypatch):
    """C29."""
    monkeypatch.setattr(Update, "_counts", lambda self, p: True)
    verdict, found = prove("dp2")
    assert (verdict.first.step, verdict.first.kind) == (1, "norm")
    assert "everything counted 2 times over an axis of size 2 (dp)" in found["how"]


def test_targets_that_are_counted_on_one_rank_only_are_found_first(monkeypatch):
    """C24."""

    class Deaf:
        def all_reduce(self, x):
            return x

    whole = Executor.__init__

    def init(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        self._axis = Deaf()

    monkeypatch.setattr(Executor, "__init__", init)
    verdict, found = prove("dp2,tp2")
    assert (verdict.first.step, verdict.first.kind) == (1, "targets")
    assert found["suspect"] == "dp"


def test_a_replica_whose_optimizer_drifts_in_the_last_digit_is_found(monkeypatch):
    whole = AdamW.step

    def step(self, lr=None):
        whole(self, lr)
        if world().rank == world().size - 1 > 0 and self.updates == 2:
            self.parameters[-1].data.reshape(-1)[0] *= 1 + 2.0**-52

    monkeypatch.setattr(AdamW, "step", step)
    verdict, found = prove("dp2")
    assert (verdict.first.step, verdict.first.kind) == (2, "weight")
    assert "along dp" in found["replicas"]
    assert found["suspect"] == "dp"


def test_a_state_that_an_optimizer_spoils_on_one_rank_is_found_though_weights_do_not_show_it_yet(monkeypatch):
    whole = AdamW.step

    def step(self, lr=None):
        whole(self, lr)
        if world().rank == 1 and self.updates == len(cases.ROWS):
            self._state["second_moment"][0] *= 1.5

    monkeypatch.setattr(AdamW, "step", step)
    verdict, _ = prove("tp2")
    assert (verdict.first.step, verdict.first.kind, verdict.first.ranks or verdict.first.split.ranks) == (
        len(cases.ROWS),
        "second_moment",
        (1,) if not verdict.first.split else (0, 1),
    )


def test_weights_that_start_from_other_numbers_are_found_before_the_first_step(monkeypatch):
    whole = mpitrain.models.gpt.GPT.materialize

    def materialize(self, mesh, seed=0, *others, **more):
        whole(self, mesh, seed + mesh.coords["tp"], *others, **more)

    monkeypatch.setattr(mpitrain.models.gpt.GPT, "materialize", materialize)
    verdict, found = prove("dp2,tp2")
    assert verdict.first.kind == "initial weight"
    assert found["suspect"] == "tp"


# --------------------------------------------------------------------------------------------------------------- sweep


def test_a_case_is_a_pure_function_of_its_seed_and_cases_differ():
    drawn = [sweep.case_of(seed) for seed in range(150)]
    assert [sweep.case_of(seed) for seed in range(150)] == drawn
    more = ("stage_layers", "balance")
    for name in (
        "tied",
        "gelu",
        "dropout",
        "optimizer",
        "clip",
        "reducer",
        "microbatches",
        "kv_heads",
        "layers",
        *more,
    ):
        assert len({case.options[name] for case in drawn}) > 1, name
    assert {1, 2, 3, 4, 5, 6, 7, 8} <= {case.layout.ranks for case in drawn}
    assert {way for case in drawn for way in case.layout.ways} == {
        word for word, way in WAYS.items() if way.axis or way.over
    }
    assert {case.options["recompute"] for case in drawn} == {"none", "selective", "full"}
    assert {case.options["recompute_modules"] for case in drawn} == {
        None, *cases.PARTS, *cases.OF_EXPERTS
    }  # fmt: skip
    assert {case.options["loss_scaling"] for case in drawn} == {None, "dynamic", "static", "blocks"}
    groups = {case.options["lr_groups"] for case in drawn}
    assert groups == {None, *cases.LR_GROUPS, cases.LR_GROUPS[0].replace("*.bias", "*.proj.*")}  # a llama has no bias
    assert {case.options.get("model") for case in drawn} == {None, "llama-tiny"}
    assert {case.options["window"] for case in drawn} >= {None, 2, 3, 7}
    assert {case.options.get("freeze") for case in drawn} == {None, *cases.FREEZES}
    assert {letter for case in drawn for letter, _ in case.layout.counts} == {"v", "s"}
    assert any("0" in (case.options["stage_layers"] or "").split(",") for case in drawn)
    assert any(case.options["microbatches"] < case.layout.sizes.get("pp", 1) for case in drawn)
    assert len({case.vocab for case in drawn}) > 3
    routed = [case for case in drawn if "experts" in case.options]
    assert len(drawn) / 3 < len(routed) < 2 * len(drawn) / 3
    for name in ("experts", "top_k", "router", "capacity_factor", "renormalize", "moe_every", "z_loss", "jitter"):
        assert len({case.options[name] for case in routed}) > 1, name
    assert {case.options["balance_loss"] for case in routed} == {0.0, 0.01, 1.0, None}
    assert {case.layout.sizes.get("ep", 1) for case in routed} >= {1, 2, 3, 4}
    assert any(case.layout.schedule == "terapipe" for case in routed)


def test_random_cases_are_equal_to_one_rank(capsys, tmp_path):
    path = tmp_path / "sweep.json"
    assert main(["--sweep", "6", "--seed", "100", "--json", str(path)]) == 0
    *_, last = capsys.readouterr().out.splitlines()  # on a slow machine behind lines of progress
    assert last.startswith("6 of 6 cases (seeds 100 to 105) are equal to one rank, 0 failed;")
    found = json.loads(path.read_text())
    assert (found["cases"], found["seed"], found["failed"]) == (6, 100, [])


def test_a_failing_case_is_repeated_by_the_command_that_is_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(FlatReducer, "finish", after_finish(doubled))
    path = tmp_path / "sweep.json"
    seeds = [seed for seed in range(200) if sweep.case_of(seed).layout.sizes.get("dp", 1) > 1]
    whole = [s for s in seeds if not cases.ZERO & {*sweep.case_of(s).layout.ways}]
    broken = next(s for s in whole if sweep.case_of(s).options["reducer"] == "flat")
    assert main(["--sweep", "1", "--seed", str(broken), "--json", str(path)]) == 1
    text = capsys.readouterr().out
    assert f"repeat    mpitrain verify --sweep 1 --seed {broken}\n" in text
    assert "0 of 1 cases" in text
    (failed,) = json.loads(path.read_text())["failed"]
    assert failed["seed"] == broken


def test_a_case_in_which_a_rank_raises_fails_and_the_sweep_goes_on(capsys):
    def train(case, layout):
        if layout.ranks > 1 and world().rank == 1:
            raise ConfigError("this was not to be refused")
        sweep.train(case, layout)

    many = next(seed for seed in range(20) if sweep.case_of(seed).layout.ranks > 1)
    assert sweep.main(2, many, train=train) == 1
    assert "ConfigError: this was not to be refused" in capsys.readouterr().out

    def never(case, layout):
        raise ConfigError("not even on one rank")

    assert sweep.main(1, many, train=never) == 1
    assert "on one rank already: ConfigError: not even on one rank" in capsys.readouterr().out

    def nothing(case, layout):
        pass

    assert sweep.main(1, many, train=nothing) == 1


# ---------------------------------------------------------------------------------------------------------- the command

SCRIPT = '''
"""A script of a user; its first word says what is wrong with it."""
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import beside  # a module in the script's own folder
import mpitrain.parallel.tensor
from mpitrain.errors import ConfigError, StateError
from mpitrain import AdamW, Executor, GPT, GPTConfig, Mesh, Tokens, load, world
from mpitrain.pipeline.partition import balance
from mpitrain.pipeline.passes import complete


@dataclass
class Layout:
    pp: int = 1
    chunks: int = 2
    slices: int = 4
    schedule: str = "1f1b"
    recompute: str = ""
    dp: "int | None" = None
    ep: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0


how, *flags = sys.argv[1:]
assert __name__ == "__main__" and beside.NAME == "beside" and __file__ == sys.argv[0]
layout = Layout()
ways = [flag for flag in flags if flag in ("--sequence-parallel", "--cp-attention", "ring", "ulysses", "rsa")]
flags = [flag for flag in flags if flag not in ways]
sequence_parallel = "--sequence-parallel" in ways and how != "deaf to ways"
kind = ways[-1] if ways and ways[-1][:2] != "--" and how != "deaf to ways" else "ring"
for flag, value in zip(flags[::2], flags[1::2]):
    if how == "takes none" or (how == "dp only" and flag != "--dp"):
        print("usage: script.py\\nscript.py: error: unrecognized arguments:", flag, value, file=sys.stderr)
        sys.exit(2)
    of_ways = "--schedule", "--chunks", "--slices", "--recompute", "--zero"
    if how != "deaf" and not (how == "deaf to ways" and flag in of_ways):
        setattr(layout, flag.removeprefix("--"), value if flag in ("--schedule", "--recompute") else int(value))
here = world()
mesh = Mesh(here, pp=layout.pp, dp=layout.dp, ep=layout.ep, cp=layout.cp, tp=layout.tp)
print("a word of the script")
if how == "no step":
    sys.exit()
if how == "broken":
    raise ValueError("always broken")
if here.size > 1:
    if how == "dies" and here.rank == 1:
        raise RuntimeError("it broke on rank 1")
    if how == "hangs":
        open("it hangs", "w").close()
        time.sleep(60)
    if how == "breaks a rule":
        raise StateError("a rule of ours is broken")
tokens = Tokens(load("text.txt"), seq_len=8)
shape = GPTConfig(layers=1, width=16, heads=2, seq_len=8)
chunks = layout.chunks if layout.schedule == "interleaved" and layout.pp > 1 else 1
slices = [8 // layout.slices] * layout.slices if layout.schedule == "terapipe" and layout.pp > 1 else [8]
partition = balance([1.0], layout.pp * chunks)
model = GPT(
    shape, mesh, seed=1, partition=partition, sequence_parallel=sequence_parallel, cp_attention=kind,
    keep_scores=layout.recompute == "none", zero=min(layout.zero, 1) if how == "state only" else layout.zero,
)
for block in model.blocks:
    block.recompute = layout.recompute == "full"
rows = complete(layout.schedule, ranks=layout.pp, microbatches=2, chunks=chunks, slices=len(slices))
if how == "another order" and layout.pp > 1:
    rows = complete("gpipe", ranks=layout.pp, microbatches=2)
executor = Executor(
    model, AdamW(model.shares(), lr=1e-3), mesh, rows, clip=1.0, slices=slices if len(slices) > 1 else None
)
finish = executor.reducer.finish
def twice():
    finish()
    for flat in model.flats:
        flat.grads *= mesh.dp.size
if how == "doubles":
    executor.reducer.finish = twice
if how == "sums nothing" and mesh.tp.size > 1:
    mpitrain.parallel.tensor.leave = lambda y, axis, sequence_parallel: y
rank, size = (0, 1) if how == "same rows" else (mesh.dp.rank, mesh.dp.size)
stop = 50 - 48 * (how == "short" and here.size > 1)
for batch in tokens.batches(8, rank, size, stop_step=stop, positions=model.positions_here):
    if how == "refuses late" and here.size > 1 and batch.step == 1:
        raise ConfigError("not on a Sunday")
    if how == "nan" and here.size > 1 and batch.step == 1:
        model.parameters()[0].data[:] = np.nan
    executor.step(batch)
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder with the script, a module and a text beside it; the current folder is that of the text."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "script.py").write_text(SCRIPT)
    (tmp_path / "code" / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "text.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(200)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return "code/script.py"


def named(*layouts):
    """`--layout dp2 --layout tp2`, as words."""
    return [word for layout in layouts for word in ("--layout", layout)]


def test_a_script_is_proven_in_layouts_and_its_words_are_swallowed(script, capsys, tmp_path):
    path = tmp_path / "found.json"
    assert main(["--layout", "dp2", "--layout=dp2,tp2", "--json", str(path), script, "good"]) == 0
    said = capsys.readouterr()
    kinds = "gradients, weights, first moments, second moments"
    assert said.out.startswith(f"one rank: 4 steps of 17 tensors ({kinds}), loss ")
    assert [line.split()[:2] for line in said.out.splitlines()[1:3]] == [["dp2", "equal"], ["dp2,tp2", "equal"]]
    assert "2 layouts: 2 equal" in said.out
    assert "a word of the script" not in said.out + said.err
    found = json.loads(path.read_text())
    assert found["command"] == [script, "good"]
    assert (found["steps"], len(found["losses"]), found["exit_code"]) == (4, 4, 0)
    second = found["layouts"][1]
    assert (second["layout"], second["ranks"], second["flags"]) == ("dp2,tp2", 4, ["--dp", "2", "--tp", "2"])
    assert (second["outcome"], second["first"], second["steps"]) == ("equal", None, 4)
    assert second["compared"] == 17 + 4 * (7 + 4 * 17)
    worst = second["worst"][0]
    assert 0 < worst["error"] < worst["allowed"]
    assert worst["equal"]
    assert worst["why"].startswith("1e-10 x")


def test_a_proof_of_halves_says_once_that_it_is_in_double_precision(capsys):
    assert main(["--layout", "dp2", "--first", "1", "--", "--dtype", "float16", "--layers", "1", "--batch", "8"]) == 0
    assert capsys.readouterr().out.count("; proved in float64, not float16\n") == 1


def test_a_script_that_is_wrong_gets_a_table_a_place_and_a_suspect(script, capsys, tmp_path):
    path = tmp_path / "found.json"
    assert main(["--layout", "dp2,tp2", "--first", "2", "--json", str(path), script, "doubles"]) == 1
    text = capsys.readouterr().out
    assert "dp2,tp2  DIFFERS" in text
    assert "first at step 1, gradient of head.weight" in text
    assert "doubled over an axis of size 2 (dp or tp)" in text
    assert "alone     dp2 differs, tp2 equal" in text
    assert "suspect   dp\n" in text
    rows = text[text.index("why so much is allowed") :].splitlines()[1:9]
    assert all("x" in row for row in rows)
    shares = [float(row.split()[2]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    found = json.loads(path.read_text())["layouts"][0]
    assert found["first"] | {"error": 0, "allowed": 0, "at": 0, "ratio": 0, "why": 0} == {
        "step": 1, "kind": "gradient", "name": "head.weight", "equal": False, "problem": "", "ranks": [], "axes": [],
        "error": 0, "allowed": 0, "ratio": 0, "factor": pytest.approx(2.0), "at": 0, "why": 0,
    }  # fmt: skip
    assert found["outcome"] == "differs"
    assert found["hints"][-1] == {"label": "suspect", "text": "dp", "axes": []}


def test_a_layout_that_becomes_nan_fails_with_the_place(script, capsys):
    assert main(["--layout", "dp2", script, "nan"]) == 1
    text = capsys.readouterr().out
    assert "dp2  FAILED" in text
    assert "NumericsError: after 1 updates the loss is nan" in text
    assert "first     step 2, loss\n" in text
    assert "not a number" in text


def test_a_rank_that_dies_and_one_that_hangs_fail_and_the_others_are_still_judged(script, capsys, tmp_path):
    assert main(["--layout", "dp2", script, "dies"]) == 1
    text = capsys.readouterr().out
    assert "ended with exit code 1: RuntimeError: it broke on rank 1" in text
    assert "  | Traceback (most recent call last):" in text
    began = time.monotonic()
    path = tmp_path / "found.json"
    assert main(["--layout", "dp2", "--timeout", "2", "--json", str(path), script, "hangs"]) == 1
    assert time.monotonic() - began < 20
    assert "did not end within 2 s" in capsys.readouterr().out
    assert json.loads(path.read_text())["layouts"][0]["outcome"] == "failed"


def test_a_layout_that_makes_fewer_steps_differs(script, capsys):
    assert main(["--layout", "dp2", script, "short"]) == 1
    text = capsys.readouterr().out
    assert "dp2  DIFFERS" in text
    assert text.count("the layout ended before the end of step 3") == 3  # its line, the first hint, the table
    assert "first     the layout ended before the end of step 3\n" in text


@pytest.fixture
def two_of_all(monkeypatch):
    """`--all 2` stands for two of its layouts here: each is a child process."""
    two = [parse(words) for words in ("dp2", "tp2,sp")]
    assert set(two) <= {*all_layouts(2)}
    monkeypatch.setattr("mpitrain.verify.command.all_layouts", lambda ranks: two)


@pytest.mark.usefixtures("two_of_all")
def test_flags_that_a_script_refuses_are_shown_once_and_are_no_proof(script, capsys):
    assert main(["--layout", "dp2", "--layout", "tp2", script, "dp only"]) == 2
    text = capsys.readouterr().out
    assert "tp2  refused" in text
    assert "tp2 was refused by the script:\nunrecognized arguments: --tp 2" in text
    assert "2 layouts: 1 equal, 1 refused" in text
    # in a list of all layouts a refusal is no failure, as long as anything is proven
    assert main(["--all", "2", script, "dp only"]) == 0
    assert main(["--layout", "tp2", script, "dp only"]) == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [("breaks a rule", "StateError: a rule of ours is broken"), ("refuses late", "ConfigError: not on a Sunday")],
)
def test_what_is_no_refusal_before_the_first_step_is_a_failure(script, capsys, how, said):
    assert main(["--layout", "dp2", "--layout", "tp2,sp", "--at-once", "1", script, how]) == 1
    text = capsys.readouterr().out
    assert "dp2     FAILED" in text
    assert f"ended with exit code 2: {said}" in text


@pytest.mark.usefixtures("two_of_all")
def test_layouts_that_are_all_refused_prove_nothing(script, capsys):
    assert main(["--all", "2", script, "takes none"]) == 2
    assert "2 layouts: 2 refused.  Nothing was proven." in capsys.readouterr().out


def test_the_last_line_counts_in_english():
    def said(*words):
        return _summary([Outcome(parse("dp2"), word, 0.0) for word in words])

    assert said("differs", "differs") == "2 layouts: 2 differ"
    assert said("differs", "equal") == "2 layouts: 1 equal, 1 differs"
    assert [_several(kind) for kind in ("first_moment", "velocity", "weight")] == [
        "first moments",
        "velocities",
        "weights",
    ]


def test_flags_that_a_script_does_not_obey_are_no_proof(script, capsys):
    assert main([*named("tp2", "pp2,zb-h1", "dp2"), script, "deaf"]) == 2
    text = capsys.readouterr().out
    assert "tp2 was refused by the script:\nthe script did not obey --tp 2: its mesh was dp 2\n" in text
    assert "the script did not obey --pp 2 --schedule zb-h1: its mesh was dp 2\n" in text
    assert "3 layouts: 1 equal, 2 refused" in text  # dp2 is what it does by itself


def test_an_axis_of_experts_is_no_proof_of_a_model_that_has_none_or_of_a_mesh_without_it(script, capsys):
    assert main([*named("dp2,ep2"), "--first", "1", script, "good"]) == 2
    assert "the script did not obey --ep: it called no all_to_all or send_off over ep\n" in capsys.readouterr().out
    assert main([*named("dp2,ep2"), "--first", "1", script, "deaf"]) == 2
    assert "the script did not obey --dp 2 --ep 2: its mesh was dp 2\n" in capsys.readouterr().out


def test_layouts_that_spread_experts_are_held_against_one_rank_with_experts(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "found.json"
    layouts = named("dp2", "dp2,ep2", "dp2,ep2,full")
    assert main([*layouts, "--first", "2", "--json", str(path), "--", "--layers", "1", "--batch", "8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("one rank: 2 steps of 17 tensors")
    assert f"one rank with {' '.join(EXPERTS)}: 2 steps of 16 tensors" in text
    assert "3 layouts: 3 equal" in text
    first, second, _ = json.loads(path.read_text())["layouts"]
    assert first["flags"] == ["--dp", "2"]
    assert second["flags"] == [*EXPERTS, "--dp", "2", "--ep", "2"]
    assert {"choices", "balance loss", "z-loss"} <= {finding["kind"] for finding in second["worst"]}


def test_experts_of_ones_own_are_proven_as_they_are_and_a_way_of_theirs_too(capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["--layers", "1", "--batch", "8", "--experts", "4", "--dropless"]
    assert main([*named("dp2,ep2,overlap"), "--first", "1", "--", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("one rank: 1 steps of 16 tensors")
    assert "dp2,ep2,overlap  equal" in text
    assert main([*named("dp2,ep2,overlap"), "--", "--layers", "1", "--batch", "8", "--experts", "2"]) == 2
    assert "ConfigError: --expert-overlap with --experts 2 and --ep 2" in capsys.readouterr().out


def test_a_way_that_a_script_does_not_obey_is_no_proof(script, capsys):
    said = {
        "tp2,sp": "--sequence-parallel: it called no all_gather or reduce_scatter over tp",
        "cp2,ulysses": "--cp-attention ulysses: it called no all_to_all over cp",
        "cp2,rsa": "--cp-attention rsa: it called no rsa_attention over cp",
        "pp2,zb-h1": "--schedule zb-h1: rank 0 of pp computed F0@0 F1@0 B0@0 B1@0, not F0@0 F1@0 B0@0 W0@0 B1@0 W1@0",
        "pp2,gpipe": "--schedule gpipe: rank 0 of pp computed F0@0 F1@0 B0@0 B1@0, not F0@0 F1@0 B1@0 B0@0",
        "pp2,interleaved": "--schedule interleaved: its stages a rank were 1",
        "pp2,terapipe,s2": "--schedule terapipe --slices 2: its slices a sequence were 1",
        "dp2,full": "--recompute full: no step was seen in which blocks are made again in backward",
        "none": "--recompute none: no step was seen in which attention keeps its scores",
    }
    assert main([*named(*said), "--first", "1", script, "deaf to ways"]) == 2
    text = capsys.readouterr().out
    assert "9 layouts: 9 refused" in text
    for layout, why in said.items():
        assert f"{layout} was refused by the script:\nthe script did not obey {why}\n" in text


def test_a_way_is_asked_for_only_where_its_axis_has_ranks_and_a_step_was_made(script, capsys):
    layouts = ("dp2,tp1,sp", "cp2,ring", "pp1,dp2,zb-h1", "pp2", "pp2,1f1b")
    assert main([*named(*layouts), "--first", "1", script, "deaf to ways"]) == 0
    capsys.readouterr()
    assert main(["--layout", "tp2,sp", script, "dies"]) == 1
    assert "tp2,sp  FAILED" in capsys.readouterr().out


def test_a_script_that_takes_stages_and_schedules_is_proven_and_one_that_has_other_rows_is_not(script, capsys):
    layouts = ("pp2,interleaved,v3,none", "pp2,terapipe,s2", "pp2,dp2,zb-h1,full")
    assert main([*named(*layouts), script, "good"]) == 0
    assert "3 layouts: 3 equal" in capsys.readouterr().out
    assert main(["--layout", "pp2,1f1b", script, "another order"]) == 2
    assert "the script did not obey --schedule 1f1b: rank 0 of pp computed F0@0 F1@0 B1@0" in capsys.readouterr().out


def test_a_pipeline_that_drains_after_every_step_is_no_proof_of_one_that_never_does(script, capsys):
    """This script makes one step at a time, whatever its schedule is called."""
    assert main(["--layout", "pp2,pipedream-2bw", script, "good"]) == 2
    said = "the script did not obey --schedule pipedream-2bw: no two of its steps overlapped (executor.run takes"
    assert said in capsys.readouterr().out


def test_the_trainer_is_proven_against_its_replay(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "found.json"
    words = ["--layout", "pp2,pipedream-2bw", "--layout", "pp2,dp2,pipedream", "--json", str(path)]
    assert main([*words, "--", "--layers", "2", "--clip", "1", "--microbatches", "2", "--eval-every", "3"]) == 2
    text = capsys.readouterr().out
    assert "pp2,pipedream-2bw  equal " in text
    assert ", against its replay\n" in text
    assert "--schedule pipedream updates after every batch, which is not cut: --microbatches 2 must be 1." in text
    first, second = json.loads(path.read_text())["layouts"]
    assert (first["outcome"], first["steps"], second["outcome"]) == ("equal", 6, "refused")  # two rows of three
    assert first["replay"]


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_a_script_whose_optimizer_is_over_the_shares_is_proven_with_zero(script, capsys, zero):
    assert main(["--first", "2", *named(f"dp2,{zero}", f"dp2,tp2,sp,{zero}", f"pp2,{zero}"), script, "good"]) == 0
    assert "3 layouts: 3 equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "layout", "said"),
    [
        ("deaf to ways", "dp2,zero1", "--zero 1: no step was seen in which ranks deal out optimizer state"),
        ("state only", "dp2,zero2", "--zero 2: no step was seen in which ranks deal out gradients, too"),
        ("state only", "cp2,zero3", "--zero 3: no step was seen in which ranks deal out weights, too"),
    ],
)
def test_a_script_that_deals_out_less_than_it_is_told_has_proven_nothing(script, capsys, how, layout, said):
    assert main(["--first", "1", "--layout", layout, script, how]) == 2
    assert f"did not obey {said}" in capsys.readouterr().out


def test_ways_are_looked_for_on_all_stages(script, capsys):
    """The first stage of this model of one block holds none, so it calls no attention."""
    assert main(["--layout", "pp3,cp2,rsa", "--first", "1", script, "good"]) == 0


@pytest.mark.parametrize("layout", ["tp2,sp", "cp2,ring", "cp2,ulysses", "cp2,rsa"])
def test_what_sent_in_forward_is_recorded_with_its_axis_and_tells_the_way(layout):
    case = sweep.Case(3, parse(layout), 17, MODEL)
    ((_, first, *_), _) = record(2, lambda: sweep.train(case, case.layout))
    known = {word for word, way in WAYS.items() if any([op, way.axis] in first.facts["sent"] for op in way.ops)}
    assert known == set(case.layout.ways)


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3"])
def test_the_order_of_gradients_is_told_also_where_weights_come_and_go(zero):
    orders = []
    for layout in ("dp2", f"dp2,{zero}"):
        case = sweep.Case(3, parse(layout), 17, MODEL)
        ((_, first, *_), _) = record(2, lambda case=case: sweep.train(case, case.layout))
        orders.append(first.facts["order"])
    assert orders[0] == orders[1]
    assert len(orders[1]) == len(set(orders[1])) > 10


def test_nothing_has_sent_on_one_rank():
    ((_, first, *_),) = record(1, lambda: sweep.train(sweep.Case(3, ONE_RANK, 17, MODEL), ONE_RANK))
    assert first.facts["sent"] == []


def test_ranks_that_read_the_same_rows_are_told_so(script, capsys):
    assert main(["--layout", "dp2", script, "same rows"]) == 1
    text = capsys.readouterr().out
    assert "error     64, allowed 0: must be exactly equal\n" in text
    assert "how       the ranks of dp counted the same targets: each rank must get its own part (mesh.dp.rank," in text


def test_what_the_check_of_states_says_is_printed_once(script, capsys, tmp_path):
    path = tmp_path / "found.json"
    assert main(["--check", "--layout", "tp2", "--json", str(path), script, "sums nothing"]) == 1
    text = capsys.readouterr().out
    assert text.count("StateError") == 1
    assert "states    StateError: " in text
    assert "ended with exit code 2: a rule of states is broken\n" in text
    assert "StateError" in json.loads(path.read_text())["layouts"][0]["message"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("broken", "ended with exit code 1 already on one rank"),
        ("no step", "made no step on one rank: there is nothing to compare"),
    ],
)
def test_a_script_that_does_not_train_on_one_rank_is_the_users_mistake(script, capsys, how, said):
    with pytest.raises(ConfigError, match="code/script.py " + said):
        main(["--layout", "dp2", script, how])
    if how == "broken":
        error = capsys.readouterr().err
        assert "  | ValueError: always broken" in error
        assert "runpy" not in error


FEWER = ("cp2,rsa,full", "dp2,full", "pp2,terapipe,full")
"""Of the layouts of two ranks, what other tests prove as well; so do they experts, and most of ZeRO."""


def test_the_trainer_is_proven_where_no_script_is_given(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    few = [layout for layout in all_layouts(2) if "none" not in layout.ways and not layout.spreads_experts]
    zero = [layout for layout in few if cases.ZERO & {*layout.ways} and str(layout) != "dp2,zero3"]
    some = [layout for layout in few if layout not in zero and str(layout) not in FEWER]
    monkeypatch.setattr("mpitrain.verify.command.all_layouts", lambda ranks: some)
    assert main(["--all", "2", "--first", "2", "--", "--tied", "--layers", "1"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[1:14]] == [str(layout) for layout in some]
    assert "13 layouts: 13 equal" in text
    assert "2 steps of 16 tensors" in text  # tied: no head
    assert not list(tmp_path.iterdir())  # its run folder was one of verify's own


def test_a_layout_that_the_trainer_cannot_take_is_refused_with_its_reason(capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["--layout", "tp2", "--", "--heads", "1", "--layers", "1"]) == 2
    assert "--heads 1 is not divisible by --tp 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ([], ConfigError, "give a --layout"),
        (["--layout"], ConfigError, "its value is missing"),
        (["--layout", "xy"], ConfigError, "no word of a layout"),
        (["--layout", "dp2", "nowhere.py"], ConfigError, "there is no such script"),
        (
            ["--layout", "dp2", "tp2", "x.py"],
            ConfigError,
            "tp2: there is no such script, but .* --layout dp2 --layout tp2",
        ),
        (["dp2", "tp2,sp"], ConfigError, "dp2: there is no such script, but .* say --layout dp2 --layout tp2,sp"),
        (["x.py", "--layout", "dp2"], ConfigError, "stand before it: mpitrain verify --layout ... x.py"),
        (["x.py", "a", "--all=2"], ConfigError, "--all=2 stands behind x.py, where all words are the script's own"),
        (["--", "--all", "2"], ConfigError, "--all stands behind --, where all words are the trainer's own"),
        (["--layuot", "dp2"], ConfigError, "no such option"),
        (["--all", "0"], ConfigError, "must be a whole number from 1 to 1024"),
        (["--all"], ConfigError, "its value is missing"),
        (["--first", "0", "--layout", "dp2"], ConfigError, "whole number from 1"),
        (["--transport", "tcp", "--layout", "dp2"], ConfigError, "must be one of local, mpi"),
        (["--sweep", "3", "--layout", "dp2"], ConfigError, "makes its own models and layouts"),
        (["--sweep", "3", "--transport", "mpi"], ConfigError, "makes its own models and layouts"),
        (["--device", "cuda", "--layout", "dp2", "train.py"], ConfigError, "give it behind the script"),
        (["--layout", "dp2", "--json", "/nowhere/at/all.json"], ConfigError, "cannot be written"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_runs(words, error, said):
    with pytest.raises(error, match=said):
        main(words)


def test_ranks_of_an_mpirun_do_not_verify(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="starts its ranks itself"):
        main(["--layout", "dp2"])


def test_help_names_every_option_and_every_word(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in ("layout", "all", "transport", "first", "sweep", "seed", "json", "timeout", "at-once", "verbose"):
        assert f"--{word}" in text
    assert "ppN dpN cpN tpN (N ranks on an axis), epN" in text
    assert "sequence parallelism" in text


def test_verbose_shows_what_the_scripts_print_and_every_row(script, capsys):
    assert main(["--layout", "dp2", "--verbose", "--first", "1", script, "good"]) == 0
    text = capsys.readouterr().out
    assert text.count("  | a word of the script") == 3  # one rank, and two
    assert "more, none of them worse" not in text


def test_an_argument_may_name_a_folder_of_each_runs_own(script, tmp_path):
    code = (tmp_path / script).read_text()
    (tmp_path / script).write_text("import os, sys\nos.mkdir(sys.argv.pop(2))\n" + code)  # there is none yet
    assert main(["--layout", "dp1", "--layout", "dp1,tp1", script, "good", "{run}"]) == 0


def test_words_behind_a_script_are_its_own_where_there_is_a_layout_before_it(script, tmp_path):
    code = (tmp_path / script).read_text()
    (tmp_path / script).write_text("import sys\nassert sys.argv.pop(2) == '--layout=mine'\n" + code)
    assert main(["--layout", "dp1", script, "good", "--layout=mine"]) == 0
    (tmp_path / "dp2").write_text((tmp_path / script).read_text())  # a script may be called as a layout is
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    assert main(["--layout", "dp1", "dp2", "good", "--layout=mine"]) == 0


def test_a_reader_that_goes_away_ends_it_quietly(script):
    command = [sys.executable, "-m", "mpitrain", "verify", "--layout", "dp2", script, "good"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().startswith("one rank")
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(20) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_it_and_everything_it_has_started(script, number, code, tmp_path):
    mark = f"MPITRAIN_TEST_MARK={os.getpid()}-{number}"
    name, _, value = mark.partition("=")
    child = subprocess.Popen(
        [sys.executable, "-m", "mpitrain", "verify", "--layout", "dp2", script, "hangs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith("one rank")
    while not (tmp_path / "it hangs").exists():
        time.sleep(0.02)
    assert len(_marked(mark)) == 2
    child.send_signal(number)
    _, error = child.communicate(timeout=20)
    assert child.returncode == code
    assert "Traceback" not in error
    deadline = time.monotonic() + 5
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _marked(mark)
    assert not list(tmp_path.glob("mpitrain-verify-*"))


def _marked(mark: str) -> list[str]:
    """Living processes whose environment carries a mark."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(entry)
    return found
