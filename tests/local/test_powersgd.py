"""PowerSGD on ranks that are threads: nothing is lost, on any layout, through skipped steps and over checkpoints."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_powersgd as checks
from checks_powersgd import SHAPES, Bench

from mpitrain import checkpoint, rng
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.optim.scaler import BlockScaler, LossScaler
from mpitrain.parallel.powersgd import ERROR, Q
from mpitrain.train import main


def on(ranks, function, *args):
    return LocalWorld(ranks).run(function, *args)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    on(4, lambda: check(world()))


def names_on(mesh):
    """All parameters on the first stage, and the table on the last one, too."""
    return [*([*SHAPES] if mesh.pp.rank == 0 else []), *["table"] * (mesh.pp.rank in (0, mesh.pp.size - 1))]


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (1, {}),
        (3, {}),
        (4, {"dp": 2, "tp": 2}),
        (3, {"tp": 3}),  # rows and columns that do not divide, and experts that do not
        (4, {"dp": 2, "ep": 2, "cp": 2}),
        (4, {"dp": 2, "pp": 2}),
        (6, {"pp": 3, "dp": 2}),  # the stage in the middle has no end
    ],
    ids=str,
)
def test_nothing_is_lost_on_any_layout(ranks, axes):
    """T26.2; over pp with a table to whose gradient both ends add, 11 rows over tp."""

    def check():
        mesh = Mesh(world(), **axes)
        checks.nothing_is_lost(Bench(mesh, names=names_on(mesh)), steps=8)

    on(ranks, check)


def test_a_rank_of_tp_that_holds_no_row_takes_part():
    """11 rows over 4 are 3, 3, 3, 2; 2 rows over 4 are 1, 1, 0, 0."""

    def check():
        mesh = Mesh(world(), tp=4)
        bench = Bench(mesh, names=["table", "down"], rank=3)
        checks.nothing_is_lost(bench, steps=4)
        return {p.name: p.grad.shape for p in bench.parameters}

    assert on(4, check)[3]["table"] == (2, 14)


def test_at_a_fixed_tp_the_number_of_data_parallel_ranks_does_not_matter():
    """Each slab is a matrix of its own, so tp is part of what is computed; dp, cp and pp are not."""

    def run(**axes):
        executor, losses = checks.train(world(), tp=2, steps=4, **axes)
        return losses, {(p.name, str(p.rectangle)): p.data.copy() for p in executor.model.parameters()}

    wanted = {key: array for _, weights in on(2, run) for key, array in weights.items()}
    losses = on(2, run)[0][0]
    for found, weights in (*on(4, run), *on(8, lambda: run(pp=2))):
        np.testing.assert_allclose(found, losses, rtol=1e-10)
        for key, array in weights.items():
            np.testing.assert_allclose(array, wanted[key], atol=1e-11, err_msg=key[0])


def test_it_is_the_algorithm_of_the_paper():
    """A plain transcription: NumPy's QR, momentum and decay after decompression, clipping of what came out."""

    def run():
        mesh = Mesh(world())
        bench = Bench(mesh, names=["up", "kernel", "norm"])
        return [bench.step(step) for step in range(6)]

    def brought(name, step, rank):
        shape = SHAPES[name][0]
        lasting = np.random.default_rng([*name.encode()]).normal(size=shape)
        return lasting + np.random.default_rng([step, 0, rank, *name.encode()]).normal(size=shape)

    def first_q(name, shape):
        full = (*shape[1:], 2)
        return rng.normal(0, f"powersgd {name}", full, tuple(slice(0, n) for n in full)).reshape(-1, 2)

    found = on(3, run)[0]
    for name in ("up", "kernel"):
        shape = SHAPES[name][0]
        n, m = shape[0], int(np.prod(shape[1:]))
        errors, q = np.zeros((3, n, m)), first_q(name, shape)
        for step in range(6):
            deltas = np.stack([brought(name, step, rank).reshape(n, m) for rank in range(3)]) + errors
            basis = np.linalg.qr((deltas @ q).sum(0))[0]
            own = deltas.transpose(0, 2, 1) @ basis
            q = own.sum(0)
            errors = deltas - basis @ own.transpose(0, 2, 1)
            np.testing.assert_allclose(found[step][name].reshape(n, m), basis @ q.T, atol=1e-10, err_msg=name)
    np.testing.assert_allclose(found[5]["norm"], sum(brought("norm", 5, rank) for rank in range(3)), rtol=1e-14)


# ------------------------------------------------------------------------------------------------------ halves, scales


def test_errors_are_of_gradients_without_their_scale():
    """The scale changes in between by powers of two: what is sent is the same but for it."""

    def run(scales):
        bench = Bench(Mesh(world()), np.float32, names=["up", "norm"])
        scaler = bench.reducer.scaler = LossScaler(1.0)
        found = []
        for step, scale in enumerate(scales):
            scaler.scale = scale
            bench.bring(step, scale)
            bench.reducer.finish()
            bench.reducer.updated()
            found.append({p.name: p.grad / np.float32(scale) for p in bench.parameters})
        return found, bench.errors()

    plain, errors = on(2, run, [1.0] * 5)[0]
    scaled, scaled_errors = on(2, run, [2.0**10, 2.0**10, 2.0**12, 0.5, 2.0**16])[0]
    for one, other in zip(plain, scaled, strict=True):
        for name, array in one.items():
            assert array.tobytes() == other[name].tobytes(), name
    assert errors["up"].tobytes() == scaled_errors["up"].tobytes()


def test_each_branch_has_its_own_scale():
    def run(scales):
        bench = Bench(Mesh(world()), np.float64, names=["up", "kernel"])
        scaler = bench.reducer.scaler = BlockScaler(["up", "ker"])
        found = []
        for step, (up, kernel) in enumerate(scales):
            scaler.scales[:] = up, kernel
            for p in bench.parameters:
                p.touched = False
                scale = {"up": up, "kernel": kernel}[p.name]
                p.accumulate(bench.gradient(p, step, *bench.place(p)) * scale)
            bench.reducer.finish()
            bench.reducer.updated()
            found.append({p.name: p.grad * scaler.inverse(scaler.group(p)) for p in bench.parameters})
        return found

    plain = on(2, run, [(1.0, 1.0)] * 3)[0]
    scaled = on(2, run, [(3.0, 8000.0), (100.0, 2.0), (7.0, 1000.0)])[0]
    for one, other in zip(plain, scaled, strict=True):
        for name, array in one.items():
            np.testing.assert_allclose(other[name], array, rtol=1e-9, atol=1e-12)


def test_a_skipped_step_of_a_float16_run_changes_neither_error_nor_factor():
    """The second step overflows: an infinity in one rank's gradient of one matrix, which all ranks skip."""

    def run(broken):
        executor, _ = checks.train(world(), steps=1, dtype=np.float16)
        reducer, updates = executor.reducer, executor.optimizer.updates
        before = {kind: {n: t.array.tobytes() for n, t in of.items()} for kind, of in reducer.state_tensors().items()}
        finish = reducer.finish

        def spoiled():
            p = next(p for p in executor.model.parameters() if p.name == "blocks.0.mlp.up.weight")
            if world().rank == 1:
                p.grad[2, 3] = np.inf
            finish()

        reducer.finish = spoiled if broken else finish
        import checks_layouts

        tokens = checks_layouts.numbers(checks.SIZES)
        (batch,) = tokens.batches(8, executor.mesh.dp.rank, executor.mesh.dp.size, 1, 2)
        executor.step(batch)
        after = {kind: {n: t.array.tobytes() for n, t in of.items()} for kind, of in reducer.state_tensors().items()}
        return executor.report.skipped, executor.optimizer.updates - updates, reducer.updates, before == after

    assert on(2, run, True) == [(True, 0, 1, True)] * 2
    assert on(2, run, False) == [(False, 1, 2, False)] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_halves_learn(dtype):
    pytest.importorskip("ml_dtypes") if dtype == "bfloat16" else None
    from mpitrain.backend import dtype_of

    def run():
        executor, losses = checks.train(world(), steps=25, dtype=dtype_of(dtype))
        assert all(t.array.dtype == np.float32 for of in executor.reducer.state_tensors().values() for t in of.values())
        return losses

    losses = on(2, run)[0]
    assert losses[-1] < losses[0] - 0.2


# --------------------------------------------------------------------------------------------------------- checkpoints


def tensors(bench, states):
    return checkpoint.slabs_of(bench.parameters, states, bench.mesh)


def saved(bench, folder, step):
    return checkpoint.save(folder, step, tensors(bench, bench.reducer.state_tensors()), {}, world())


def loaded(bench, path, updates=0):
    shapes = checkpoint.shapes(path, world())
    refs = tensors(bench, bench.reducer.state_to_fill(shapes))
    checkpoint.load(path, refs, world(), besides=[name for name in shapes if name.split("/")[0] in (Q, ERROR)])
    return bench.reducer.resumed(updates)


LAYOUTS = [(2, {}), (4, {"dp": 2, "tp": 2}), (4, {"dp": 4, "ep": 2}), (4, {"dp": 2, "pp": 2})]


@pytest.mark.parametrize(
    ("ranks", "axes", "rank", "moved", "stopped"),
    [*((*layout, 2, 5, 7) for layout in LAYOUTS), (3, {}, 3, 1, 2)],
    ids=str,
)
def test_memory_is_of_parameters_not_of_buffers_and_outlives_a_stop(tmp_path, ranks, axes, rank, moved, stopped):
    """C58: buffers of another order from step 5 on, a stop after step 7; vectors, and a rank above the least dim."""

    def run(stops):
        world().set_deterministic(True)
        mesh = Mesh(world(), **axes)
        names = names_on(mesh)
        bench, found = Bench(mesh, names=names, rank=rank), []
        for step in range(9):
            if step in stops:
                path = saved(bench, tmp_path / str(ranks), step)
                bench = Bench(mesh, names=names[::-1] if step == moved else names, rank=rank)
                assert loaded(bench, path, step) == ""
            found.append({name: array.tobytes() for name, array in bench.step(step).items()})
        left = {name: tensor.array.tobytes() for name, tensor in bench.reducer.state_tensors()[ERROR].items()}
        return found, left

    assert on(ranks, run, ()) == on(ranks, run, (moved, stopped))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, {}), (2, {})),
        ((2, {}), (3, {})),
        ((3, {}), (1, {})),
        ((4, {"dp": 2, "tp": 2}), (2, {})),
        ((4, {"dp": 4, "ep": 2}), (2, {"ep": 2})),
        ((4, {"dp": 2, "pp": 2}), (2, {})),
        ((2, {"tp": 2}), (4, {"cp": 4})),
    ],
    ids=str,
)
def test_on_another_layout_the_sum_of_what_was_left_out_is_kept(tmp_path, before, after):
    """T26.7: of every tensor, whatever part of it ranks hold then; each has an equal share."""

    def on_layout(axes, path=None):
        mesh = Mesh(world(), **axes)
        bench, said = Bench(mesh, names=names_on(mesh)), ""
        for step in range(0 if path else 4):
            bench.step(step)
        if path is None:
            saved(bench, tmp_path, 4)
        else:
            said = loaded(bench, path, 4)
        mine, left = bench.reducer.state_tensors()[ERROR], bench.errors()
        sums = {p.name: (p.rectangle, left[p.name]) for p in bench.parameters if p.name in mine}
        return said, sums, {name: (tensor.full_shape[0], tensor.array[0]) for name, tensor in mine.items()}

    def whole(of_ranks):
        found = {}
        for _, sums, _ in of_ranks:
            for name, (rectangle, error) in sums.items():
                found.setdefault(name, np.full((SHAPES | checks.TIED)[name][0], np.nan))[rectangle] = error
        return found

    first = on(before[0], on_layout, before[1])
    kept = whole(first)
    adding = {name: ranks for *_, shares in first for name, (ranks, _) in shares.items()}
    again = on(after[0], on_layout, after[1], checkpoint.latest(tmp_path))
    assert any("shared out over another number of ranks" in said for said, *_ in again)
    assert any("Q begins anew" in said for said, *_ in again) == ("tp" in before[1])
    for name, error in whole(again).items():
        np.testing.assert_allclose(error, kept[name], atol=1e-13, err_msg=name)
        assert np.abs(error).max() > 0.1 or name == "narrow"
    for _, sums, shares in again:
        for name, (ranks, share) in shares.items():
            if ranks != adding[name]:
                np.testing.assert_allclose(share * ranks, sums[name][1], atol=1e-13, err_msg=name)


TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 1 --batch 12 --sample-length 0 --deterministic --steps 8".split()
POWERSGD = "--reducer powersgd --powersgd-rank 2 --save-every 3".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def losses(run):
    return [json.loads(line)["loss"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, "--dtype float16 --powersgd-start 4"),
        (2, "--powersgd-fixed"),
        (4, "--tp 2 --tied"),
        (2, "--pp 2 --tied --powersgd-tables"),
    ],
)
def test_a_run_that_stops_goes_on_as_if_it_had_not(tmp_path, text, ranks, how):
    flags = [*TINY, *POWERSGD, *how.split(), "--data", text]
    on(ranks, main, [*flags, "--run", str(tmp_path / "whole")])
    on(ranks, main, [*flags, "--run", str(tmp_path / "parts"), "--stop-after", "5"])
    on(ranks, main, ["--run", str(tmp_path / "parts"), "--resume", "latest"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    weights = [sorted(tmp_path.glob(f"{run}/checkpoints/step-00000006/*.h5")) for run in ("whole", "parts")]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (2, [], ""),
        (4, [], "PowerSGD: errors are shared out over another number of ranks\n"),
        (4, ["--tp", "2"], "PowerSGD: Q begins anew: those that were saved are of another rank or cut\n"),
        (2, ["--powersgd-rank", "1"], "PowerSGD: Q begins anew: those that were saved are of another rank or cut\n"),
        (2, ["--reducer", "flat"], "what PowerSGD left out of gradients is lost: --reducer flat adds none of it\n"),
        (2, ["--no-powersgd-feedback"], "what was left out of gradients is lost where they keep no errors any more"),
        (2, ["--powersgd-rank", "30"], "what was left out of gradients is lost where they keep no errors any more"),
    ],
    ids=str,
)
def test_what_cannot_go_on_as_it_was_is_said(tmp_path, text, capsys, ranks, flags, said):
    on(2, main, [*TINY, *POWERSGD, "--data", text, "--run", str(tmp_path / "run"), "--stop-after", "3"])
    capsys.readouterr()
    on(ranks, main, ["--run", str(tmp_path / "run"), "--resume", "latest", *flags])
    out = capsys.readouterr().out
    assert said in out
    assert ("PowerSGD: " in out or "what PowerSGD left" in out) == bool(said)
    assert "step 8/8" in out


def test_a_run_of_exact_sums_can_go_on_with_powersgd(tmp_path, text, capsys):
    run = str(tmp_path / "run")
    on(2, main, [*TINY, "--data", text, "--run", run, "--stop-after", "3"])
    on(2, main, ["--run", run, "--resume", "latest", "--reducer", "powersgd", "--powersgd-start", "1"])
    assert "PowerSGD: errors begin at zero\n" in capsys.readouterr().out
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("flags", [[], ["--powersgd-tables"], ["--powersgd-rank", "1"], ["--reducer", "flat"]], ids=str)
def test_before_the_first_compressed_step_there_is_nothing_to_go_on_with(tmp_path, text, capsys, flags):
    """Three ranks, then two: no error to be shared out, lost or begun, and no factor."""
    run = ["--run", str(tmp_path / "run")]
    on(3, main, [*TINY, *POWERSGD, "--data", text, *run, "--powersgd-start", "100", "--stop-after", "3"])
    capsys.readouterr()
    on(2, main, [*run, "--resume", "latest", *flags])
    assert "PowerSGD" not in capsys.readouterr().out.replace("PowerSGD of rank", "")


def test_what_is_compressed_from_now_on_has_errors_that_begin_at_zero(tmp_path, text, capsys):
    run = ["--run", str(tmp_path / "run")]
    on(2, main, [*TINY, *POWERSGD, "--data", text, *run, "--stop-after", "3"])
    capsys.readouterr()
    on(2, main, [*run, "--resume", "latest", "--powersgd-tables"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PowerSGD: ")]
    assert said == ["PowerSGD: errors of what was not compressed before begin at zero"]


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ("--powersgd-rank 2", "--powersgd-rank 2 is for --reducer powersgd; --reducer flat does not use it."),
        ("--reducer bucketed --powersgd-fixed", "--powersgd-fixed is for --reducer powersgd"),
        ("--no-powersgd-feedback", "--no-powersgd-feedback is for --reducer powersgd"),
        ("--reducer powersgd --zero 1", "--reducer powersgd and --zero 1: factors are made of whole gradients"),
        ("--reducer powersgd --powersgd-rank 0", "--powersgd-rank 0: must be a whole number from 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(flags, wrong):
    with pytest.raises(ConfigError) as caught:
        parse(flags.split())
    assert wrong in str(caught.value)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_schedules_of_several_versions_are_refused(schedule):
    flags = f"--steps 1 --reducer powersgd --pp 2 --clip 0 --schedule {schedule}"
    micros = [] if schedule == "pipedream" else ["--microbatches", "2"]
    with pytest.raises(ConfigError, match=f"--schedule {schedule} and --reducer powersgd"):
        on(2, main, [*flags.split(), *micros])


def test_another_reducer_leaves_the_options_of_the_one_before_behind(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('reducer = "powersgd"\npowersgd_rank = 7\n')
    assert parse(["--config", str(file)]).powersgd_rank == 7
    assert parse(["--config", str(file), "--reducer", "flat"]).powersgd_rank == 4


def test_the_start_block_says_what_is_compressed_and_what_it_sends(tmp_path, text, capsys):
    flags = "--reducer powersgd --powersgd-start 3 --powersgd-tables --powersgd-fixed --no-powersgd-feedback"
    on(2, main, [*TINY, "--data", text, "--run", str(tmp_path / "run"), *flags.split(), "--steps", "1"])
    out = capsys.readouterr().out
    assert re.search(r"compression +PowerSGD of rank 4: 7 of 17 tensors, 29,696 numbers as 4,608;", out)
    assert " after 3 updates; one random factor for all steps; no feedback of errors\n" in out
