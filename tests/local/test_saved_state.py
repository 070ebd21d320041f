"""What a checkpoint holds: all that a run needs, each element once, 12 bytes a parameter; and the place in the text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the watch is
from kept_state import TEXT, Watch, different, written
from resume_damaged import SCHEMES, after_damage
from resume_points import Runs

from mpitrain import checkpoint
from mpitrain.checkpoint import SlabRef
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.data.corpus import load
from mpitrain.data.tokens import Tokens
from mpitrain.train import main


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


# ---------------------------------------------------------------------------------------------------------------- bytes

MINI = "--model gpt-mini --batch 4 --seq-len 8 --steps 9 --sample-length 0 --eval-every 0 --stop-after 1".split()
OF_AN_ELEMENT = {"adamw": 3, "sgd": 2}


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ""),
        pytest.param(4, "", marks=pytest.mark.slow),
        pytest.param(4, "--zero 1", marks=pytest.mark.slow),
        pytest.param(2, "--zero 2", marks=pytest.mark.slow),
        (4, "--zero 3 --dtype float16"),
        pytest.param(4, "--tp 2 --pp 2 --tied --microbatches 2", marks=pytest.mark.slow),
        pytest.param(2, "--dtype bfloat16 --cp 2", marks=pytest.mark.slow),
        pytest.param(1, "--dtype float64", marks=pytest.mark.slow),
        pytest.param(3, "--optimizer sgd --batch 3", marks=pytest.mark.slow),
        pytest.param(1, "--offload optimizer,parameters", marks=pytest.mark.slow),
        pytest.param(4, "--experts 4 --ep 2 --top-k 2", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_has_12_bytes_a_parameter_whoever_writes_it(tmp_path, text, ranks, flags):
    """T29.5: weights and moments in float32, each element once, and less than one part in a hundred besides."""
    run = tmp_path / "run"
    words = [*MINI, *flags.split(), "--data", str(text), "--run", str(run)]
    with Watch(only=[1]) as watch:
        LocalWorld(ranks).run(main, words)
    state = watch.states[1]
    parameters = sum(tensor.size for name, tensor in state.tensors.items() if name.startswith("weight/"))
    of_an_element = (8 if "float64" in flags else 4) * OF_AN_ELEMENT["sgd" if "sgd" in flags else "adamw"]
    folder = run / "checkpoints" / "step-00000001"
    manifest = checkpoint.read_manifest(folder)
    slabs = [(t, slab) for t in manifest.tensors.values() for slab in t.slabs]
    stored = sum(int(np.prod(slab.shape)) * np.dtype(t.dtype).itemsize for t, slab in slabs)
    assert stored == of_an_element * parameters == sum(tensor.nbytes for tensor in state.tensors.values())
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert on_disk - stored < 0.01 * stored + 4096 * len(slabs)
    assert on_disk - stored < 0.13 * stored  # though the model is tiny


def test_settings_and_versions_that_change_results_are_saved(tmp_path, text):
    words = [*MINI, "--gelu", "erf", "--dtype", "float16", "--data", str(text), "--run", str(tmp_path / "run")]
    LocalWorld(1).run(main, words)
    whole = written(tmp_path / "run" / "checkpoints" / "step-00000001")
    scalars = whole["scalars"]
    assert {"mpitrain", "python", "numpy", "h5py", "hdf5"} <= whole["versions"].keys()
    assert (scalars["config"]["gelu"], scalars["config"]["seed"], scalars["config"]["lr"]) == ("erf", 0, 0.0025)
    assert (scalars["config"]["lr_schedule"], scalars["config"]["steps"]) == ("cosine", 9)
    assert scalars["scaler"] == {"scale": 65536.0, "clean": 1, "left": 2, "skipped": 0}
    assert (scalars["updates"], scalars["tokens"], scalars["data"]["next_step"]) == (1, 4 * 8, 1)


def test_ranks_may_have_nothing_to_write_and_tensors_no_elements(tmp_path):
    """C66: three rows over four ranks, a number, nothing at all; every rank takes part in all that is collective."""
    full = {"rows": np.arange(6.0).reshape(3, 2), "number": np.array(7.0), "nothing": np.empty((0, 4))}

    def mine(array, rank):
        """One row a rank, of what has rows; there are fewer than ranks."""
        here = [slice(min(rank, len(array)), min(rank + 1, len(array)))] if array.ndim else []
        return *here, *(slice(0, length) for length in array.shape[1:])

    def body():
        ranks = world()
        places = {name: mine(array, ranks.rank) for name, array in full.items()}
        holders = {"rows": (0, 1), "number": (ranks.rank, 4), "nothing": (0, 1)}
        slabs = [
            SlabRef(name, array.shape, places[name], np.array(array[places[name]]), holders[name])
            for name, array in full.items()
        ]
        path = checkpoint.save(tmp_path, 1, slabs, {}, ranks)
        for slab in slabs:
            slab.array[...] = -1
        checkpoint.load(path, slabs, ranks)
        for slab in slabs:
            np.testing.assert_array_equal(slab.array, full[slab.name][slab.rectangle])

    LocalWorld(4).run(body)


# ----------------------------------------------------------------------------------------------------------- background


@pytest.mark.parametrize(
    "name",
    [
        "ZeRO 2, float16",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("PowerSGD", "stale", "offload", "experts", "ZeRO 3")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline, two versions", "adafactor", "local")),
    ],
)
def test_a_save_in_the_background_holds_the_step_at_which_it_began(tmp_path, name):
    """Training goes on meanwhile, and writes in place what is being saved."""
    assert Runs(tmp_path, name).background(4) == []


# ----------------------------------------------------------------------------------------------------------------- data


def batches(folder, ranks, *flags):
    """What every step of a run reads."""
    words = "--model gpt-tiny --layers 1 --width 8 --heads 2 --seq-len 4 --batch 3 --lr 0.01 --steps 120".split()
    words += ["--sample-length", "0", "--eval-every", "0", "--data", str(folder / "short"), *flags]
    with Watch(only=[]) as watch:
        LocalWorld(ranks).run(main, words)
    return watch.data()


def test_a_run_that_stops_in_the_second_epoch_goes_on_with_its_order(tmp_path):
    """C71: three epochs of 40 batches, the last of each short of a row; after 57 another number of ranks goes on."""
    (tmp_path / "short").write_text(TEXT[:505])
    tokens = Tokens(load(str(tmp_path / "short")), 4)
    assert tokens.order(3).steps_per_epoch == 40
    whole = batches(tmp_path, 1, "--run", str(tmp_path / "whole"))
    before = batches(tmp_path, 1, "--run", str(tmp_path / "parts"), "--stop-after", "57")
    after = batches(tmp_path, 3, "--run", str(tmp_path / "parts"), "--resume", "latest")
    assert {**before, **after} == whole
    assert (min(after), max(after), len(before)) == (57, 119, 57)
    epochs = [[tuple(row) for step in range(first, first + 40) for row in whole[step]] for first in (0, 40, 80)]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("damage", [pytest.param("cut", marks=pytest.mark.slow), "gone"])
def test_where_a_file_of_the_newest_is_damaged_the_one_before_is_gone_on_from(tmp_path, text, capsys, damage):
    """C63: not by its name; all ranks go on from the same step, and a message says what was passed over."""
    run = tmp_path / "run"
    words = [*MINI[:-2], "--zero", "1", "--data", str(text), "--run", str(run)]
    with Watch(only=[2]) as watch:
        LocalWorld(2).run(main, [*words, "--save-every", "2", "--stop-after", "4"])
    files = sorted((run / "checkpoints" / "step-00000004").glob("*.h5"))
    assert len(files) == 2
    if damage == "gone":
        files[1].unlink()
    else:
        with files[1].open("r+b") as file:
            file.truncate(files[1].stat().st_size - 1)
    capsys.readouterr()
    with Watch(only=[2]) as again:
        LocalWorld(2).run(main, [*words, "--resume", "latest", "--stop-after", "3"])
    out = capsys.readouterr().out
    assert "Passed over: " in out
    assert files[1].name in out
    assert "go on after step 2" in out
    assert different(again.states[2], watch.states[2]) == []
    shutil.rmtree(run)


@pytest.mark.parametrize(
    "name", ["PowerSGD", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES if name != "PowerSGD")]
)
def test_nothing_is_left_of_a_checkpoint_that_turned_out_to_be_damaged(tmp_path, name):
    """Damage is found block by block, when much was filled already; what the older one does not have begins anew."""
    assert after_damage(tmp_path, name) == []
