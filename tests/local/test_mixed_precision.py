"""Half precision: masters, scales, skipped steps; every layout is as near the exact run as one rank is."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks

from mpitrain import checkpoint
from mpitrain.backend import dtype_of
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import ConfigError, NumericsError, ScheduleError
from mpitrain.metrics import read_metrics
from mpitrain.models.gpt import GPT
from mpitrain.models.transformer import branches
from mpitrain.optim.adam import AdamW
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.optim.sgd import Sgd
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.train import main

ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding."""

LAYOUTS = [
    (1, {}),
    (2, {"dp": 2, "micros": 2}),
    (4, {"tp": 4, "sp": True}),
    (2, {"cp": 2}),
    (4, {"cp": 2, "dp": 2, "kind": "rsa"}),
    (2, {"cp": 2, "kind": "ulysses"}),
    (2, {"pp": 2, "micros": 4, "schedule": "zb-h1"}),
    (8, {"pp": 2, "dp": 2, "tp": 2, "micros": 4}),
]


def on(ranks, work):
    """What rank 0 returns."""
    found = []

    def main():
        result = work()
        if world().rank == 0:
            found.append(result)

    LocalWorld(ranks).run(main)
    return found[0]


@pytest.fixture(scope="module")
def exact():
    """One rank in float64."""
    return on(1, lambda: checks.train(world()))


@pytest.mark.parametrize(("dtype", "scaling"), [("float16", "loss"), ("bfloat16", "none"), ("float16", "blocks")])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=[checks.name_of(how) or "one" for _, how in LAYOUTS])
def test_halves_on_any_layout_are_as_near_the_exact_run_as_on_one_rank(ranks, layout, dtype, scaling, exact):
    """The rule: by the length of the difference of each tensor, 16 roundings; losses and norms one.

    Tensors whose exact gradient is almost zero are held against a hundredth of the largest one.
    """
    found = on(ranks, lambda: checks.train(world(), dtype=dtype, scaling=scaling, **layout))
    for kind in ("losses", "norms"):
        for name, values in exact[kind].items():
            np.testing.assert_allclose(found[kind][name], values, rtol=ULP[dtype])
    for kind in ("gradients", "first_moment", "second_moment"):
        if kind == "gradients" and scaling != "none":
            continue  # they carry no scale any more and are clipped: the moments tell
        largest = max(np.linalg.norm(values) for values in exact[kind].values())
        for name, values in exact[kind].items():
            bound = 16 * ULP[dtype] * max(np.linalg.norm(values), 0.01 * largest)
            assert np.linalg.norm(found[kind][name] - values) <= bound, (kind, name)


@pytest.mark.parametrize("scale", [2.0**8, 2.0**12])
def test_a_scale_of_the_loss_changes_no_bit_where_nothing_underflows(scale):
    """T21.4: in float64, through norm and clipping."""
    plain = on(2, lambda: checks.train(world(), dp=2))
    scaled = on(2, lambda: checks.train(world(), dp=2, scaling="loss", scale=scale))
    for kind, tensors in plain.items():
        for name, values in tensors.items():
            np.testing.assert_array_equal(scaled[kind][name], values, err_msg=f"{kind} {name}")


def test_scales_of_branches_change_nothing_in_float64():
    """T22.1, on a layout with every axis."""
    LocalWorld(8).run(
        lambda: checks.equals_one_rank(world(), scaling="blocks", pp=2, dp=2, tp=2, sp=True, micros=4, tied=True)
    )
    plain = on(1, lambda: checks.train(world()))
    scaled = on(1, lambda: checks.train(world(), scaling="blocks"))
    for kind in ("gradients", "first_moment", "losses"):
        for name, values in plain[kind].items():
            np.testing.assert_allclose(scaled[kind][name], values, rtol=1e-9, atol=1e-12 * np.abs(values).max())


def test_branches_and_executor_have_one_scaler():
    """What the one puts on, the other takes off: alone, either gives wrong gradients."""

    def main():
        mesh = Mesh(world())
        names = branches(checks.SIZES.layers)
        scales = BlockScaler(names)
        scaled = GPT(checks.SIZES, mesh, dtype=np.float64, scales=scales)
        plain = GPT(checks.SIZES, mesh, dtype=np.float64)
        rows = complete("1f1b", ranks=1, microbatches=1)
        assert Executor(scaled, AdamW(scaled.parameters()), mesh, rows).scaler is scales
        for model, scaler in ((scaled, LossScaler()), (scaled, BlockScaler(names)), (plain, BlockScaler(names))):
            with pytest.raises(ConfigError, match="must have one scaler"):
                Executor(model, AdamW(model.parameters()), mesh, rows, scaler=scaler)
        with pytest.raises(ConfigError, match="of 1 branches, the model has 4"):
            GPT(checks.SIZES, mesh, scales=BlockScaler(["blocks.0."]))

    LocalWorld(1).run(main)


@pytest.mark.parametrize("odd", ["scale", "optimizer"])
def test_ranks_that_would_update_in_different_ways_are_refused_at_the_start(odd):
    def main():
        mesh = Mesh(world(), dp=2)
        model = GPT(checks.SIZES, mesh, seed=3, dtype=np.float16)
        scaler = LossScaler(2.0 ** (10 + (odd == "scale") * mesh.world.rank))
        method = Sgd if odd == "optimizer" and mesh.world.rank else AdamW
        rows = complete("1f1b", ranks=1, microbatches=1)
        with pytest.raises(ConfigError, match=r"rank 1 updates by .* rank 0 by AdamW with LossScaler"):
            Executor(model, method(model.parameters()), mesh, rows, scaler=scaler)

    LocalWorld(2).run(main)


def test_a_norm_whose_square_is_beyond_the_moments_is_refused_before_the_update():
    def main():
        mesh, model, optimizer, executor = built("float32")
        (batch,) = batches(mesh, model, 0, 1)
        finish = executor.reducer.finish

        def large():
            finish()
            model.head.weight.grad[...] = 2e18

        executor.reducer.finish = large
        before = [p.master.copy() for p in model.parameters()]
        with pytest.raises(NumericsError, match="its square is beyond the precision of the moments"):
            executor.step(batch)
        for p, master in zip(model.parameters(), before, strict=True):
            np.testing.assert_array_equal(p.master, master)
        assert optimizer.updates == 0

    LocalWorld(1).run(main)


# ---------------------------------------------------------------------------------------------------- masters


def built(dtype="float16", *, scaler=None, method=AdamW, lr=1e-3, micros=1, sizes=checks.SIZES, **axes):
    mesh = Mesh(world(), **axes)
    model = GPT(sizes, mesh, seed=3, dtype=dtype_of(dtype))
    optimizer = method(model.parameters(), lr=lr)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=micros)
    return mesh, model, optimizer, Executor(model, optimizer, mesh, rows, scaler=scaler)


def batches(mesh, model, first, last):
    tokens = checks.numbers(checks.SIZES)
    for rows in tokens.batches(checks.BATCH, mesh.dp.rank, mesh.dp.size, first, last):
        yield rows.part(model.positions_here)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_the_rounding_of_their_masters(dtype):
    def main():
        mesh, model, _, executor = built(dtype, dp=2)
        for batch in batches(mesh, model, 0, 3):
            executor.step(batch)
            for p in model.parameters():
                assert (p.data.dtype, p.master.dtype, p.grad.dtype) == (dtype_of(dtype), np.float32, np.float32)
                np.testing.assert_array_equal(p.data, p.master.astype(dtype_of(dtype)), err_msg=p.name)
                assert p.data.size < 16 or (p.master != p.data.astype(np.float32)).any(), p.name

    LocalWorld(2).run(main)


def test_updates_below_the_precision_of_a_half_are_not_lost():
    """T21.5: from 1.0, a thousand steps of 1e-4."""

    def main():
        _, model, _, _ = built()
        p = model.norm.weight
        optimizer = Sgd([p], lr=1e-4)
        half = p.data.copy()
        for _ in range(1000):
            p.grad[...], p.touched = 1.0, True
            optimizer.step()
            half -= np.float16(1e-4)
        np.testing.assert_allclose(p.master, 0.9, atol=1e-4)
        np.testing.assert_array_equal(p.data, p.master.astype(np.float16))
        np.testing.assert_array_equal(half, 1.0)  # what happens to a half without a master

    LocalWorld(1).run(main)


def test_an_epsilon_that_no_half_can_hold_works():
    """AdamW's 1e-8 is 0 in float16; a gradient of 0 must leave the weight where it is."""

    def main():
        _, model, _, _ = built()
        optimizer = AdamW(model.parameters(), weight_decay=0.0)
        before = [p.master.copy() for p in model.parameters()]
        for p in model.parameters():
            p.grad[...], p.touched = 0.0, True
        optimizer.step()
        for p, master in zip(model.parameters(), before, strict=True):
            np.testing.assert_array_equal(p.master, master)

    LocalWorld(1).run(main)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_holds_masters_and_a_resumed_run_is_the_same_one(dtype, tmp_path):
    """C68: weights that a half cannot hold, a small learning rate, saved at 5, on to 10; then on other ranks."""

    def slabs(mesh, model, optimizer):
        return checkpoint.slabs_of(model.parameters(), optimizer.state_tensors(), mesh)

    def straight():
        mesh, model, optimizer, executor = built(dtype, dp=2, lr=1e-5)
        for step, batch in enumerate(batches(mesh, model, 0, 10), start=1):
            executor.step(batch)
            if step == 5:
                scalars = {"updates": optimizer.updates, "scaler": executor.scaler and executor.scaler.state_dict()}
                path = checkpoint.save(tmp_path, 5, slabs(mesh, model, optimizer), scalars, mesh.world)
        assert all(t.dtype == "float32" for t in checkpoint.read_manifest(path).tensors.values())
        return path, [p.master.copy() for p in model.parameters()]

    def resumed(path, **axes):
        mesh, model, optimizer, executor = built(dtype, lr=1e-5, **axes)
        scalars = checkpoint.load(path, slabs(mesh, model, optimizer), mesh.world)
        for flat in model.flats:
            flat.refresh()
        optimizer.updates = scalars["updates"]
        if executor.scaler is not None:
            executor.scaler.load_state(scalars["scaler"])
        for batch in batches(mesh, model, 5, 10):
            executor.step(batch)
        return [p.master.copy() for p in model.parameters()]

    path, expected = on(2, straight)
    for found, master in zip(on(2, lambda: resumed(path, dp=2)), expected, strict=True):
        np.testing.assert_array_equal(found, master)
    for found, master in zip(on(1, lambda: resumed(path)), expected, strict=True):
        np.testing.assert_allclose(found, master, atol=5 * 1e-5)  # five steps of lr 1e-5 at most


# ---------------------------------------------------------------------------------------------------- skipped steps


@pytest.mark.parametrize("culprit", range(8))
def test_all_ranks_skip_when_the_gradients_of_one_overflow(culprit):
    """C18, T21.3, T28.4: each of the 8 ranks in turn, on a parameter that others may count in the norm."""

    def main():
        mesh, model, optimizer, executor = built(
            micros=2, pp=2, dp=2, tp=2, scaler=LossScaler(2.0**10, hysteresis=1), sizes=replace(checks.SIZES, tied=True)
        )
        first, second = batches(mesh, model, 0, 2)
        executor.step(first)
        before = [(p.master.copy(), p.data.copy()) for p in model.parameters()]
        moments = {k: {n: a.copy() for n, a in v.items()} for k, v in optimizer.state_dict().items()}
        finish = executor.reducer.finish

        def broken():
            finish()
            if mesh.world.rank == culprit:
                model.parameters()[-1].grad.reshape(-1)[0] = np.inf

        executor.reducer.finish = broken
        executor.step(second)
        assert executor.report.skipped
        assert executor.report.scale == 2.0**10
        assert executor.scaler.scale == 2.0**9
        assert optimizer.updates == 1
        for p, (master, data) in zip(model.parameters(), before, strict=True):
            np.testing.assert_array_equal(p.master, master)
            np.testing.assert_array_equal(p.data, data)
        for kind, arrays in optimizer.state_dict().items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, moments[kind][name])
        executor.reducer.finish = finish
        for batch in batches(mesh, model, 2, 4):
            executor.step(batch)
            assert not executor.report.skipped
        check_replicas(model.parameters(), mesh, "at the end")

    LocalWorld(8).run(main)


def test_sums_of_halves_that_leave_their_range():
    """C20: three ranks hold 30000; the sum is right in a float32 buffer, and an overflow in one of halves."""

    def main():
        axis = world()
        mine = np.full(5, 30000, np.float16)
        wide = np.empty(5, np.float32)
        axis.all_reduce(mine, out=wide)
        np.testing.assert_array_equal(wide, 90000.0)
        with np.errstate(over="ignore"):
            assert np.isinf(axis.all_reduce(mine)).all()

    LocalWorld(3).run(main)


def test_gradients_that_leave_the_range_of_a_half_on_the_wire_count_as_overflow():
    def main():
        mesh, model, optimizer, executor = built(dp=2, scaler=LossScaler(2.0**15, hysteresis=1))
        (batch,) = batches(mesh, model, 0, 1)
        finish = executor.reducer.finish

        def large():
            model.head.weight.grad[0, 0] = 1e6
            finish()

        executor.reducer.finish = large
        executor.step(batch)
        assert executor.report.skipped
        assert optimizer.updates == 0
        assert executor.scaler.scale == 2.0**14

    LocalWorld(2).run(main)


def test_two_versions_of_the_weights_go_together_with_skipped_steps():
    """2BW meets at each update, so that all stages skip; PipeDream cannot."""

    def main(versions, schedule):
        mesh = Mesh(world(), pp=2)
        model = GPT(replace(checks.SIZES, dropout=0.0), mesh, seed=3, dtype=np.float16)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        m = 2 if versions == "previous" else 1
        executor = Executor(
            model,
            optimizer,
            mesh,
            lambda n: complete(schedule, ranks=2, microbatches=m, batches=n),
            versions=versions,
            scaler=LossScaler(2.0**24, hysteresis=1),
        )
        reports = executor.run([*batches(mesh, model, 0, 12)])
        return [(r.skipped, r.scale) for r in reports], optimizer.updates, executor.scaler.scale

    reports, updates, scale = on(2, lambda: main("previous", "pipedream-2bw"))
    skipped = [skip for skip, _ in reports]
    assert skipped[0], "a scale of 2^24 overflows"
    assert not all(skipped)
    assert updates == 12 - sum(skipped)
    assert scale == 2.0 ** (24 - sum(skipped))
    with pytest.raises(ScheduleError, match="no step can be skipped by all"):
        on(2, lambda: main("newest", "pipedream"))


def test_a_resumed_run_goes_on_with_its_scale_unless_another_is_asked_for(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    small = ["--layers", "1", "--width", "16", "--heads", "2", "--seq-len", "16", "--batch", "4", "--steps", "6"]
    usual = [*small, "--data", str(text), "--sample-length", "0", "--dtype", "float16"]

    def train(*flags):
        LocalWorld(1).run(lambda: main([*usual, *flags]))
        name = flags[flags.index("--run") + 1]
        return [record["loss_scale"] for record in read_metrics(Path(name) / "metrics.jsonl")]

    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    assert train("--run", run, "--save-every", "3", "--loss-scale-window", "2") == [
        2.0**16,
        2.0**16,
        2.0**17,
        2.0**17,
        2.0**18,
        2.0**18,
    ]
    saved = f"{run}/checkpoints/step-00000003"
    assert train("--run", other, "--resume", saved) == [2.0**17, 2.0**18, 2.0**18]
    for flags, scales in (
        (["--loss-scaling", "none"], [1.0] * 3),
        (["--loss-scale", "1024"], [2.0**10, 2.0**10, 2.0**11]),
        (["--loss-scaling", "blocks"], [2.0**13] * 3),
    ):
        capsys.readouterr()
        found = train("--run", str(tmp_path / flags[1]), "--resume", saved, *flags)
        np.testing.assert_allclose(found, scales, rtol=0.01)
        assert "the scale of the gradients begins anew" in capsys.readouterr().out
