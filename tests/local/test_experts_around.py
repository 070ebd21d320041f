"""Whole models with experts, and what is around a step: norm, scaling, checkpoints, evaluation, text."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the checks are
import checks_layouts as checks
from reseal import rewrite

from mpitrain import checkpoint, keep, train
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import CheckpointError, ConfigError, DataError, MeshError
from mpitrain.models.generate import generate
from mpitrain.models.gpt import GPT
from mpitrain.optim.scaler import LossScaler
from mpitrain.parallel.data import FlatReducer
from mpitrain.parallel.replicas import check_replicas
from mpitrain.pipeline.executor import Executor
from mpitrain.pipeline.passes import complete
from mpitrain.routing import Routing

SWITCH = replace(checks.SIZES, dropout=0.0, routing=Routing(4, z_loss=1e-3, every=2))
TOP_2 = replace(checks.SIZES, dropout=0.1, routing=Routing(4, 2, "gshard", balance_loss=0.16, jitter=0.01))


def count(axes):
    """Ranks of a layout; ep is a part of dp."""
    return int(np.prod([axes.get(axis, 1) for axis in checks.AXES]))


def on(axes, main):
    """What each rank of a layout returns."""
    return LocalWorld(count(axes)).run(lambda: main(Mesh(world(), **axes)))


def executor_of(mesh, sizes, adafactor=False, dtype=np.float64, **how):
    model = GPT(sizes, mesh, seed=3, dtype=dtype)
    rows = complete("1f1b", ranks=mesh.pp.size, microbatches=2)
    return Executor(model, checks.method(model, adafactor=adafactor, mesh=mesh), mesh, rows, **how)


def batches(mesh, sizes, stop=5):
    return list(checks.numbers(sizes).batches(8, mesh.dp.rank, mesh.dp.size, stop_step=stop))


# ------------------------------------------------------------------------------------------------ norm and optimizer


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({"dp": 2, "ep": 2}, {"adafactor": True}),
        ({"dp": 4, "ep": 2, "tp": 2}, {"adafactor": True}),
        ({"dp": 2, "ep": 2, "tp": 2, "pp": 2, "sp": True}, {"adafactor": True}),
        ({"dp": 4, "ep": 4}, {"sgd": True}),
        ({"dp": 4, "ep": 2}, {"bucket_bytes": 4096, "micros": 2}),
        ({"dp": 2, "ep": 2, "cp": 2}, {"bucket_bytes": 4096, "scaling": "loss"}),
        ({"dp": 2, "ep": 2, "tp": 2}, {"scaling": "blocks"}),
    ],
    ids=str,
)
def test_norm_clipping_and_updates_are_those_of_one_rank(axes, how):
    """T28.1, four experts: each is counted once, whoever holds it, and what clips them is the norm of all."""
    LocalWorld(count(axes)).run(lambda: checks.equals_one_rank(world(), sizes=TOP_2, **axes, **how))


def test_scales_of_branches_change_nothing_of_a_router():
    """Its weight is in full precision and its losses are not the branch's output, yet both are inside of the branch."""
    plain = LocalWorld(1).run(lambda: checks.train(world(), sizes=TOP_2))[0]
    scaled = LocalWorld(1).run(lambda: checks.train(world(), sizes=TOP_2, scaling="blocks", scale=1000.0))[0]
    assert any(name.endswith("router.weight") for name in plain["gradients"])
    for kind, tensors in plain.items():
        worst = checks.compare(scaled[kind], tensors)[0]
        assert worst.ok, f"{kind}: {worst}"


@pytest.mark.parametrize("odd", [0, 1])
def test_all_ranks_skip_a_step_in_which_one_of_them_has_an_expert_that_overflowed(odd):
    """T28.4: nobody else holds that expert, so what the others see is finite."""

    class Overflows(FlatReducer):
        parameters = ()

        def finish(self):
            super().finish()
            for p in self.parameters:
                if p.name.endswith("experts.down"):
                    p.grad[-1, 0, 0] = np.inf

    def main(mesh):
        executor = executor_of(mesh, SWITCH, dtype=np.float16, scaler=LossScaler(2.0**8, hysteresis=1))
        executor.reducer = Overflows(executor.model.flats, mesh)
        before = [p.master.copy() for p in executor.model.parameters()]
        first, second = batches(mesh, SWITCH, stop=2)
        executor.reducer.parameters = executor.model.parameters() if mesh.ep.rank == odd else ()
        (report,) = executor.run([first])
        assert (report.skipped, report.next_scale, executor.optimizer.updates) == (True, 2.0**7, 0)
        assert all(np.array_equal(p.master, old) for p, old in zip(executor.model.parameters(), before, strict=True))
        executor.reducer.parameters = ()
        (report,) = executor.run([second])
        assert (report.skipped, executor.optimizer.updates) == (False, 1)
        return report

    found = on({"dp": 2, "ep": 2}, main)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------------- checkpoints


HERE = {"dp": 2, "ep": 2, "tp": 2}


@pytest.mark.parametrize(
    ("sizes", "adafactor", "dtype", "elsewhere"),
    [
        (SWITCH, False, np.float64, [{"pp": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "pp": 2}]),
        (TOP_2, True, np.float64, [{}, {"dp": 4, "ep": 4}]),
        (TOP_2, False, np.float16, [{}, {"dp": 2, "ep": 2}]),
    ],
    ids=["adamw", "adafactor", "float16"],
)
def test_experts_are_saved_whole_and_go_on_wherever_they_are_put(tmp_path, sizes, adafactor, dtype, elsewhere):
    """Saved on ep 2 x tp 2.  The same bits are loaded; the curve is the same to the digits that sums have."""

    def main(mesh, save=False):
        executor = executor_of(mesh, sizes, adafactor, dtype)
        model, method = executor.model, executor.optimizer
        tensors = checkpoint.slabs_of(model.parameters(), method.state_tensors(), mesh)
        *before, last = batches(mesh, sizes, stop=3)
        if save:
            for batch in before:
                executor.step(batch)
            checkpoint.save(tmp_path, 2, tensors, {"updates": method.updates}, mesh.world, layout=mesh.sizes)
        else:
            method.updates = checkpoint.load(checkpoint.latest(tmp_path), tensors, mesh.world)["updates"]
            for flat in model.flats:
                flat.refresh()
        check_replicas(model.parameters(), mesh, "after loading")
        masters = [p.master.astype(np.float64) for p in model.parameters()]
        state = {
            "weight": checks.whole(mesh.world, mesh, model.parameters(), masters),
            **checks.states(mesh.world, mesh, method),
        }
        return state, executor.step(last)

    saved, loss = on(HERE, lambda mesh: main(mesh, save=True))[0]
    kept = checkpoint.read_manifest(checkpoint.latest(tmp_path)).tensors
    wide = "float32" if dtype == np.float16 else "float64"
    experts, width = sizes.routing.experts, sizes.width
    for kind, shape in (("weight", (experts, width, 4 * width)), ("row_sums", (experts, width))):
        if kind in saved:
            tensor = kept[f"{kind}/blocks.1.mlp.experts.up"]
            assert (tensor.shape, tensor.dtype) == (shape, wide)
            assert len(tensor.slabs) == (4 if kind == "weight" else 2)
    assert kept["weight/blocks.1.mlp.router.weight"].dtype == wide
    for axes in (*elsewhere, HERE):
        loaded, again = on(axes, main)[0]
        for kind, tensors in saved.items():
            assert loaded[kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert loaded[kind][name].tobytes() == tensor.tobytes(), (axes, kind, name)
        assert again == pytest.approx(loss, rel=5e-3 if dtype == np.float16 else 1e-10), axes
    assert again == loss  # of the layout that saved, bit for bit


# ------------------------------------------------------------------------------------------------------- evaluation


def windows(sizes, number):
    """One batch of the whole validation text, as it lies on one rank."""
    return next(iter(checks.numbers(sizes).validation(4, number % 4, 4)))


def test_ranks_of_edp_may_evaluate_other_numbers_of_batches():
    """The mean is that over all targets of all batches, however many each set of experts has gone through."""

    def main(mesh, numbers):
        return executor_of(mesh, SWITCH).evaluate([windows(SWITCH, number) for number in numbers(mesh)])

    (whole,) = on({}, lambda mesh: main(mesh, lambda _: [0, 1, 2, 3, 0, 1]))
    for axes in ({"dp": 4, "ep": 2}, {"dp": 4, "ep": 2, "pp": 2}):
        found = on(axes, lambda mesh: main(mesh, lambda m: [[0, 1], [2, 3], [0], [1]][m.dp.rank]))
        assert found == pytest.approx([whole] * len(found), rel=1e-12)
        assert len(set(found)) == 1


@pytest.mark.parametrize("axes", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("fewer", [0, 2])
def test_ranks_of_ep_that_evaluate_other_numbers_of_batches_are_told(axes, fewer):
    """Else those with one more would wait for experts that nobody asks."""

    def main(mesh):
        number = fewer if mesh.dp.rank == 1 else 3
        executor = executor_of(mesh, SWITCH)
        with pytest.raises(
            DataError, match=rf"rank 1 ran out of batches, after {fewer}, while rank 0 has more"
        ) as told:
            executor.evaluate([windows(SWITCH, place) for place in range(number)])
        return str(told.value)

    messages = on(axes, main)
    assert len(set(messages)) == 1
    assert len(messages[0].splitlines()) <= 5


# ------------------------------------------------------------------------------------------------------------- text


def test_ranks_that_share_experts_write_the_text_of_one_rank_together():
    """Whoever holds experts that a token needs takes part; replicas of them do not."""

    def main(mesh):
        model = GPT(TOP_2, mesh, seed=3, dtype=np.float64, sequence_parallel=mesh.tp.size > 1)
        if mesh.edp.rank:
            return None
        return list(generate(model, [3, 1, 4, 1, 5], 12, seed=7, temperature=1.0))

    (text,) = on({}, main)
    assert len(set(text)) > 3
    for axes in ({"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}, {"dp": 4, "ep": 2, "pp": 2}):
        found = on(axes, main)
        assert found.count(text) == count(axes) // (axes["dp"] // axes["ep"]), axes
        assert found.count(None) == len(found) - found.count(text)


# --------------------------------------------------------------------------------------------------------- whole runs


FLAGS = "--model gpt-tiny --layers 2 --batch 8 --lr 0.01 --sample-length 12 --dtype float64 --steps 4 --eval-every 2"
FLAGS += " --experts 4 --top-k 2 --moe-every 2"


def run(layout, folder, text, *flags):
    words = layout.split()
    sizes = {flag[2:]: int(size) for flag, size in zip(words[::2], words[1::2], strict=True)}
    LocalWorld(count(sizes)).run(train.main, [*FLAGS.split(), "--data", text, "--run", str(folder), *words, *flags])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [{key: line[key] for key in ("step", "loss", "grad_norm", "val_loss") if key in line} for line in lines]
    sample = folder / "sample.txt"
    return curve, sample.read_text() if sample.exists() else ""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bottles"
    path.write_text("".join(f"{n} bottles of milk; take {n % 7} down.\n" for n in range(400)))
    return str(path)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory, text):
    return run("", tmp_path_factory.mktemp("run") / "one", text)


@pytest.mark.parametrize("layout", ["--dp 2 --ep 2", "--dp 2 --ep 2 --tp 2", "--dp 4 --ep 2 --pp 2 --microbatches 2"])
def test_curve_and_text_of_a_run_with_experts_do_not_depend_on_the_layout(tmp_path, text, on_one_rank, layout):
    curve, sample = run(layout, tmp_path / "run", text)
    for one, other in zip(on_one_rank[0], curve, strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    assert sample == on_one_rank[1] != ""


def test_a_run_with_experts_goes_on_in_another_layout_and_as_no_other_model(tmp_path, text, on_one_rank):
    folder = tmp_path / "run"
    run("--dp 2 --ep 2", folder, text, "--stop-after", "2")
    for words, flags in (
        ("saved with top_k 2, now it is 1", "--top-k 1"),
        ("saved with experts 4, now it is 8", "--experts 8"),
        ("saved with router gshard, now it is topk", "--router topk"),
    ):
        with pytest.raises(CheckpointError, match=words):
            run("", folder, text, "--resume", "latest", "--ep", "1", *flags.split())
    with pytest.raises(MeshError, match=r"--ep of the saved run .* holds until a flag changes it"):
        LocalWorld(1).run(train.main, ["--run", str(folder), "--resume", "latest"])
    curve, sample = run("--dp 4 --ep 4", folder, text, "--resume", "latest")
    for one, other in zip(on_one_rank[0], curve, strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    assert sample == on_one_rank[1]


def test_a_run_with_experts_goes_on_with_no_flag_but_what_changes(tmp_path, text, on_one_rank):
    """Alone such a flag does not even say that there are experts."""
    folder = tmp_path / "run"
    run("", folder, text, "--capacity-factor", "1.25", "--stop-after", "2")
    go_on = ["--run", str(folder), "--resume", "latest"]
    with pytest.raises(ConfigError, match="--experts 4 is not divisible by --ep 3"):
        LocalWorld(3).run(train.main, [*go_on, "--ep", "3"])
    LocalWorld(2).run(train.main, [*go_on, "--ep", "2", "--stop-after", "3"])
    LocalWorld(1).run(train.main, [*go_on, "--ep", "1", "--dropless"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses, wanted = ([step["loss"] for step in steps[:3]] for steps in (lines, on_one_rank[0]))
    assert losses == pytest.approx(wanted, rel=1e-10)
    dropped = [line["routing"]["blocks.1.mlp"]["dropped"] for line in lines]
    assert all(dropped[:3])
    assert dropped[3] == 0


def test_a_run_that_was_saved_before_there_were_experts_goes_on(tmp_path, text):
    """Its settings do not name them."""
    folder = tmp_path / "run"
    dense = [*FLAGS[: FLAGS.index(" --experts")].split(), "--data", text]
    LocalWorld(1).run(train.main, [*dense, "--run", str(folder), "--stop-after", "2"])
    (folder / "config.toml").unlink()

    def leave_out(whole):
        for name in keep.OLDER:
            del whole["scalars"]["config"][name]

    rewrite(checkpoint.latest(folder), leave_out)
    with pytest.raises(CheckpointError, match="saved with experts None, now it is 4"):
        LocalWorld(1).run(train.main, ["--run", str(folder), "--resume", "latest", "--experts", "4"])
    LocalWorld(1).run(train.main, ["--run", str(folder), "--resume", "latest"])
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"routing": Routing(4, z_loss=1e-3, every=2, capacity_factor=0.5)},
            "routing.capacity_factor is 0.5, not 1.25",
        ),
        ({"routing": Routing(4, z_loss=1e-3, every=2, jitter=0.1)}, "routing.jitter is 0.1, not 0.0"),
        ({"routing": Routing(4, 2, "topk", z_loss=1e-3, every=2)}, "routing.top_k is 2, not 1"),
        ({"routing": None}, "routing.experts is None, not 4"),
        ({"dropout": 0.25}, "dropout is 0.25, not 0.0"),
    ],
)
def test_ranks_with_different_models_are_told_so_before_the_first_step(other, text):
    def main():
        mesh = Mesh(world(), dp=2, ep=2, tp=2)
        executor_of(mesh, replace(SWITCH, **other) if world().rank == 2 else SWITCH)

    with pytest.raises(ConfigError) as error:
        LocalWorld(4).run(main)
    assert f"rank 2 has another model than rank 0: {text}" in str(error.value)
