"""The whole trainer, on ranks that are threads: what it writes, and that stopping and going on changes nothing."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from reseal import rewrite

from mpitrain import checkpoint, config
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import world
from mpitrain.errors import CheckpointError, ConfigError, DataError, MeshError, NumericsError, UserError
from mpitrain.events import listen
from mpitrain.models.generate import generate
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 1 --batch 12 --lr 0.01 --dropout 0.1 --sample-length 20 --deterministic".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text with space é.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def train(ranks, run, text, *flags):
    LocalWorld(ranks).run(main, [*TINY, "--data", text, "--run", str(run), *flags])


def metrics(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in records]


def state(run, step):
    """Digest of every file of tensors of a checkpoint."""
    folder = Path(run) / "checkpoints" / f"step-{step:08}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.h5"))}


def test_every_skipped_step_is_told_with_its_scale_and_the_end_counts_them(tmp_path, text, capsys):
    flags = ["--dtype", "float16", "--loss-scale", str(2**30), "--steps", "20", "--log-every", "20"]
    train(2, tmp_path / "run", text, *flags)
    out = capsys.readouterr().out
    skipped = [record["step"] for record in metrics(tmp_path / "run") if record["skipped"]]
    lines = [line for line in out.splitlines() if " skip " in line]
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == skipped
    assert len(skipped) > 5
    assert lines[0].endswith("  scale 2^30")
    assert lines[1].endswith("  scale 2^30 -> 2^29")
    assert f"\n{len(skipped)} steps were skipped; the loss scale is 2^{31 - len(skipped)}\n" in out
    assert "loss scale 2^30, doubled after 1000 clean steps" in out


def test_a_run_leaves_settings_metrics_curve_and_a_sample(tmp_path, text, capsys):
    run = tmp_path / "run"
    train(3, run, text, "--steps", "6", "--eval-every", "4", "--log-every", "2", "--metrics", "csv")
    records = metrics(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [12 * 32 * n for n in range(1, 7)]
    assert [record["step"] for record in records if "val_loss" in record] == [4, 6]
    assert records[-1]["loss"] < records[0]["loss"]
    assert "12 x 32 tokens a step, 3 ranks<" in (run / "loss.svg").read_text(encoding="utf-8")
    assert len((run / "sample.txt").read_text(encoding="utf-8")) > 20
    assert config.load(str(run / "config.toml")).steps == 6
    out = capsys.readouterr().out
    assert out.count("step 6/6") == 1  # one reporter
    for word in ("gpt-tiny", "parameters", "mesh", "3 threads of one process", "corpus", "done in"):
        assert word in out
    assert " metrics.jsonl, metrics.csv\n" in out
    assert f"metrics {run}/metrics.csv\n" in out


def test_the_curve_says_which_model_it_is_of_and_on_how_many_ranks(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "2", "--experts", "2")
    curve = (tmp_path / "run" / "loss.svg").read_text(encoding="utf-8")
    assert "<title>gpt-tiny, 2 experts, on " in curve
    assert "12 x 32 tokens a step, 1 rank<" in curve


def test_the_same_run_on_another_number_of_ranks_has_the_same_curve_and_sample(tmp_path, text):
    for ranks in (1, 4):
        train(ranks, tmp_path / str(ranks), text, "--steps", "5", "--dtype", "float64", "--microbatches", "3")
    for one, four in zip(metrics(tmp_path / "1"), metrics(tmp_path / "4"), strict=True):
        assert one == pytest.approx(four, rel=1e-10)
    assert (tmp_path / "1" / "sample.txt").read_text() == (tmp_path / "4" / "sample.txt").read_text()


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["--tp", "2"]),
        (8, ["--tp", "2", "--cp", "2", "--sequence-parallel", "--microbatches", "3", "--check"]),
        (4, ["--cp", "2", "--cp-attention", "ulysses", "--tied"]),
        (4, ["--tp", "4", "--heads", "4", "--kv-heads", "2"]),
        (4, ["--pp", "2", "--tp", "2", "--microbatches", "3", "--tied", "--layers", "2", "--check"]),
        (
            2,
            [
                "--pp",
                "2",
                "--schedule",
                "interleaved",
                "--microbatches",
                "4",
                "--layers",
                "3",
                "--stage-layers",
                "1,1,1,0",
            ],
        ),
        (
            3,
            [
                "--pp",
                "3",
                "--schedule",
                "zb-h1",
                "--balance",
                "flops",
                "--microbatches",
                "4",
                "--layers",
                "5",
                "--check",
            ],
        ),
        (4, ["--pp", "2", "--schedule", "terapipe", "--slices", "3", "--microbatches", "2", "--layers", "2", "--tied"]),
        (8, ["--pp", "2", "--cp", "2", "--reducer", "bucketed", "--bucket-mib", "0.01", "--microbatches", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_same_run_in_another_layout_has_the_same_curve_and_sample(tmp_path, text, ranks, layout):
    model = [word for flag in ("--tied", "--heads", "--kv-heads", "--layers") for word in _with_value(layout, flag)]
    flags = ["--steps", "5", "--dtype", "float64", "--eval-every", "2"]
    train(1, tmp_path / "one", text, *flags, *model)
    train(ranks, tmp_path / "all", text, *flags, *layout)
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "all"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    assert (tmp_path / "one" / "sample.txt").read_text() == (tmp_path / "all" / "sample.txt").read_text()


def _with_value(layout, flag):
    at = layout.index(flag) if flag in layout else None
    return [] if at is None else layout[at : at + (1 if flag == "--tied" else 2)]


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_stopping_and_going_on_gives_the_same_bits(tmp_path, text, stop):
    flags = ["--steps", "7", "--save-every", "7", "--eval-every", "3"]
    train(2, tmp_path / "whole", text, *flags)
    train(2, tmp_path / "parts", text, *flags, "--stop-after", str(stop))
    assert [record["step"] for record in metrics(tmp_path / "parts")] == list(range(1, stop + 1))
    train(2, tmp_path / "parts", text, *flags, "--resume", "latest")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert state(tmp_path / "parts", 7) == state(tmp_path / "whole", 7) != {}


def test_going_on_after_a_kill_behind_the_last_save_repeats_no_step(tmp_path, text):
    """The metrics hold steps that the checkpoint does not: they are measured again, and stand once."""
    run = tmp_path / "run"
    train(2, run, text, "--steps", "6", "--save-every", "4")
    whole = metrics(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # a torn line
    train(2, run, text, "--steps", "6", "--save-every", "4", "--resume", str(run / "checkpoints" / "step-00000004"))
    assert metrics(run) == whole


def test_a_run_does_not_go_on_in_the_folder_of_another(tmp_path, text):
    """Its own next `latest` would then be the other run's."""
    for name in ("one", "other"):
        train(1, tmp_path / name, text, "--steps", "6", "--stop-after", "4", "--save-every", "2")
    step = tmp_path / "one" / "checkpoints" / "step-00000002"
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        train(1, tmp_path / "other", text, "--steps", "6", "--resume", str(step))
    train(1, tmp_path / "new", text, "--steps", "6", "--resume", str(step))
    assert [record["step"] for record in metrics(tmp_path / "new")] == [3, 4, 5, 6]


def test_a_resume_that_is_refused_gives_nothing_up(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "6", "--save-every", "2")
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(CheckpointError, match="has 4 steps behind it, but --steps is 3"):
        train(1, tmp_path / "run", text, "--steps", "3", "--resume", str(folder / "step-00000004"))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_copied_run_goes_on_in_its_own_folder(tmp_path, text):
    """Its settings name the folder from which it was copied, which must not change."""
    flags = ["--model", "gpt-tiny", "--batch", "12", "--data", text, "--sample-length", "0"]
    LocalWorld(1).run(lambda: main([*flags, "--run", str(tmp_path / "run"), "--steps", "6", "--stop-after", "4"]))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    LocalWorld(1).run(lambda: main(["--resume", str(tmp_path / "copy")]))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert [record["step"] for record in metrics(tmp_path / "copy")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_goes_on_by_itself_with_the_settings_that_it_holds(tmp_path, text, monkeypatch):
    train(1, tmp_path / "run", text, "--steps", "6", "--stop-after", "4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000004").rename(tmp_path / "step-00000004")
    LocalWorld(1).run(lambda: main(["--resume", "step-00000004"]))
    (new,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in metrics(new)] == [5, 6]
    assert config.load(str(new / "config.toml")).lr == 0.01


def test_a_checkpoint_whose_counts_are_damaged_is_refused(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "4", "--stop-after", "2")
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    for change in ({"updates": "2"}, {"tokens": None}, {"data": {}}):
        shutil.copytree(path, tmp_path / "whole")
        rewrite(path, lambda whole, change=change: whole["scalars"].update(change))
        with pytest.raises(CheckpointError, match="is damaged: its manifest lacks"):
            train(1, tmp_path / "run", text, "--steps", "4", "--resume", "latest")
        shutil.rmtree(path)
        (tmp_path / "whole").rename(path)


def test_a_sequence_may_have_one_token(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "2", "--seq-len", "1")
    assert (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")


def test_a_checkpoint_also_loads_on_another_number_of_ranks(tmp_path, text):
    flags = ["--steps", "6", "--dtype", "float64"]
    train(1, tmp_path / "whole", text, *flags)
    train(4, tmp_path / "parts", text, *flags, "--stop-after", "3")
    train(3, tmp_path / "parts", text, *flags, "--resume", "latest")
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.parametrize("tied", [[], ["--tied"]], ids=["untied", "tied"])
def test_a_checkpoint_goes_on_in_another_layout(tmp_path, text, tied):
    """C34: three ranks hold 86, 86 and 84 of 256 words each; one rank goes on, and then eight in another layout."""
    flags = ["--steps", "8", "--dtype", "float64", "--heads", "6", "--width", "24", "--seq-len", "24", *tied]
    train(1, tmp_path / "whole", text, *flags)
    train(3, tmp_path / "parts", text, *flags, "--tp", "3", "--sequence-parallel", "--stop-after", "3")
    go_on = [*flags, "--resume", "latest", "--no-sequence-parallel"]
    train(1, tmp_path / "parts", text, *go_on, "--tp", "1", "--stop-after", "5")
    train(8, tmp_path / "parts", text, *go_on, "--tp", "2", "--cp", "2", "--dp", "2")
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("tied", [[], ["--tied"]], ids=["untied", "tied"])
def test_a_run_goes_on_with_another_pipeline(tmp_path, text, tied):
    flags = ["--steps", "8", "--dtype", "float64", "--layers", "3", "--microbatches", "2", *tied]
    train(1, tmp_path / "whole", text, *flags)
    train(2, tmp_path / "parts", text, *flags, "--pp", "2", "--stop-after", "2")
    go_on = [*flags, "--resume", "latest"]
    train(1, tmp_path / "parts", text, *go_on, "--pp", "1", "--stop-after", "3")
    train(4, tmp_path / "parts", text, *go_on, "--pp", "4", "--schedule", "zb-h1", "--stop-after", "4")
    train(4, tmp_path / "parts", text, *go_on, "--pp", "2", "--schedule", "interleaved", "--stop-after", "6")
    train(2, tmp_path / "parts", text, *go_on, "--pp", "2", "--schedule", "1f1b")
    assert [record["step"] for record in metrics(tmp_path / "parts")] == list(range(1, 9))
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert (tmp_path / "whole" / "sample.txt").read_text() == (tmp_path / "parts" / "sample.txt").read_text()


def test_a_layout_that_no_flag_gave_is_said_to_be_the_saved_runs(tmp_path, text):
    run = tmp_path / "run"
    train(2, run, text, "--layers", "2", "--pp", "2", "--steps", "4", "--stop-after", "2")
    with pytest.raises(MeshError, match=r"(?s)--pp 2 needs a multiple of 2.*--pp of the saved run .*00002\) holds"):
        LocalWorld(1).run(main, ["--run", str(run), "--resume", "latest"])
    with pytest.raises(MeshError, match=r"--pp 2 needs a multiple of 2 ranks[^\n]*$"):
        LocalWorld(1).run(main, ["--run", str(run), "--resume", "latest", "--pp", "2"])
    LocalWorld(1).run(main, ["--run", str(run), "--resume", "latest", "--pp", "1"])


def test_the_blocks_of_the_stages_before_are_forgotten_with_them(tmp_path, text):
    run = tmp_path / "run"
    train(2, run, text, "--pp", "2", "--steps", "4", "--stop-after", "2", "--stage-layers", "1,0")
    with pytest.raises(ConfigError, match="--stage-layers 2: blocks for 1 of 1 stages"):
        train(1, run, text, "--resume", "latest", "--pp", "1", "--stage-layers", "2")
    train(1, run, text, "--resume", "latest", "--pp", "1")
    assert config.load(str(run / "config.toml")).stage_layers is None
    assert config.load(str(run / "config.toml")).pp == 1


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_a_pipeline_that_stops_and_goes_on_gives_the_same_bits(tmp_path, text, schedule):
    flags = ["--pp", "2", "--schedule", schedule, "--microbatches", "4", "--layers", "4", "--steps", "6"]
    flags += ["--save-every", "6"]
    train(2, tmp_path / "whole", text, *flags)
    train(2, tmp_path / "parts", text, *flags, "--stop-after", "3")
    train(2, tmp_path / "parts", text, *flags, "--resume", "latest")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert state(tmp_path / "parts", 6) == state(tmp_path / "whole", 6) != {}


def test_ranks_that_divide_the_batch_may_be_more_or_fewer_when_a_run_goes_on(tmp_path, text):
    """--dp of the first start says nothing of the next one; with --dp there, it does."""
    flags = ["--steps", "6", "--dtype", "float64"]
    train(1, tmp_path / "whole", text, *flags)
    train(4, tmp_path / "parts", text, *flags, "--dp", "2", "--tp", "2", "--stop-after", "2")
    with pytest.raises(MeshError, match="--dp 2 --tp 2 needs 4 ranks"):
        train(2, tmp_path / "parts", text, "--resume", "latest", "--dp", "2")
    train(2, tmp_path / "parts", text, "--resume", "latest", "--stop-after", "4")
    (tmp_path / "parts" / "config.toml").unlink()  # as for a checkpoint that was copied alone
    train(3, tmp_path / "parts", text, "--resume", "latest", "--tp", "1")
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_as_many_heads_of_keys_as_heads_are_no_other_model(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "4", "--stop-after", "2")
    with pytest.raises(CheckpointError, match="saved with kv_heads 2, now it is 1"):
        train(1, tmp_path / "run", text, "--steps", "4", "--resume", "latest", "--kv-heads", "1")
    train(1, tmp_path / "run", text, "--steps", "4", "--resume", "latest", "--kv-heads", "2")
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("layout", [["--dp", "4"], ["--tp", "2", "--cp", "2"]], ids=" ".join)
def test_no_rank_waits_for_the_sample_as_long_as_it_takes(tmp_path, text, monkeypatch, layout):
    """A large model may take longer for its sample than --timeout: ranks that wait hear of it now and then."""
    waits, began = [], []

    def slow(model, prompt, length, *, seed):
        for token in generate(model, prompt, length, seed=seed):
            time.sleep(0.01)
            yield token

    def listener(event):
        if event.kind == "message" and world().rank == 2:  # it writes nothing in either layout
            if event.phase == "begin":
                began.append(time.perf_counter())
            else:
                waits.append(time.perf_counter() - began.pop())

    monkeypatch.setattr("mpitrain.sample.generate", slow)
    with listen(listener):
        train(4, tmp_path / "run", text, "--steps", "2", *layout, "--timeout", "1.5", "--sample-length", "60")
    assert sum(waits) > 60 * 0.01
    assert max(waits) < sum(waits) / 2
    assert len((tmp_path / "run" / "sample.txt").read_bytes()) >= 60


def test_a_budget_is_turned_into_steps_once_and_written_down(tmp_path, text):
    run = tmp_path / "run"
    train(2, run, text, "--budget", "1", "--stop-after", "2")
    fixed = config.load(str(run / "config.toml"))
    assert fixed.budget is None
    assert fixed.steps >= 1
    again = fixed.steps
    train(2, run, text, "--budget", "1", "--stop-after", "3", "--resume", "latest")
    assert config.load(str(run / "config.toml")).steps == again
    reference = tmp_path / "reference"
    train(2, reference, text, "--steps", str(again), "--stop-after", "3")
    assert metrics(run) == metrics(reference)  # the timed steps left nothing behind


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--dp", "2"], MeshError, "--dp 2"),
        (["--batch", "13"], ConfigError, "--batch 13"),
        (["--data", "missing.txt"], DataError, "missing.txt"),
        (["--resume", "latest"], CheckpointError, "no complete checkpoint"),
        (["--steps", "0"], ConfigError, "--steps 0"),
        (["--tp", "3"], MeshError, "--tp 3 needs a multiple of 3 ranks"),
        (["--tp", "4"], ConfigError, "--heads 2 is not divisible by --tp 4"),
        (["--cp", "4", "--seq-len", "12"], ConfigError, "--seq-len 12 is not divisible by 8"),
        (["--tp", "2", "--sequence-parallel", "--seq-len", "7"], ConfigError, "--seq-len 7 is not divisible by 2"),
        (["--cp", "4", "--cp-attention", "ulysses"], ConfigError, "not both divisible by --cp 4"),
        (["--kv-heads", "3"], ConfigError, "--kv-heads 3"),
        (["--heads", "4", "--tp", "4", "--kv-heads", "4", "--dp", "2"], MeshError, "--dp 2 --tp 4 needs 8 ranks"),
        (["--pp", "3"], MeshError, "--pp 3 needs a multiple of 3 ranks"),
        (["--pp", "2", "--schedule", "interleaved", "--microbatches", "3"], ConfigError, "--microbatches 3"),
        (["--pp", "4", "--stage-layers", "1,1"], ConfigError, "--stage-layers 1,1"),
    ],
)
def test_a_mistake_is_refused_on_every_rank_and_leaves_nothing(tmp_path, text, flags, error, words):
    errors = []

    def run():
        try:
            main([*TINY, "--data", text, "--run", str(tmp_path / "run"), "--steps", "3", *flags])
        except UserError as raised:
            errors.append(raised)

    LocalWorld(4).run(run)
    assert len(errors) == 4
    assert {str(raised) for raised in errors} == {str(errors[0])}
    assert isinstance(errors[0], error)
    assert words in str(errors[0])
    assert len(str(errors[0]).splitlines()) <= 5
    assert not (tmp_path / "run").exists()


def test_another_model_or_text_cannot_go_on_with_a_checkpoint(tmp_path, text):
    run = tmp_path / "run"
    train(1, run, text, "--steps", "4", "--stop-after", "2")
    with pytest.raises(CheckpointError, match="saved with width 32, now it is 64"):
        train(1, run, text, "--steps", "4", "--width", "64", "--resume", "latest")
    other = tmp_path / "other.txt"
    other.write_text(TEXT[1:])
    with pytest.raises(CheckpointError, match="another text"):
        train(1, run, str(other), "--steps", "4", "--resume", "latest")
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        train(1, run, text, "--steps", "4")
    assert checkpoint.latest(run).name == "step-00000002"


def test_fewer_steps_than_are_done_are_refused_and_change_nothing(tmp_path, text):
    run = tmp_path / "run"
    train(1, run, text, "--steps", "5", "--save-every", "5")
    before = (run / "config.toml").read_text(), metrics(run)
    with pytest.raises(CheckpointError, match="has 5 steps behind it, but --steps is 3"):
        train(1, run, text, "--steps", "3", "--resume", "latest")
    assert ((run / "config.toml").read_text(), metrics(run)) == before


def test_two_jobs_cannot_share_a_folder(tmp_path, text):
    run = tmp_path / "run"
    run.mkdir()
    lock = checkpoint.hold(run)
    with pytest.raises(CheckpointError, match="another job trains in this folder"):
        train(2, run, text, "--steps", "2")
    os.close(lock)
    train(2, run, text, "--steps", "2")


def test_a_loss_that_overflows_ends_with_one_message_and_no_warning(tmp_path, text):
    with pytest.raises(NumericsError, match="not finite"):
        train(2, tmp_path / "run", text, *"--steps 60 --lr 10 --clip 0 --optimizer sgd --warmup 0".split())
