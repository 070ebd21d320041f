"""The trainer with stale gradients and local SGD: it stops and goes on without a trace, and says what it computes."""

import hashlib
import json
from pathlib import Path

import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.config import Config
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 1 --width 16 --batch 12 --lr 0.01 --dropout 0.1 --deterministic --sample-length 4"
SCHEMES = {
    "stale": "--reducer stale --staleness 3",
    "stale workers": "--reducer stale --staleness 2 --stale-workers",
    "local": "--reducer local --local-steps 2",
    "local, averaged moments": "--reducer local --local-steps 2 --average-moments --optimizer sgd",
    # Its first three steps are skipped, so each save falls between two averages.
    "local, float16": "--reducer local --local-steps 2 --dtype float16 --loss-scale 524288 --save-every 2",
    "local, adafactor": "--reducer local --local-steps 2 --optimizer adafactor",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def train(ranks, run, text, flags):
    LocalWorld(ranks).run(main, [*TINY.split(), "--data", text, "--run", str(run), *flags.split()])


def metrics(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]


def state(run, step):
    """Digest of every file of tensors of a checkpoint."""
    folder = Path(run) / "checkpoints" / f"step-{step:08}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.h5"))}


@pytest.mark.parametrize(("name", "stop"), [("stale", 2), *((name, 6) for name in SCHEMES)])
def test_stopping_and_going_on_gives_the_same_bits(tmp_path, text, name, stop):
    """Also before the first gradient has arrived, and an evaluation between two averages changes nothing."""
    flags = f"--steps 8 --save-every 8 --eval-every 3 {SCHEMES[name]}"
    train(3, tmp_path / "whole", text, flags)
    train(3, tmp_path / "parts", text, f"{flags} --stop-after {stop}")
    train(3, tmp_path / "parts", text, "--resume latest")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert state(tmp_path / "parts", 8) == state(tmp_path / "whole", 8) != {}


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_run_is_stopped_before_at_and_after_the_start_of_lateness(tmp_path, text, stop):
    """Two updates on time, two steps without one, then late ones; the state of the optimizer may live elsewhere."""
    flags = "--steps 7 --save-every 7 --reducer stale --staleness 2 --stale-start 2"
    train(2, tmp_path / "whole", text, flags)
    train(2, tmp_path / "parts", text, f"{flags} --stop-after {stop}")
    train(2, tmp_path / "parts", text, "--resume latest --offload optimizer")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert state(tmp_path / "parts", 7) == state(tmp_path / "whole", 7) != {}


def test_stale_gradients_go_on_in_another_layout(tmp_path, text):
    flags = f"{SCHEMES['stale']} --dtype float64 --steps 7"
    train(1, tmp_path / "one", text, flags)
    train(2, tmp_path / "two", text, f"{flags} --tp 2 --stop-after 5")
    train(4, tmp_path / "two", text, "--resume latest --tp 1 --pp 1")
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_a_validation_loss_and_a_sample_are_those_of_the_average(tmp_path, text):
    """The loss after step 3 of a run that averages every third step, and of one that never did until then."""
    for every in (3, 4):
        train(2, tmp_path / str(every), text, f"--reducer local --local-steps {every} --steps 3")
    assert metrics(tmp_path / "3") == metrics(tmp_path / "4")
    assert (tmp_path / "3" / "sample.txt").read_text() == (tmp_path / "4" / "sample.txt").read_text()


def test_what_cannot_go_on_is_told_or_refused(tmp_path, text, capsys):
    train(3, tmp_path / "stale", text, f"{SCHEMES['stale']} --steps 9 --stop-after 5")
    with pytest.raises(CheckpointError, match=r"gradients of 3 steps on their way to the weights, staleness 2"):
        train(3, tmp_path / "stale", text, "--resume latest --staleness 2")
    with pytest.raises(CheckpointError, match="staleness 3 after 9 updates means 3"):
        train(3, tmp_path / "stale", text, "--resume latest --stale-start 9")
    with pytest.raises(CheckpointError, match="workers that are up to 3 steps late"):
        train(3, tmp_path / "stale", text, "--resume latest --stale-workers")
    capsys.readouterr()
    train(3, tmp_path / "stale", text, "--resume latest --reducer flat")
    assert "gradients on their way to the weights are lost: --reducer flat takes none" in capsys.readouterr().out
    train(3, tmp_path / "workers", text, f"{SCHEMES['stale workers']} --steps 4 --stop-after 2")
    with pytest.raises(CheckpointError, match="than those of 2 workers"):
        train(2, tmp_path / "workers", text, "--resume latest")
    train(3, tmp_path / "local", text, f"{SCHEMES['local']} --steps 4 --stop-after 2")
    train(2, tmp_path / "local", text, "--resume latest")
    assert "all workers go on with the moments of the first" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--reducer flat", "--average-moments --optimizer sgd --momentum 0.5"])
def test_moments_of_workers_that_are_left_behind_are_told(tmp_path, text, capsys, flags):
    method = flags.partition("--optimizer")
    train(2, tmp_path, text, f"{SCHEMES['local']} {''.join(method[1:])} --steps 4 --stop-after 2")
    capsys.readouterr()
    train(2, tmp_path, text, f"--resume latest {method[0]}")
    out = capsys.readouterr().out
    assert ("moments of all workers but the first are lost" in out) == ("flat" in flags)
    assert ("with the moments of the first: those of the others are lost" in out) == ("flat" not in flags)


def test_workers_that_part_from_a_synchronous_run_have_lost_nothing(tmp_path, text, capsys):
    train(2, tmp_path, text, "--steps 4 --stop-after 2")
    train(2, tmp_path, text, "--resume latest --reducer local --local-steps 2")
    out = capsys.readouterr().out
    assert "step 4/4" in out
    assert "moments" not in out


def test_a_run_may_become_late_and_stop_again_before_the_first_late_gradient(tmp_path, text, capsys):
    """Three steps on time, then two without an update; a stop between them changes nothing."""
    train(2, tmp_path / "whole", text, "--steps 8 --stop-after 3")
    train(2, tmp_path / "whole", text, "--resume latest --reducer stale --staleness 2 --save-every 8")
    said = "the next 2 steps make no update: staleness is 2, and gradients of 0 steps are on their way"
    assert said in capsys.readouterr().out
    train(2, tmp_path / "parts", text, "--steps 8 --stop-after 3")
    train(2, tmp_path / "parts", text, "--resume latest --reducer stale --staleness 2 --save-every 8 --stop-after 4")
    capsys.readouterr()
    train(2, tmp_path / "parts", text, "--resume latest")
    assert "the next step makes no update: staleness is 2, and gradients of 1 step are" in capsys.readouterr().out
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert state(tmp_path / "parts", 8) == state(tmp_path / "whole", 8) != {}


def test_workers_may_become_late(tmp_path, text, capsys):
    train(3, tmp_path, text, "--steps 6 --stop-after 3")
    train(3, tmp_path, text, "--resume latest --reducer stale --staleness 2 --stale-workers")
    out = capsys.readouterr().out
    assert "no worker was late up to here: what late ones hand in counts as zero until it has arrived" in out
    assert "step 6/6" in out


def test_the_start_says_what_is_computed(tmp_path, text, capsys):
    said = {
        "stale": "gradients come 3 steps late: the same on every layout, and not what synchronous training computes",
        "stale workers": "gradients of worker i come i mod 3 steps late: every layout is a training run of its own",
        "local": "workers learn apart for 2 steps, then their weights are averaged: every layout is",
        "local, averaged moments": "workers learn apart for 2 steps, then their weights and moments are averaged",
    }
    for name, line in said.items():
        train(2, tmp_path / name, text, f"{SCHEMES[name]} --steps 1")
        assert f"\n  asynchronous   {line}" in capsys.readouterr().out
    train(2, tmp_path / "later", text, f"{SCHEMES['stale']} --stale-start 20 --steps 1")
    assert "gradients come 3 steps late after 20 updates: the same" in capsys.readouterr().out


def test_gradients_on_their_way_have_a_line_in_the_table_of_memory_as_predicted(tmp_path, text, capsys):
    """Worker 2 of 3 is late by two steps, and has two gradients of as many bytes as its own."""
    train(3, tmp_path / "run", text, f"{SCHEMES['stale workers']} --steps 3 --memory")
    lines = capsys.readouterr().out.split("memory after step 3")[1].splitlines()
    of = {line[:20].strip(): line[20:].split() for line in lines}
    gradients, pending = (of[owner][:4] for owner in ("gradients", "pending gradients"))
    assert pending == [f"{2 * float(gradients[0]):.2f}"] * 4


def test_as_many_gradients_are_held_as_there_are_steps(tmp_path, text, capsys):
    """A vector is made when it is first filled: 10,000 of them would not be worth three steps."""
    train(2, tmp_path / "run", text, "--reducer stale --staleness 10000 --steps 3 --memory")
    lines = capsys.readouterr().out.split("memory after step 3")[1].splitlines()
    of = {line[:20].strip(): line[20:].split() for line in lines}
    now, _, largest, predicted = (float(number) for number in of["pending gradients"][:4])
    assert now == largest == predicted == pytest.approx(3 * float(of["gradients"][0]), abs=0.02)


def test_every_value_may_be_checked_while_workers_learn_apart(tmp_path, text):
    train(4, tmp_path / "run", text, "--reducer local --local-steps 3 --steps 5 --check --tp 2 --sequence-parallel")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"staleness": 2}, "--staleness 2 is for --reducer stale"),
        ({"local_steps": 4, "reducer": "stale"}, "--local-steps 4 is for --reducer local"),
        ({"reducer": "stale", "stale_workers": True, "staleness": 0}, "no worker would be late"),
        ({"stale_start": 2}, "--stale-start 2 is for --reducer stale"),
        ({"reducer": "stale", "stale_workers": True, "stale_start": 2}, "--stale-workers and --stale-start 2"),
        ({"reducer": "stale", "zero": 1}, "--reducer stale and --zero 1: it works with whole gradients"),
        ({"reducer": "local", "zero": 3}, "--reducer local and --zero 3"),
        ({"reducer": "local", "save_every": 12}, "--save-every 12 is not divisible by --local-steps 8: .* Try 16"),
        ({"reducer": "local", "stop_after": 3}, "--stop-after 3 is not divisible by --local-steps 8: .* Try 8"),
        (
            {"reducer": "local", "average_moments": True, "optimizer": "adafactor"},
            "--average-moments and --optimizer adafactor",
        ),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_together_are_refused_by_name(flags, message):
    with pytest.raises(ConfigError, match=message):
        Config(**flags)


@pytest.mark.parametrize("name", ["stale", "local"])
def test_a_pipeline_that_never_drains_is_refused(tmp_path, text, name):
    with pytest.raises(ConfigError, match=f"--schedule pipedream and --reducer {name}: either is late in a way"):
        train(2, tmp_path / "run", text, f"{SCHEMES[name]} --pp 2 --schedule pipedream --clip 0 --untied --layers 2")
