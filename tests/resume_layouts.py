"""Save in each of these layouts, load in each of them: what was loaded, the next step, the data it was made of.

    python tests/resume_layouts.py                              every pair, of both models, in float64 and in float32
    python tests/resume_layouts.py --model dense --dtype float64
    python tests/resume_layouts.py --only 'dp3' 'tp3'           pairs of layouts whose names begin so

A pair holds if the loaded state is that of the run that saved, to the bit, in all its tensors and numbers; if the next
step reads the rows that the reference reads; and if it leaves the weights, moments and loss of the reference, which is
one rank that never stopped: by the rule of `mpitrain.debug.compare` in float64, in float32 to 1e-6 of the largest
element of all tensors of a kind.  Layouts of halves have float32 masters: they load what float32 saved and the other
way round; their next step is compared with that of one rank in the same precision, gone on from the same checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from kept_state import TEXT, State, Watch, different, metrics, small_pieces

from mpitrain.comm.local import LocalWorld
from mpitrain.debug.compare import compare
from mpitrain.train import main

SAVED = 3
"""Steps before the checkpoint; the reference makes one more."""

COMMON = (
    "--model gpt-tiny --layers 2 --width 24 --heads 6 --seq-len 12 --batch 60 --lr 0.001 --eps 0.001 --warmup 2 "
    f"--sample-length 0 --eval-every 0 --log-every 1 --deterministic --steps {SAVED + 5}"
).split()
"""With an eps above the noise of gradients whose true value is zero: AdamW makes steps of it else, which no two layouts
have in common in float32."""

MODELS = {
    "dense": ["--tied"],
    "experts": "--experts 4 --top-k 2 --moe-every 2 --z-loss 0.001".split(),
    "frozen": ["--freeze", "table,positions,blocks.0,*.norm2"],
}

NO_LAYOUT = (
    "--pp 1 --schedule 1f1b --chunks 1 --slices 1 --microbatches 1 --tp 1 --no-sequence-parallel --cp 1 --ep 1 "
    "--cp-attention ring --no-expert-overlap --zero 0 --prefetch 1 --reducer flat --bucket-mib 1 --offload none "
    "--offload-to host --recompute selective"
).split()
"""Says of everything that is the layout's that there is none of it: what a checkpoint's settings say does not hold."""


class Layout(NamedTuple):
    """How many ranks, and the flags that say what they do; `of`: of which models."""

    ranks: int
    flags: str = ""
    of: tuple[str, ...] = ("dense", "experts")


LAYOUTS: dict[str, Layout] = {
    "one rank": Layout(1),
    "dp3": Layout(3),
    "dp5, buckets": Layout(5, "--reducer bucketed --bucket-mib 0.01"),
    "dp2, ZeRO 1": Layout(2, "--zero 1 --microbatches 2"),
    "dp6, ZeRO 2": Layout(6, "--zero 2 --reducer bucketed --bucket-mib 0.002"),
    "dp3, ZeRO 3": Layout(3, "--zero 3"),
    "tp3, words that do not divide": Layout(3, "--tp 3"),
    "dp2 tp2, sequence parallel": Layout(4, "--tp 2 --sequence-parallel"),
    "dp2 tp2, sequence parallel, ZeRO 3": Layout(4, "--tp 2 --sequence-parallel --zero 3 --prefetch 0"),
    "pp2": Layout(2, "--pp 2 --microbatches 3"),
    "pp2, interleaved": Layout(2, "--pp 2 --schedule interleaved --chunks 2 --microbatches 2"),
    "pp3, zb-h1": Layout(3, "--pp 3 --schedule zb-h1 --microbatches 3"),
    "dp2 pp2, ZeRO 2": Layout(4, "--pp 2 --schedule gpipe --microbatches 2 --zero 2"),
    "dp3 pp2, interleaved, ZeRO 1": Layout(6, "--pp 2 --schedule interleaved --chunks 2 --microbatches 2 --zero 1"),
    "pp2, slices": Layout(2, "--pp 2 --schedule terapipe --slices 3", ("dense",)),
    "cp2": Layout(2, "--cp 2"),
    "cp3, Ulysses, ZeRO 3": Layout(3, "--cp 3 --cp-attention ulysses --zero 3"),
    "pp2 cp2 tp2": Layout(8, "--pp 2 --cp 2 --tp 2 --sequence-parallel --microbatches 2"),
    "offload": Layout(1, "--offload optimizer,activations,parameters --offload-to hdf5:{disk}"),
    "dp2, state offloaded": Layout(2, "--offload optimizer,activations --microbatches 3 --recompute full"),
    "ep2": Layout(2, "--ep 2", ("experts",)),
    "dp4 ep2, ZeRO 3": Layout(4, "--ep 2 --zero 3", ("experts",)),
    "dp4 ep4, ZeRO 1": Layout(4, "--ep 4 --zero 1", ("experts",)),
    "dp2 ep2 tp2, overlap": Layout(4, "--ep 2 --tp 2 --sequence-parallel --expert-overlap", ("experts",)),
    "dp2 ep2 pp2": Layout(4, "--ep 2 --pp 2 --microbatches 2 --schedule zb-h1", ("experts",)),
}
HALVES: dict[str, Layout] = {
    "dp3, float16": Layout(3, "--dtype float16"),
    "dp2 tp3, float16, ZeRO 1": Layout(6, "--dtype float16 --tp 3 --zero 1"),
    "pp2 cp2, float16, ZeRO 3": Layout(4, "--dtype float16 --pp 2 --cp 2 --microbatches 2 --zero 3"),
    "dp2, bfloat16, ZeRO 2": Layout(2, "--dtype bfloat16 --zero 2"),
}
"""Where masters are float32 they may stand beside the ones above."""

OFFLOADS_WHOLE = ("offload",)
TOLERANCE = {"float64": 1e-10, "float32": 1e-6}


def names(model: str, dtype: str) -> list[str]:
    """The layouts of a model in a precision."""
    table = LAYOUTS if dtype == "float64" else {**LAYOUTS, **HALVES}
    return [name for name, layout in table.items() if model in layout.of]


class Matrix:
    """Runs of one model in one precision, in a folder.

    Args:
        folder: for runs and checkpoints.
        model: of MODELS.
        dtype: float64, or float32, beside which there are halves.

    Attributes:
        reference: the run of one rank that never stopped; lines: its metrics.
        gap: the largest difference of a next step from its, in units of the largest element of its kind; not of halves.
    """

    def __init__(self, folder: Path, model: str, dtype: str) -> None:
        self.folder, self.model, self.dtype = folder, model, dtype
        self._text = folder / "text.txt"
        self._text.write_text(TEXT)
        self._saved: dict[str, tuple[Path, State]] = {}
        self._steps: dict[tuple[str, str], State] = {}
        self._pairs = 0
        self.gap = 0.0
        self.reference = self._train("one rank", "reference", stop=SAVED + 1)
        self.lines = metrics(folder / "reference")

    def saved(self, name: str) -> tuple[Path, State]:
        """The checkpoint that a layout saved, and the state that it had then."""
        if name not in self._saved:
            run = f"saved-{len(self._saved)}"
            watch = self._train(name, run, stop=SAVED)
            path = self.folder / run / "checkpoints" / f"step-{SAVED:08}"
            self._saved[name] = path, watch.states[SAVED]
        return self._saved[name]

    def pair(self, saves: str, loads: str) -> list[str]:
        """Load in one layout what another has saved, and make a step; what is wrong then, nothing if all is well."""
        path, state = self.saved(saves)
        self._pairs += 1
        run = f"pair-{self._pairs}"
        watch = self._train(loads, run, stop=SAVED + 1, resume=path)
        wrong = [f"loaded otherwise than saved: {name}" for name in self._changed(state, watch.states[SAVED], loads)]
        if watch.data() != {SAVED: self.reference.data()[SAVED]}:
            wrong.append("the next step reads other rows")
        return wrong + self._next_step(saves, loads, watch, metrics(self.folder / run)[0])

    def _changed(self, saved: State, loaded: State, loads: str) -> list[str]:
        """What a load did not bring back; a scale of halves is new where there was none."""
        new_scale = (saved.numbers["scale"] is None) != (loaded.numbers["scale"] is None)
        return [name for name in different(saved, loaded) if not (name == "scale" and new_scale)]

    def _next_step(self, saves: str, loads: str, watch: Watch, line: dict[str, object]) -> list[str]:
        """How far the next step is from the reference's."""
        mine, tolerance = watch.states[SAVED + 1], TOLERANCE[self.dtype]
        if loads in HALVES or saves in HALVES:
            return far(mine, self._alone(saves, loads), self.saved(saves)[1], NEAR[self.model])
        wrong = []
        for kind, of in kinds(self.reference.states[SAVED + 1].tensors).items():
            found = compare(kinds(mine.tensors)[kind], of, tolerance, kind)
            largest = max(float(np.abs(tensor).max()) for tensor in of.values())
            self.gap = max(self.gap, *(difference.error / largest for difference in found))
            if self.dtype == "float32":
                found = [difference for difference in found if not difference.error <= tolerance * largest]
            wrong += [str(difference) for difference in found if not difference.ok]
        wanted = self.lines[SAVED]
        for key in ("loss", "grad_norm", "lr", "tokens"):
            if not np.isclose(float(line[key]), float(wanted[key]), rtol=10 * tolerance, atol=0):  # type: ignore[arg-type]
                wrong.append(f"{key} of the next step is {line[key]}, the reference's {wanted[key]}")
        return wrong

    def _alone(self, saves: str, loads: str) -> State:
        """The next step of one rank, in the precision of a layout."""
        dtype = dtype_of(loads, self.dtype)
        if (saves, dtype) not in self._steps:
            run = f"alone-{len(self._steps)}"
            watch = self._train("one rank", run, stop=SAVED + 1, resume=self.saved(saves)[0], dtype=dtype)
            self._steps[saves, dtype] = watch.states[SAVED + 1]
        return self._steps[saves, dtype]

    def _train(self, name: str, run: str, *, stop: int, resume: Path | None = None, dtype: str = "") -> Watch:
        """Some steps in a layout, in a folder of their own."""
        ranks, flags, _ = {**LAYOUTS, **HALVES}[name]
        words = [*COMMON, *MODELS[self.model], *NO_LAYOUT, "--dtype", dtype or dtype_of(name, self.dtype)]
        words += ["--data", str(self._text), *flags.replace("{disk}", str(self.folder / "disk")).split()]
        if resume is not None:
            words += ["--resume", str(resume)]
        words += ["--run", str(self.folder / run), "--stop-after", str(stop)]
        with small_pieces(), Watch() as watch, contextlib.redirect_stdout(io.StringIO()):
            LocalWorld(ranks).run(main, words)
        return watch


def dtype_of(name: str, dtype: str) -> str:
    """The precision of a layout in a matrix of some precision."""
    words = HALVES[name].flags.split() if name in HALVES else []
    return words[words.index("--dtype") + 1] if words else dtype


def kinds(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """The tensors of a state by kind."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        kind, _, of = name.partition("/")
        found.setdefault(kind, {})[of] = tensor
    return found


NEAR = {"dense": 0.01, "experts": 0.1}
"""How far halves that were rounded in another order may be, as a part of the way of a step; a token between two experts
may go to the other one, which the whole step feels."""


def far(mine: State, other: State, before: State, part: float) -> list[str]:
    """Weights of which two steps, from the same place, are apart by more than a part of their way."""
    found = []
    for name, tensor in other.tensors.items():
        if name.startswith("weight/"):
            gap, way = (float(np.linalg.norm(of.tensors[name] - tensor)) for of in (mine, before))
            if not gap <= part * way:
                found.append(f"{name} is {gap:.1e} from where one rank goes in this precision, {way:.1e} far")
    return found


def _command() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--dtype", choices=TOLERANCE, action="append")
    parser.add_argument("--only", nargs="*", default=[], help="layouts whose names begin so")
    asked = parser.parse_args()
    bad = 0
    for model in asked.model or MODELS:
        for dtype in asked.dtype or TOLERANCE:
            began, wrong = time.perf_counter(), 0
            chosen = [name for name in names(model, dtype) if not asked.only or name.startswith(tuple(asked.only))]
            with TemporaryDirectory() as folder:
                matrix = Matrix(Path(folder), model, dtype)
                for saves, loads in product(chosen, chosen):
                    found = matrix.pair(saves, loads)
                    wrong += bool(found)
                    if found:
                        print(f"{saves}  ->  {loads}:", *found[:4], sep="\n    ", flush=True)
            count = len(chosen) ** 2
            print(
                f"{model}, {dtype}: {count - wrong} of {count} pairs of {len(chosen)} layouts hold, largest gap "
                f"{matrix.gap:.1e}, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            bad += wrong
    return 1 if bad else 0


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    sys.exit(_command())
