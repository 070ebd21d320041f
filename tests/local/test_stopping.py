"""A run that is asked to stop saves, says so by its exit code, and goes on as if nothing had been; saves that go on in
the background are the same saves."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from mpitrain import checkpoint, disk
from mpitrain.comm.local import LocalWorld
from mpitrain.errors import CheckpointError
from mpitrain.events import listen
from mpitrain.stopping import STOPPED_CODE, Request, Stop, hear_signal
from mpitrain.train import main

TEXT = "".join(f"{n} bottles of milk on the wall; take {n % 7} down.\n" for n in range(400))
TINY = "--model gpt-tiny --layers 1 --width 16 --seq-len 8 --batch 4 --sample-length 0 --deterministic".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def train(ranks, run, text, *flags, listener=None):
    def body():
        with listen(listener or (lambda event: None)):
            return main([*TINY, "--data", text, "--run", str(run), *flags])

    with hear_signal():
        return LocalWorld(ranks).run(body)


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def state(run):
    """Every tensor and scalar of the newest checkpoint, as they lie on the disk."""
    folder = checkpoint.latest(run)
    manifest = checkpoint.read_manifest(folder)
    tensors = {n: [(s.start, s.stop, s.crc32) for s in t.slabs] for n, t in manifest.tensors.items()}
    return folder.name, tensors, {**manifest.scalars, "config": None}


def steps_of(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


class Asks:
    """Sends SIGUSR1 to the process in the middle of a step."""

    def __init__(self, step):
        self.step, self.asked = step, False

    def __call__(self, event):
        if event.kind == "action" and event.name.startswith("STEP") and event.phase == "begin":
            self.step -= 1
            if not self.step and not self.asked:
                self.asked = True
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.3)  # the main thread hears it


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, []), (2, ["--pp", "2"]), (4, ["--zero", "2"])])
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_to_the_same_bits(tmp_path, text, ranks, flags):
    flags = [*flags, "--steps", "8", "--save-every", "8"]
    assert train(ranks, tmp_path / "whole", text, *flags) == [0] * ranks
    asks = Asks(3)
    codes = train(ranks, tmp_path / "parts", text, *flags, listener=asks)
    assert codes == [STOPPED_CODE] * ranks
    (name,) = steps_of(tmp_path / "parts")
    assert name in ("step-00000001", "step-00000002", "step-00000003", "step-00000004")
    assert train(ranks, tmp_path / "parts", text, *flags, "--resume", "auto") == [0] * ranks
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    assert state(tmp_path / "whole") == state(tmp_path / "parts")


def test_a_run_whose_time_is_up_stops_and_is_queued_again_until_it_is_done(tmp_path, text):
    """A start takes longer than that, so each makes one step."""
    flags = ["--steps", "5", "--max-seconds", "0.001", "--resume", "auto"]
    codes = [train(1, tmp_path / "parts", text, *flags) for _ in range(5)]
    assert codes == [[STOPPED_CODE]] * 4 + [[0]]
    train(1, tmp_path / "whole", text, "--steps", "5")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_a_run_stops_so_early_that_a_step_and_a_save_still_fit():
    stop = Stop(Request(), 10.0, time.perf_counter() - 7.0)
    assert not stop.wanted
    stop.reserve = 3.5
    assert stop.wanted
    assert not Stop(Request(), None, 0.0).wanted
    assert Stop(Request(made=True), None, 0.0).wanted


def test_workers_that_learn_apart_stop_where_they_meet(tmp_path, text):
    flags = ["--steps", "12", "--reducer", "local", "--local-steps", "4", "--save-every", "12"]
    train(2, tmp_path / "whole", text, *flags)
    assert train(2, tmp_path / "parts", text, *flags, listener=Asks(2)) == [STOPPED_CODE] * 2
    assert steps_of(tmp_path / "parts") == ["step-00000004"]
    train(2, tmp_path / "parts", text, *flags, "--resume", "latest")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_the_signal_is_taken_back_when_nobody_listens_any_more():
    before = signal.getsignal(signal.SIGUSR1)
    with hear_signal() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        assert request.made
    assert signal.getsignal(signal.SIGUSR1) is before


# ---------------------------------------------------------------------------------------------------- in the background


@pytest.mark.parametrize("flags", [["--zero", "1"], ["--tp", "2"], ["--offload", "optimizer"]])
def test_a_save_in_the_background_is_the_same_save(tmp_path, text, flags):
    flags = [*flags, "--steps", "9", "--save-every", "3", "--batch", "12"]
    train(2, tmp_path / "at once", text, *flags)
    train(2, tmp_path / "apart", text, *flags, "--async-save", "--keep", "2")
    assert steps_of(tmp_path / "at once") == ["step-00000003", "step-00000006", "step-00000009"]
    assert steps_of(tmp_path / "apart") == ["step-00000006", "step-00000009"]
    assert state(tmp_path / "at once") == state(tmp_path / "apart")
    assert metrics(tmp_path / "at once") == metrics(tmp_path / "apart")


def test_training_goes_on_while_the_background_writes(tmp_path, text, monkeypatch):
    """The write waits for another step: the checkpoint still holds the state of its own step."""
    steps, waited = [], []
    write, go = disk.write, threading.Event()

    def slow(file, path, data, offset):
        if threading.current_thread().name.startswith("checkpoint") and not waited:
            waited.append(go.wait(20))
        write(file, path, data, offset)

    def listener(event):
        if event.kind == "action" and event.name.startswith("STEP") and event.phase == "end":
            steps.append(event.name)
            if len(steps) == 3:
                go.set()

    monkeypatch.setattr(disk, "write", slow)
    flags = ["--steps", "8", "--save-every", "2"]
    train(1, tmp_path / "whole", text, *flags, "--stop-after", "2")
    train(1, tmp_path / "parts", text, *flags, "--async-save", "--stop-after", "7", listener=listener)
    assert waited == [True]
    whole, parts = (
        checkpoint.read_manifest(tmp_path / name / "checkpoints" / "step-00000002") for name in ("whole", "parts")
    )
    assert whole.tensors == parts.tensors


def test_a_save_that_fails_in_the_background_ends_all_ranks_with_one_message(tmp_path, text, monkeypatch):
    train(2, tmp_path / "run", text, "--steps", "9", "--stop-after", "2")
    create = disk.create

    def full(path):
        if path.name == "rank-00001.h5":
            raise OSError(28, os.strerror(28))
        return create(path)

    monkeypatch.setattr(disk, "create", full)
    with pytest.raises(CheckpointError, match=r"rank-00001.h5 cannot be written \(rank 1\): No space left on device"):
        train(2, tmp_path / "run", text, "--resume", "latest", "--save-every", "3", "--async-save")
    assert steps_of(tmp_path / "run") == ["step-00000002"]


def test_the_end_of_a_run_is_saved_too(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "5", "--save-every", "2")
    assert steps_of(tmp_path / "run") == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_checkpoint_is_there_though_older_ones_cannot_be_removed(tmp_path, text, monkeypatch):
    rename = disk.rename

    def refused(old, new):
        if new.name.startswith(".gone-"):
            raise OSError(5, os.strerror(5))
        rename(old, new)

    monkeypatch.setattr(disk, "rename", refused)
    with pytest.raises(CheckpointError, match=r"step-00000006 is there, but older ones cannot be removed \(--keep\)"):
        train(2, tmp_path / "run", text, "--steps", "8", "--save-every", "2", "--keep", "2")
    assert steps_of(tmp_path / "run") == ["step-00000002", "step-00000004", "step-00000006"]


def test_later_checkpoints_that_cannot_be_given_up_end_the_run_before_its_first_step(tmp_path, text, monkeypatch):
    train(1, tmp_path / "run", text, "--steps", "6", "--save-every", "2")
    before = metrics(tmp_path / "run")

    def refused(old, new):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(disk, "rename", refused)
    with pytest.raises(CheckpointError, match=r"checkpoints of later steps cannot be renamed .*Read-only file system"):
        train(1, tmp_path / "run", text, "--resume", str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    assert metrics(tmp_path / "run") == before


def test_what_is_read_back_is_what_was_written_or_the_save_fails(tmp_path, text, monkeypatch):
    train(1, tmp_path / "run", text, "--steps", "4", "--save-every", "2", "--read-back")
    write = disk.write

    def bad(file, path, data, offset):
        flipped = np.frombuffer(bytes(data), np.uint8).copy()
        if path.suffix == ".h5" and offset > 10_000:
            flipped[0] ^= 1
        write(file, path, flipped, offset)

    monkeypatch.setattr(disk, "write", bad)
    with pytest.raises(CheckpointError, match=r"rank-00000.h5 is damaged: .* is not what was written"):
        train(1, tmp_path / "run", text, "--resume", "latest", "--steps", "6", "--save-every", "2", "--read-back")
    assert steps_of(tmp_path / "run") == ["step-00000002", "step-00000004"]


def test_the_newest_checkpoint_that_is_not_damaged_is_gone_on_from(tmp_path, text, capsys):
    flags = ["--steps", "6", "--save-every", "2"]
    train(2, tmp_path / "run", text, *flags)
    whole = metrics(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    path = folder / "step-00000006" / "rank-00001.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00001\.h5 is damaged"):
        train(2, tmp_path / "other", text, "--resume", str(path.parent))
    train(2, tmp_path / "run", text, *flags, "--resume", "latest")
    said = capsys.readouterr().out
    assert "Passed over:" in said
    assert "go on after step 4" in said
    assert steps_of(tmp_path / "run") == ["given-up-1-step-00000006", "step-00000002", "step-00000004", "step-00000006"]
    assert metrics(tmp_path / "run") == whole


def test_if_all_checkpoints_are_damaged_the_message_says_so(tmp_path, text):
    train(1, tmp_path / "run", text, "--steps", "4", "--save-every", "2")
    for path in (tmp_path / "run" / "checkpoints").glob("*/rank-00000.h5"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"step-00000002.*is damaged: [^\n]*\nIt was the last one: all 2 are damaged"
    ):
        train(1, tmp_path / "run", text, "--resume", "latest")
