"""Stop a run of 20 steps after each of them and go on in the same layout: it is the same run, bit by bit.

    python tests/resume_points.py                        19 stops of every feature set
    python tests/resume_points.py --only 'PowerSGD'      of those whose names begin so
    python tests/resume_points.py --stops 3,11

Equal must be, at the end: every weight, moment and whatever else outlives a step, the scale of gradients with its
counters, the number of updates; on the way: the rows that each step reads, and every number of every line of the
metrics, the learning rate among them.  Whatever the second start has in memory is made useless before it reads the
checkpoint (poison.py), so that nothing can be right by chance.  The text is so short that 20 steps are two and a half
epochs, so the last batch of an epoch is padded and the shifts of the windows change.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kept_state import SHORT, Watch, different, metrics, small_pieces
from poison import Poison

from mpitrain.comm.local import LocalWorld
from mpitrain.errors import ConfigError
from mpitrain.optim.scaler import BlockScaler
from mpitrain.pipeline.executor import Executor
from mpitrain.train import main

STEPS = 20
COMMON = (
    "--model gpt-tiny --layers 2 --width 16 --heads 4 --seq-len 8 --batch 12 --lr 0.003 --sample-length 0 "
    f"--eval-every 7 --deterministic --steps {STEPS}"
).split()


class Feature(NamedTuple):
    """How many ranks do what.

    Attributes:
        drains: steps overlap, and the row ends where something is saved: the run that does not stop must end its rows
            at the same places, so it saves there.
        every: a checkpoint can only be saved at multiples of this.
        scale: with which branches begin, so high that they overflow now and then; 0: the usual one.
    """

    ranks: int
    flags: str
    drains: bool = False
    every: int = 1
    scale: float = 0.0


FEATURES: dict[str, Feature] = {
    "float16, skipped steps": Feature(2, "--dtype float16 --loss-scale 16777216 --loss-scale-window 2"),
    "dropout": Feature(3, "--dropout 0.2"),
    "recompute": Feature(2, "--recompute full --dropout 0.1"),
    "accumulation": Feature(2, "--microbatches 3"),
    "PowerSGD": Feature(2, "--reducer powersgd --powersgd-rank 2 --powersgd-start 3 --powersgd-tables"),
    "experts": Feature(4, "--experts 4 --ep 2 --router gshard --jitter 0.1 --z-loss 0.001"),
    "offload": Feature(2, "--offload optimizer,activations,parameters --offload-to hdf5:{disk}"),
    "pipeline": Feature(2, "--pp 2 --microbatches 3 --tied"),
    "pipeline, interleaved": Feature(2, "--pp 2 --schedule interleaved --microbatches 2 --layers 4"),
    "pipeline, zb-h1": Feature(4, "--pp 2 --tp 2 --schedule zb-h1 --microbatches 3 --tied"),
    "pipeline, slices": Feature(2, "--pp 2 --schedule terapipe --slices 3 --microbatches 2"),
    "pipeline, two versions": Feature(2, "--pp 2 --schedule pipedream-2bw --microbatches 2 --tied", drains=True),
    "pipeline, stashed weights": Feature(2, "--pp 2 --schedule pipedream --clip 0", drains=True),
    "float16, two versions": Feature(
        2, "--pp 2 --schedule pipedream-2bw --microbatches 2 --dtype float16 --loss-scale 16777216", drains=True
    ),
    "scales of branches": Feature(2, "--dtype float16 --loss-scaling blocks --lr 0.05 --microbatches 2", scale=6e5),
    "bfloat16": Feature(2, "--dtype bfloat16 --tp 2 --sequence-parallel"),
    "ZeRO 1": Feature(3, "--zero 1"),
    "ZeRO 2, float16": Feature(2, "--zero 2 --reducer bucketed --bucket-mib 0.002 --dtype float16 --microbatches 2"),
    "ZeRO 3": Feature(4, "--zero 3 --tp 2 --sequence-parallel --dropout 0.1"),
    "ZeRO 3, experts": Feature(4, "--zero 3 --experts 2 --ep 2 --dropless --tied"),
    "stale": Feature(2, "--reducer stale --staleness 3 --stale-start 4"),
    "stale workers": Feature(3, "--reducer stale --stale-workers --staleness 2"),
    "local": Feature(2, "--reducer local --local-steps 2 --dropout 0.1", every=2),
    "local, averaged moments": Feature(3, "--reducer local --local-steps 1 --average-moments --optimizer sgd"),
    "sgd": Feature(2, "--optimizer sgd --lr 0.1 --lr-schedule linear --lr-final 0.1"),
    "adafactor": Feature(4, "--optimizer adafactor --tp 2 --zero 1"),
    "Gist": Feature(2, "--gist 8"),
    "context": Feature(2, "--cp 2 --dropout 0.1 --kv-heads 2"),
    "rates by name": Feature(1, "--lr-schedule inverse-sqrt --warmup 5 --lr-groups table.*=0.5,*.bias=2"),
    "PowerSGD, float16": Feature(
        4, "--tp 2 --reducer powersgd --powersgd-rank 1 --dtype float16 --loss-scale 16777216 --tied"
    ),
    "PowerSGD, pipeline": Feature(
        4, "--pp 2 --reducer powersgd --powersgd-rank 2 --powersgd-tables --microbatches 2 --tied"
    ),
    "stale, pipeline": Feature(4, "--pp 2 --reducer stale --staleness 2 --microbatches 2 --tied --dropout 0.1"),
    "stale workers, experts": Feature(4, "--reducer stale --stale-workers --staleness 1 --experts 4 --ep 2"),
    "local, tensor parallel": Feature(4, "--tp 2 --reducer local --local-steps 1 --sequence-parallel"),
}
"""The first eight are those that must be there; each with what it remembers from step to step."""


class Runs:
    """Runs of one feature set in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.feature = FEATURES[name]
        self._whole: dict[int, Watch] = {}
        (folder / "text").write_text(SHORT)

    def whole(self, save_every: int) -> Watch:
        """The run that does not stop."""
        if save_every not in self._whole:
            self._whole[save_every] = self._run(f"whole-{save_every}", ["--save-every", str(save_every)])
        return self._whole[save_every]

    def stop(self, step: int) -> list[str]:
        """Stop after a step and go on; what is different then from the run that did not, nothing if all is well.

        What the second start has in memory is made useless before it reads the checkpoint.
        """
        save_every = step if self.feature.drains else STEPS
        whole = self.whole(save_every)
        flags = ["--save-every", str(save_every)]
        poison = Poison()
        poison.learn(self._run(f"stop-{step}", [*flags, "--stop-after", str(step)], poison.look).executors)
        again = self._run(f"stop-{step}", [*flags, "--resume", "latest"], poison.spoil)
        if again.first != step:
            return [f"it goes on after step {again.first}"]
        wrong = different(again.states[STEPS], whole.states[STEPS])
        rows = whole.data()
        if again.data() != {number: rows[number] for number in range(step, STEPS)}:
            wrong.append("rows of the text")
        mine, theirs = (metrics(self.folder / run) for run in (f"stop-{step}", f"whole-{save_every}"))
        if [line["step"] for line in mine] != list(range(1, STEPS + 1)):
            wrong.append("steps in the metrics")
        for one, other in zip(mine, theirs, strict=False):
            wrong += [f"{key} of step {one['step']}" for key in other if one.get(key) != other[key]]
        return wrong

    def background(self, step: int) -> list[str]:
        """Save after a step, train on while it is being written; what is different from that step when it is read."""
        flags = ["--save-every", str(step), "--async-save", "--keep", str(STEPS)]
        saved = self._run("background", flags, only=(step,)).states[step]
        path = self.folder / "background" / "checkpoints" / f"step-{step:08}"
        again = self._run("again", ["--resume", str(path), "--stop-after", str(2 * step)], only=(step,))
        return different(again.states[step], saved)

    def _run(
        self,
        run: str,
        flags: Iterable[str],
        before: Callable[[Executor], None] = lambda _: None,
        only: Sequence[int] = (STEPS,),
    ) -> Watch:

        def built(executor: Executor) -> None:
            if self.feature.scale:
                assert isinstance(executor.scaler, BlockScaler)
                executor.scaler.scales[:] = [self.feature.scale] * len(executor.scaler.scales)
            before(executor)

        words = [*COMMON, *self.feature.flags.replace("{disk}", str(self.folder / "disk")).split()]
        words += ["--data", str(self.folder / "text"), "--run", str(self.folder / run), *flags]
        with small_pieces(), Watch(only=only, before=built) as watch, contextlib.redirect_stdout(io.StringIO()):
            LocalWorld(self.feature.ranks).run(main, words)
        return watch


def stops(name: str) -> list[int]:
    """After which steps a run can be stopped."""
    every = FEATURES[name].every
    return list(range(every, STEPS, every))


def is_refused(folder: Path, name: str, step: int) -> bool:
    """Whether a stop that cannot be is refused by its name, and what it must be a multiple of."""
    try:
        Runs(folder, name)._run(f"stop-{step}", ["--stop-after", str(step)])
    except ConfigError as error:
        return f"--stop-after {step} is not divisible by --local-steps {FEATURES[name].every}" in str(error)
    return False


def _command() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], help="feature sets whose names begin so")
    parser.add_argument("--stops", type=lambda text: [int(word) for word in text.split(",")], help="as 3,11")
    asked: Any = parser.parse_args()
    bad = total = 0
    for name in FEATURES:
        if asked.only and not name.startswith(tuple(asked.only)):
            continue
        began, equal, refused = time.perf_counter(), 0, 0
        wanted = asked.stops or range(1, STEPS)
        with TemporaryDirectory() as folder:
            runs = Runs(Path(folder), name)
            for step in wanted:
                if step not in stops(name):
                    refused += is_refused(Path(folder), name, step)
                    continue
                wrong = runs.stop(step)
                equal += not wrong
                if wrong:
                    print(f"{name}, stopped after {step}: differ {', '.join(wrong[:5])}", flush=True)
        count = len([*wanted])
        total += count
        bad += count - equal - refused
        beside = f", {refused} refused by their reason" if refused else ""
        print(f"{name}: {equal} of {count} equal{beside}, {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{total - bad} of {total}")
    return 1 if bad else 0


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(_command())
