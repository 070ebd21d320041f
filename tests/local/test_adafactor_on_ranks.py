"""Adafactor where ranks hold parts of a tensor: sums are over the logical tensor, in few messages, on any layout."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks
import checks_ledger

from mpitrain import checkpoint
from mpitrain.comm.alone import Alone
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.debug.capture import recording
from mpitrain.debug.ledger import Ledger
from mpitrain.errors import ConfigError
from mpitrain.events import listen
from mpitrain.models.gpt import GPT
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Adafactor, AdamW, Group
from mpitrain.optim.scaler import LossScaler
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.partition import Partition
from mpitrain.pipeline.passes import complete
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.spec import Shard
from mpitrain.verify.judge import judge

BOTH = {"edp": Shard(0), "tp": Shard(1)}
CUTS = {
    "rows": ((8, 6), {"tp": Shard(0)}),
    "columns": ((6, 8), {"tp": Shard(1)}),
    "uneven rows": ((5, 3), {"tp": Shard(0)}),
    "rows of nobody": ((2, 3), {"tp": Shard(0)}),
    "both": ((8, 8), BOTH),
    "both, uneven": ((3, 5), BOTH),
    "rows twice": ((8, 3), {"edp": Shard(0), "tp": Shard(0)}),
    "leading": ((4, 3, 5), {"tp": Shard(0)}),
    "rows of many": ((2, 8, 5), {"tp": Shard(1)}),
    "columns of many": ((2, 3, 2, 8), {"tp": Shard(3)}),
    "all dims": ((2, 4, 4), {"edp": Shard(0), "cp": Shard(1), "tp": Shard(2)}),
    "up of experts": ((4, 3, 8), {"ep": Shard(0), "tp": Shard(2)}),
    "down of experts": ((4, 8, 3), {"ep": Shard(0), "tp": Shard(1)}),
    "experts of nobody": ((3, 5, 3), {"ep": Shard(0), "tp": Shard(2)}),
    "vector": ((7,), {"tp": Shard(0)}),
    "whole": ((3, 4), {}),
}


def made_here(mesh, names=CUTS, dtype=np.float64):
    made = [Parameter(name, CUTS[name][0], CUTS[name][1], init=normal(0.3), decay=True) for name in names]
    materialize(made, mesh.coords, mesh.sizes, 0, np.dtype(dtype))
    return made


def trained(mesh, names=CUTS, steps=4):
    """Whole weights and state after steps whose gradients are parts of whole ones."""
    made = made_here(mesh, names)
    method = Adafactor(made, mesh=mesh, lr=0.1, beta1=0.5, weight_decay=0.1)
    for step in range(steps):
        for p in made:
            seed = [step, *p.name.encode()]
            p.grad[...] = np.random.default_rng(seed).normal(size=p.full_shape)[p.rectangle] * 10.0**step
            p.touched = True
        method.step()
    return {"weight": checks.whole(mesh.world, mesh, made, [p.data for p in made])} | checks.states(
        mesh.world, mesh, method
    )


@pytest.fixture(scope="module")
def alone():
    return trained(Mesh(World(Alone(), "none")))


@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2},
        {"tp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 4},
        {"dp": 2, "cp": 2, "tp": 2},
        {"tp": 8},
        {"dp": 2, "ep": 2},
        {"dp": 4, "ep": 4},
        {"dp": 4, "ep": 2, "tp": 2},
    ],
    ids=str,
)
def test_any_cut_makes_the_updates_of_the_whole_tensor(axes, alone):
    """T25.6: weights, row and column sums, for either direction and for both, and for the experts of each rank."""
    ranks = int(np.prod([size for axis, size in axes.items() if axis != "ep"]))  # ep is a part of dp
    for found in LocalWorld(ranks).run(lambda: trained(Mesh(world(), **axes))):
        for kind, tensors in alone.items():
            for name, tensor in tensors.items():
                gap = np.abs(found[kind][name] - tensor).max()
                assert gap <= 1e-12 * np.abs(tensor).max(), (kind, name, gap)


def test_a_rank_keeps_the_sums_of_its_own_rows_and_columns():
    def main():
        mesh = Mesh(world(), dp=2, tp=2)
        state = Adafactor(made_here(mesh), mesh=mesh).state_dict()
        return {name: (state["row_sums"][name].shape, state["column_sums"][name].shape) for name in ("rows", "columns")}

    for found in LocalWorld(4).run(main):
        assert found == {"rows": ((4,), (6,)), "columns": ((6,), (4,))}


def test_messages_are_two_for_each_set_of_axes_however_many_parameters():
    def main():
        mesh = Mesh(world(), dp=2, cp=2, tp=2)
        calls = []
        for names in (["rows", "columns"], ["rows", "columns", "leading", "vector", "rows of many", "whole"], [*CUTS]):
            made = made_here(mesh, names)
            method = Adafactor(made, mesh=mesh)
            for p in made:
                p.grad[...] = 1.0
                p.touched = True
            ledger = Ledger()
            with listen(ledger):
                method.step()
            calls.append({axis: count.calls for axis, count in ledger.by(lambda place: place.axis).items()})
        return calls

    few, more, every = LocalWorld(8).run(main)[0]
    assert few == more == {"tp": 2}
    assert every == {"tp": 2, "edp": 1, "cp": 1, "cp+tp": 1, "edp+tp": 2, "edp+cp+tp": 2}


def test_a_parameter_of_another_stage_cannot_be_summed_over():
    def main():
        mesh = Mesh(world(), pp=2)
        p = Parameter("w", (4, 4), {"pp": Shard(0)}, init=normal(1.0))
        materialize([p], mesh.coords, mesh.sizes, 0, np.dtype(np.float64))
        with pytest.raises(ConfigError, match="w is cut over pp"):
            Adafactor([p], mesh=mesh)

    LocalWorld(2).run(main)


# ------------------------------------------------------------------------------------------------------- whole models


LAYOUTS = [
    ({"tp": 2}, False),
    ({"tp": 4}, True),
    ({"tp": 4, "sp": True}, False),
    ({"dp": 2, "tp": 2}, True),
    ({"cp": 2, "tp": 2}, False),
    ({"pp": 2}, True),
    ({"pp": 2}, False),
    ({"pp": 2, "tp": 2}, True),
]


@pytest.mark.parametrize(
    ("layout", "tied"), LAYOUTS, ids=lambda x: checks.name_of(x) if isinstance(x, dict) else "tied" * x or "untied"
)
def test_a_gpt_trains_as_on_one_rank(layout, tied):
    ranks = int(np.prod([layout.get(axis, 1) for axis in checks.AXES]))
    LocalWorld(ranks).run(lambda: checks.equals_one_rank(world(), adafactor=True, tied=tied, **layout))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_it_sends_what_was_predicted(layout, tied):
    ranks = int(np.prod([*layout.values()]))
    sizes = replace(checks_ledger.SIZES, tied=tied)
    LocalWorld(ranks).run(
        lambda: checks_ledger.sends_what_was_predicted(world(), sizes, optimizer="adafactor", steps=2, **layout)
    )


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 2), (2, 4)])
def test_it_sends_what_was_predicted_with_grouped_heads(kv_heads, tp):
    sizes = replace(checks_ledger.SIZES, kv_heads=kv_heads)
    LocalWorld(tp).run(
        lambda: checks_ledger.sends_what_was_predicted(world(), sizes, optimizer="adafactor", dtype=np.float64, tp=tp)
    )


def test_the_two_copies_of_a_tied_table_stay_the_same_to_the_last_bit():
    """The stages hold different parameters beside it, and nobody asked for deterministic sums."""

    def main():
        mesh = Mesh(world(), pp=2, tp=2)
        model = GPT(replace(checks.SIZES, tied=True), mesh, seed=3, dtype=np.float32)
        method = Adafactor(model.parameters(), mesh=mesh, lr=0.05)
        executor = Executor(model, method, mesh, complete("1f1b", ranks=2, microbatches=2))
        for batch in checks.numbers(checks.SIZES).batches(8, 0, 1, stop_step=4):
            executor.step(batch)
        (table,) = [p for p in model.parameters() if p.spec.tied]
        kept = [of[table.name].tobytes() for of in method.state_dict().values() if table.name in of]
        return [table.data.tobytes(), *kept]

    found = LocalWorld(4).run(main)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_stages_that_update_at_different_times_sum_within_a_stage(name):
    """The same rows with tp and without give the same weights: no message of the optimizer leaves its stage."""

    def main(tp):
        mesh = Mesh(world(), pp=2, tp=tp)
        model = GPT(replace(checks.SIZES, dropout=0.0), mesh, partition=Partition((1, 1)), seed=3, dtype=np.float64)
        method = checks.method(model, adafactor=True, mesh=mesh)
        micros = 1 if name == "pipedream" else 2
        executor = Executor(
            model,
            method,
            mesh,
            lambda batches: complete(name, ranks=2, microbatches=micros, batches=batches),
            versions=SCHEDULES[name].versions,
        )
        executor.run(list(checks.numbers(checks.SIZES).batches(8, 0, 1, stop_step=5)))
        assert method.updates == 5
        parameters = model.parameters()
        return {"weight": checks.whole(world(), mesh, parameters, [p.data for p in parameters])} | checks.states(
            world(), mesh, method
        )

    one, two = LocalWorld(2).run(lambda: main(1))[0], LocalWorld(4).run(lambda: main(2))[0]
    for kind in one:
        worst = checks.compare(two[kind], one[kind])[0]
        assert worst.ok, f"{kind}: {worst}"


def test_a_step_that_is_skipped_is_no_update():
    """rho and beta2 count successes: what overflowed leaves state and t alone."""

    def main():
        mesh = Mesh(world(), tp=2)
        model = GPT(replace(checks.SIZES, dropout=0.0), mesh, seed=3, dtype=np.float16)
        method = Adafactor(model.parameters(), mesh=mesh)
        rows = complete("1f1b", ranks=1, microbatches=1)
        executor = Executor(model, method, mesh, rows, scaler=LossScaler(2.0**40))
        before = [p.data.copy() for p in model.parameters()]
        (report,) = executor.run(list(checks.numbers(checks.SIZES).batches(8, 0, 1, stop_step=1)))
        assert report.skipped
        assert method.updates == 0
        assert not any(array.any() for of in method.state_dict().values() for array in of.values())
        assert all(np.array_equal(p.data, old) for p, old in zip(model.parameters(), before, strict=True))

    LocalWorld(2).run(main)


# ------------------------------------------------------------------------------------------------ checkpoints, verify


def test_a_checkpoint_goes_from_any_layout_to_any_other(tmp_path):
    """Row and column sums are tensors of their own shape: what is loaded has the same bits, and training goes on."""
    sizes = replace(checks.SIZES, tied=True)

    def main(save=False, **axes):
        mesh = Mesh(world(), **axes)
        model = GPT(sizes, mesh, seed=3, dtype=np.float64)
        method = checks.method(model, adafactor=True, mesh=mesh)
        executor = Executor(model, method, mesh, complete("1f1b", ranks=mesh.pp.size, microbatches=2))
        batches = list(checks.numbers(sizes).batches(8, mesh.dp.rank, mesh.dp.size, stop_step=5))
        tensors = checkpoint.slabs_of(model.parameters(), method.state_tensors(), mesh)
        if save:
            for batch in batches[:3]:
                executor.step(batch)
            checkpoint.save(tmp_path, 3, tensors, {"updates": method.updates}, world())
        else:
            method.updates = checkpoint.load(checkpoint.latest(tmp_path), tensors, world())["updates"]
        weights = checks.whole(world(), mesh, model.parameters(), [p.data for p in model.parameters()])
        state = {"weight": weights, **checks.states(world(), mesh, method)}
        return state, [executor.step(batch) for batch in batches[3:]]

    saved, losses = LocalWorld(4).run(lambda: main(save=True, pp=2, tp=2))[0]
    manifest = checkpoint.read_manifest(checkpoint.latest(tmp_path))
    assert manifest.tensors["row_sums/blocks.0.mlp.up.weight"].shape == (sizes.width,)
    assert manifest.tensors["column_sums/blocks.0.mlp.up.weight"].shape == (4 * sizes.width,)
    for axes in ({}, {"tp": 4}, {"dp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}):
        ranks = int(np.prod([*axes.values()], dtype=int))
        loaded, again = LocalWorld(ranks).run(lambda axes=axes: main(**axes))[0]
        for kind, tensors in saved.items():
            assert {name: a.tobytes() for name, a in loaded[kind].items()} == {
                name: a.tobytes() for name, a in tensors.items()
            }, (axes, kind)
        assert again == pytest.approx(losses, rel=1e-10), axes
        assert again == losses or axes != {"pp": 2, "tp": 2}


def recorded(ranks, axes, wrong=False):
    """The records of a short run, and with `wrong` of one whose optimizer forgets a sum."""

    def main():
        found = []
        with recording(world(), found.append):
            mesh = Mesh(world(), **axes)
            model = GPT(replace(checks.SIZES, dropout=0.0), mesh, seed=3)
            method = checks.method(model, adafactor=True, mesh=mesh)
            if wrong:
                method._sum = lambda own: own
            executor = Executor(model, method, mesh, complete("1f1b", ranks=mesh.pp.size, microbatches=2))
            for batch in checks.numbers(checks.SIZES).batches(8, mesh.dp.rank, mesh.dp.size, stop_step=2):
                executor.step(batch)
        return found

    return LocalWorld(ranks).run(main)


def test_verify_compares_sums_of_rows_and_columns_of_every_layout():
    (alone,) = recorded(1, {})
    for axes in ({"tp": 2}, {"pp": 2, "tp": 2}):
        verdict = judge(alone, recorded(int(np.prod([*axes.values()])), axes))
        assert verdict.ok, verdict.first
        compared = {(finding.kind, finding.name) for finding in verdict.findings}
        assert ("row_sums", "blocks.1.mlp.down.weight") in compared
        assert ("column_sums", "table.weight") in compared
        assert ("second_moment", "blocks.0.norm1.bias") in compared
    assert not judge(alone, recorded(2, {"tp": 2}, wrong=True)).ok


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("kind", [AdamW, Adafactor])
def test_a_group_may_be_on_another_stage(kind):
    def main():
        mesh = Mesh(world(), pp=2)
        model = GPT(checks.SIZES, mesh, seed=3)
        groups = [Group("table.*", lr=0.5), Group("head.*", lr=2.0)]
        rates = kind(model.parameters(), groups=groups, mesh=mesh).treatments
        for pattern in ("tabel.*", "blocks.7.*"):
            with pytest.raises(ConfigError, match=f"{pattern[:5]}.*no parameter of the model"):
                kind(model.parameters(), groups=[*groups, Group(pattern)], mesh=mesh)
        return {p.name: t.rate for p, t in zip(model.parameters(), rates, strict=True) if t.rate != 1}

    assert LocalWorld(2).run(main) == [{"table.weight": 0.5}, {"head.weight": 2.0}]
