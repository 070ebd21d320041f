"""A checkpoint of any layout goes on in any other: a ring here, all pairs by `python tests/resume_layouts.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the table is
from kept_state import TEXT, Watch
from resume_layouts import LAYOUTS, Matrix

from mpitrain.comm.local import LocalWorld
from mpitrain.errors import CheckpointError
from mpitrain.train import main

RINGS = {
    ("dense", "float64"): [
        "one rank",
        "tp3, words that do not divide",
        "dp3 pp2, interleaved, ZeRO 1",
        "dp3, ZeRO 3",
        "cp2",
        "pp2, slices",
    ],
    ("experts", "float32"): [
        "dp4 ep2, ZeRO 3",
        "pp2, interleaved",
        "dp3, float16",
        "offload",
        "dp2 tp2, sequence parallel",
        "ep2",
    ],
}
"""Each layout loads what the one before has saved, the first what the last has: 12 pairs."""


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    return {of: Matrix(tmp_path_factory.mktemp(of[0]), *of) for of in RINGS}


@pytest.mark.parametrize(
    ("of", "saves", "loads"),
    [(of, ring[place - 1], name) for of, ring in RINGS.items() for place, name in enumerate(ring)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_one_layout_saved_another_loads_and_goes_on_with(matrices, of, saves, loads):
    """T29.4, C55, C34: all tensors to the bit; the next step and its rows are those of one rank that never stopped."""
    assert matrices[of].pair(saves, loads) == []


BESIDE = {
    ("dense", "float64"): [
        "dp2 tp2, sequence parallel",
        "dp6, ZeRO 2",
        "pp3, zb-h1",
        "offload",
        "dp5, buckets",
        "pp2 cp2 tp2",
    ],
    ("experts", "float32"): [
        "dp2 ep2 tp2, overlap",
        "dp4 ep4, ZeRO 1",
        "tp3, words that do not divide",
        "cp3, Ulysses, ZeRO 3",
        "pp2 cp2, float16, ZeRO 3",
        "dp2, state offloaded",
    ],
}
"""With those of the rings twelve."""


@pytest.mark.slow
@pytest.mark.parametrize("of", RINGS, ids=" ".join)
def test_twelve_layouts_load_what_each_other_saved(matrices, of):
    chosen = [*RINGS[of], *BESIDE[of]]
    found = {(saves, loads): matrices[of].pair(saves, loads) for saves in chosen for loads in chosen}
    assert {pair: wrong for pair, wrong in found.items() if wrong} == {}
    assert len(found) == 144


def test_the_table_has_what_layouts_differ_by():
    """Odd numbers of ranks, rows that do not divide, every axis, every stage of ZeRO, stores, schedules."""
    flags = " ".join(layout.flags for layout in LAYOUTS.values())
    for word in (
        "--tp",
        "--pp",
        "--cp",
        "--ep",
        "--zero 1",
        "--zero 2",
        "--zero 3",
        "--offload",
        "interleaved",
        "zb-h1",
    ):
        assert word in flags
    assert {3, 5, 6} <= {layout.ranks for layout in LAYOUTS.values()}


# ------------------------------------------------------------------------------------------------------ other precision

FLAGS = (
    "--model gpt-tiny --layers 1 --width 16 --seq-len 8 --batch 4 --steps 8 --sample-length 0 --deterministic".split()
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT)
    return str(path)


def train(run, text, *flags):
    with Watch() as watch:
        LocalWorld(2).run(main, [*FLAGS, "--data", text, "--run", str(run), *flags])
    return watch


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("float32", "float16", "gradients begin with a new scale"),
        pytest.param("float16", "bfloat16", "gradients have no scale", marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", "gradients have no scale", marks=pytest.mark.slow),
    ],
)
def test_precisions_with_masters_of_float32_go_on_in_one_another(tmp_path, text, capsys, before, after, said):
    saved = train(tmp_path / "run", text, "--dtype", before, "--stop-after", "4")
    capsys.readouterr()
    loaded = train(tmp_path / "run", text, "--dtype", after, "--resume", "latest")
    one, other = saved.states[4], loaded.states[4]
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.tobytes() == other.tensors[name].tobytes(), name
    out = capsys.readouterr().out
    assert f"{after} from here on, {before} before: masters stay float32, and {said}" in out
    assert "step 8/8" in out


def test_a_new_scale_is_the_first_one_again(tmp_path, text):
    """That of the float16 run before has fallen; bfloat16 in between has none."""
    scale = ["--loss-scale", "1073741824"]
    run = tmp_path / "run"
    fallen = train(run, text, "--dtype", "float16", *scale, "--stop-after", "3").states[3].numbers["scale"]
    assert fallen["scale"] < 2.0**30
    train(run, text, "--dtype", "bfloat16", "--resume", "latest", "--stop-after", "4")
    anew = train(run, text, "--dtype", "float16", *scale, "--resume", "latest", "--stop-after", "5").states[4]
    assert anew.numbers["scale"] == {"scale": 2.0**30, "clean": 0, "left": 2, "skipped": 0}


@pytest.mark.parametrize(("before", "after"), [("float64", "float32"), ("float16", "float64")])
def test_float64_goes_on_in_float64_only(tmp_path, text, before, after):
    train(tmp_path / "run", text, "--dtype", before, "--stop-after", "2")
    with pytest.raises(CheckpointError, match=f"with dtype {before}, now it is {after}: float64 is another run"):
        train(tmp_path / "run", text, "--dtype", after, "--resume", "latest")
