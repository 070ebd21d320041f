"""The table's command measures, keeps, and goes on after a failure; each measurement does what it says, in small."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fma_peak
import growth
import step_split
import table
from rows import ROWS


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs table.py with flags and measurements of ours; gives the exit code, the output and what was kept."""

    def run(*flags, **measurements):
        monkeypatch.setattr(sys, "argv", ["table.py", "--result", str(tmp_path / "table.json"), *flags])
        for name, function in measurements.items():
            monkeypatch.setitem(table.MEASUREMENTS, name, function)
        code = table.main()
        kept = tmp_path / "table.json"
        return code, capsys.readouterr().out, json.loads(kept.read_text())["measurements"] if kept.exists() else {}

    return run


def ops(ratio):
    return lambda options: {
        "ops": {op: {"mpitrain": [ratio] * options.rounds, "torch": [1.0] * options.rounds} for op in ("add", "mul")}
    }


def adamw(options):
    return {"models": {"3 M": {"parameters": 3, "ns": {"mpitrain": [0.61234567], "torch": [1.0]}}}}


def broken(options):
    raise RuntimeError("no such machine")


def test_the_list_names_every_row(command):
    code, out, _ = command("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [row.name for row in ROWS]


def test_rows_are_measured_in_pieces_and_kept_together(command):
    command("--rows", "ops", "--rounds", "2", ops=ops(2.0))
    code, out, kept = command("--rows", "adamw", "--rounds", "1", AdamW=adamw)
    assert code == 0
    assert set(kept) == {"ops", "AdamW"}
    assert kept["ops"]["rounds"] == 2
    assert kept["AdamW"]["data"]["models"]["3 M"]["ns"]["mpitrain"] == [0.612346]
    assert kept["AdamW"]["about"]["versions"]["numpy"] == np.__version__
    assert "ambition" in next(line for line in out.splitlines() if line.startswith("adamw"))
    _, shown, _ = command("--show")
    assert "2.00-2.00" in next(line for line in shown.splitlines() if line.startswith("ops"))


def test_a_measurement_that_fails_leaves_the_others(command):
    code, out, kept = command("--rows", "ops", "adamw", ops=broken, AdamW=adamw)
    assert code == 1
    assert set(kept) == {"AdamW"}
    assert "not measured, see above: ops" in out


def test_only_what_is_missing_is_measured_again(command):
    command("--rows", "adamw", AdamW=adamw)
    code, _, kept = command("--rows", "adamw", "ops", "--missing", AdamW=broken, ops=ops(1.0))
    assert code == 0
    assert set(kept) == {"ops", "AdamW"}


def test_no_rounds_are_refused(command):
    with pytest.raises(SystemExit):
        command("--rounds", "0")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_peak_of_a_core_is_found(monkeypatch):
    monkeypatch.setattr(fma_peak, "STRETCH_S", 0.002)
    peak = fma_peak.Peak()
    assert peak.bits in (128, 256, 512)
    assert peak() > 1e9


def test_a_watched_step_sees_every_product_and_loses_no_time():
    training = step_split.Training("mini")
    seconds, flops = training.watched(2)
    config, tokens = training.config, training.batch * training.config.seq_len
    outside_attention = sum(count for kind, count in flops.items() if kind != step_split.ATTENTION_PRODUCTS)
    assert outside_attention == 6 * (12 * config.layers * config.width**2 + config.vocab * config.width) * tokens
    assert flops[step_split.FORWARD] == flops[step_split.BACKWARD] == flops[step_split.WEIGHTS]
    assert {
        "attention",
        "norms",
        "GELU",
        "AdamW",
        "loss",
        step_split.FORWARD,
        step_split.BACKWARD,
        step_split.WEIGHTS,
    } <= set(seconds)
    assert np.matmul.__class__ is np.ufunc


def test_each_moment_belongs_to_the_innermost_of_what_has_begun(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(step_split.time, "perf_counter", lambda: next(now))
    watch = step_split.Watch()  # at 0
    watch.begin("outer")  # 1
    watch.begin("inner")  # 2
    watch.end()  # 3
    watch.begin("inner")  # 4
    watch.end()  # 5
    watch.end()  # 6
    assert dict(watch.seconds) == {"rest": 1, "outer": 3, "inner": 2}


def test_the_share_outside_products_is_what_no_product_took():
    found = step_split.split(step_split.Training("mini"), 2)
    products = sum(ms for kind, ms in found["ms"].items() if kind.startswith("products"))
    assert found["outside"] == pytest.approx(1 - products / found["plain_ms"])
    assert 0 < found["outside"] < found["outside_with_attention"] < 1


@pytest.mark.parametrize("name", growth.SWEEPS)
def test_each_sweep_measures_all_its_parts_at_each_size(name, monkeypatch):
    measure, _, what = growth.SWEEPS[name]
    monkeypatch.setitem(growth.SWEEPS, name, (measure, (2, 4, 6), what))
    monkeypatch.setattr(growth, "STRETCH_S", 1e-4)
    parts = growth.measure([name], 1)[name]
    assert all(len(part["seconds"]) == 3 and min(part["seconds"]) > 0 for part in parts.values()), parts


def test_chains_of_both_sides_have_the_same_gradient(monkeypatch):
    pytest.importorskip("torch")
    import op_overhead

    monkeypatch.setattr(op_overhead, "LENGTH", 10)
    monkeypatch.setattr(op_overhead, "REPEATS", 1)
    found = op_overhead.measure(2)
    assert set(found) == {"add", "mul", "matmul", "gelu"}
    assert all(len(times) == 2 and min(times) > 0 for sides in found.values() for times in sides.values())


def test_both_optimizers_make_the_same_update():
    pytest.importorskip("torch")
    import adamw_cost

    config = adamw_cost.GPTConfig(layers=1, width=16, heads=2, seq_len=8)
    size, updates, pairs = adamw_cost.optimizers(config)
    assert size == config.num_parameters
    for update in updates.values():
        update()
        update()
    for p, tensor in pairs:
        np.testing.assert_allclose(p.data, tensor.detach().numpy(), rtol=0, atol=1e-6, err_msg=p.name)
