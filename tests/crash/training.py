"""A training whose saves are attacked, and how its checkpoints are judged.

Two stages, each on two data parallel ranks with ZeRO-1: every rank writes, of weights, of moments and of what only one
stage has.  It is the trainer itself, small enough to be started a thousand times.  A reference run, which nobody
disturbs, keeps all its checkpoints; whatever a disturbed run leaves behind must be, bit for bit, one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from mpitrain import checkpoint
from mpitrain.checkpoint import SlabRef
from mpitrain.comm.local import LocalWorld
from mpitrain.comm.world import World, world
from mpitrain.errors import CheckpointError, CommError, UserError
from mpitrain.events import Listener, join
from mpitrain.train import main

RANKS = 4
STEPS = 8
TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(400))
FLAGS = (
    "--model gpt-tiny --layers 2 --width 16 --heads 2 --seq-len 16 --batch 4 --lr 0.01 --sample-length 0 "
    "--eval-every 0 --log-every 1000 --deterministic --pp 2 --dp 2 --zero 1"
).split()

State = tuple[dict[str, np.ndarray], dict[str, Any]]
"""All tensors of a checkpoint, whole, and the scalars that training goes on from."""


@dataclass(frozen=True)
class Scene:
    """What a run holds when it is started, and how it is started.

    Attributes:
        name: of the scene.
        holds: steps whose checkpoints it holds; one that is called "other" has the step 3 of another training.
        resume: what it goes on from: `latest`, or `elsewhere`: a checkpoint of the reference run.
        stop: the step after which it stops.
        flags: more of them.
        left: names of folders that earlier, killed saves have left in it.
    """

    name: str
    holds: tuple[int | str, ...]
    resume: str | None
    stop: int
    flags: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def steps(self) -> set[int]:
        """The steps of which a complete checkpoint may be found."""
        return {3 if kept == "other" else int(kept) for kept in self.holds} | set(range(self.first, self.stop + 1))

    @property
    def first(self) -> int:
        """The first step that is made."""
        known = [kept for kept in self.holds if isinstance(kept, int)]
        return 3 if self.resume == "elsewhere" else max(known, default=0) + 1


SCENES = {
    scene.name: scene
    for scene in (
        Scene("the first save of a run", (), None, 1),
        Scene("a save beside others", (1, 2), "latest", 3),
        Scene("a save over the same step", (1, 2, "other"), "elsewhere", 3),
        Scene("a save over the only one", ("other",), "elsewhere", 3),
        Scene("a save that deletes an old one", (1, 2), "latest", 3, ("--keep", "2")),
        Scene("saves in the background", (1, 2), "latest", 4, ("--keep", "2", "--async-save")),
        Scene(
            "a save after killed ones",
            (1, 2),
            "latest",
            3,
            ("--keep", "2"),
            (".tmp-step-00000003", ".tmp-step-00000001", ".old-step-00000002", ".gone-step-00000001"),
        ),
    )
}


@dataclass
class Verdict:
    """What became of a run's checkpoints.

    Attributes:
        step: of the newest that loads; None if none does.
        lost: why what was found is a loss; empty if nothing is lost.
        damaged: what is shown as a checkpoint and is none.
    """

    step: int | None = None
    lost: str = ""
    damaged: list[str] = field(default_factory=list)


class Reference:
    """The undisturbed run, in a folder of its own: its text, its checkpoints and what they hold.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text"
        self.text.write_text(TEXT)
        self.run = folder / "reference"
        self.train(self.run, "--steps", str(STEPS), "--save-every", "1")
        other = folder / "other"
        other.mkdir()
        self.copy(other, [1, 2])
        self.train(other, "--resume", "latest", "--stop-after", "3", "--lr", "0.02")
        self.other = _checkpoint(other, 3)
        self._loaded: dict[bytes, State | str] = {}
        self.states: dict[int, list[State]] = {}
        for step in range(1, STEPS + 1):
            self.states[step] = [state_of(_checkpoint(self.run, step))]
        self.states[3].append(state_of(self.other))
        assert differences(*self.states[3])

    def copy(self, run: Path, steps: Collection[int | str]) -> None:
        """Put checkpoints of these steps into a run, as if it had stopped after the last one."""
        if steps:
            shutil.copy(self.run / "config.toml", run)
            lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
            (run / "metrics.jsonl").write_text(
                "".join(lines[: max(3 if step == "other" else int(step) for step in steps)])
            )
        for step in steps:
            source = self.other if step == "other" else _checkpoint(self.run, int(step))
            shutil.copytree(source, run / "checkpoints" / source.name)

    def prepare(self, scene: Scene, run: Path) -> list[str]:
        """Make the folder of a scene's run; the flags with which it is started."""
        run.mkdir()
        self.fill(scene, run)
        flags = ["--stop-after", str(scene.stop), "--save-every", "1", *scene.flags]
        if scene.resume is None:
            return ["--steps", str(STEPS), *flags]
        source = str(_checkpoint(self.run, 2)) if scene.resume == "elsewhere" else "latest"
        return ["--resume", source, *flags]

    def fill(self, scene: Scene, run: Path) -> None:
        """Put into a run what a scene begins with."""
        self.copy(run, scene.holds)
        for name in scene.left:
            shutil.copytree(_checkpoint(self.run, 5), run / "checkpoints" / name)

    def command(self, run: Path, *flags: str) -> list[str]:
        """All flags of a training in `run`."""
        return [*FLAGS, "--data", str(self.text), "--run", str(run), *flags]

    def train(self, run: Path, *flags: str, listener: Callable[[World], Listener] | None = None) -> str:
        """Train in this process, on threads.

        Args:
            run: its folder.
            flags: more flags.
            listener: makes, for each rank, what hears its events.

        Returns:
            What it printed.
        """
        said = io.StringIO()

        def body() -> None:
            if listener is not None:
                join(listener(world()))
            main(self.command(run, *flags))

        with contextlib.redirect_stdout(said):
            LocalWorld(RANKS).run(body)
        return said.getvalue()

    def endings(self, run: Path, *flags: str, listener: Callable[[World], Listener] | None = None) -> list[str | None]:
        """Train, and have each rank return the message with which it ends; None if it ends well."""

        def body() -> str | None:
            if listener is not None:
                join(listener(world()))
            try:
                main(self.command(run, *flags))
            except UserError as error:
                if isinstance(error, CommError):
                    raise
                return f"{type(error).__name__}: {error}"
            return None

        with contextlib.redirect_stdout(io.StringIO()):
            return LocalWorld(RANKS).run(body)

    def judge(self, run: Path, scene: Scene, least: int | None = None) -> Verdict:
        """Whether a complete checkpoint loads from what is left of a run, and is one of the reference.

        Args:
            run: its folder.
            scene: that it played.
            least: the step of which a checkpoint was promised; None: of any step, if there was one at the start.
        """
        verdict = Verdict()
        for path, wrong in checkpoint.survey(run):
            state = wrong or self._load(path)
            if isinstance(state, str):
                verdict.damaged.append(state)
                continue
            step = state[1]["step"]
            verdict.step = step if verdict.step is None else verdict.step
            if step not in scene.steps or not any(not differences(state, known) for known in self.states[step]):
                verdict.lost = f"{path.name} loads and is not what was saved"
        promised = least if least is not None else (0 if scene.holds else None)
        if promised is not None and (verdict.step is None or verdict.step < promised):
            verdict.lost = verdict.lost or f"nothing newer than step {verdict.step} loads: {verdict.damaged}"
        return verdict

    def _load(self, path: Path) -> State | str:
        """What a checkpoint holds, or why it cannot be loaded; the same bytes are loaded once."""
        files = sorted(path.iterdir())
        digest = hashlib.sha256(path.name.encode())
        for file in files:
            digest.update(f"/{file.name}/{file.stat().st_size}/".encode() + file.read_bytes())
        key = digest.digest()
        if key not in self._loaded:
            try:
                self._loaded[key] = state_of(path)
            except CheckpointError as error:
                self._loaded[key] = str(error)
        return self._loaded[key]

    def go_on(self, run: Path, scene: Scene) -> None:
        """Let a run that was disturbed go on to the end.

        Raises:
            AssertionError: it comes to another end than the reference, or something is left over on the disk.
        """
        resume = ["--resume", "auto"] if (run / "checkpoints").exists() else []
        self.train(run, *resume, "--steps", str(STEPS), "--stop-after", str(STEPS), "--save-every", str(STEPS))
        state = state_of(_checkpoint(run, STEPS))
        if "other" not in scene.holds:  # which of the two trainings it went on with is not known
            assert not differences(state, self.states[STEPS][0])
        left = [name for name in os.listdir(run / "checkpoints") if not re.fullmatch("(given-up-.*)?step-[0-9]+", name)]
        assert not left


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def state_of(path: Path, ranks: int = 1) -> State:
    """All that a checkpoint holds, read by the library: of every tensor each rank reads some rows, or some columns.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    found = LocalWorld(ranks).run(_load, path)
    tensors, scalars = found[0]
    assert all(others == scalars for _, others in found)
    whole = {
        name: np.concatenate([of[name] for of, _ in found], _cut(name, a.ndim)) for name, a in tensors.items() if a.ndim
    }
    return {**tensors, **whole}, scalars


def _load(path: Path) -> State:
    rank, size = world().rank, world().size
    tensors, slabs = {}, []
    for name, tensor in checkpoint.read_manifest(path).tensors.items():
        rectangle = [slice(0, length) for length in tensor.shape]
        if rectangle:
            dim = _cut(name, len(rectangle))
            rectangle[dim] = slice(tensor.shape[dim] * rank // size, tensor.shape[dim] * (rank + 1) // size)
        part = tensors[name] = np.zeros([of.stop - of.start for of in rectangle], tensor.dtype)
        slabs.append(SlabRef(name, tensor.shape, tuple(rectangle), part, None))
    scalars = checkpoint.load(path, slabs, world())
    return tensors, {name: value for name, value in scalars.items() if name != "config"}


def _cut(name: str, dims: int) -> int:
    """The dim in which ranks share a tensor: the first, or the last."""
    return (len(name) % 2) * (dims - 1)


def differences(a: State, b: State) -> list[str]:
    """What two states do not share, to the last bit."""
    wrong = [f"{name} differs" for name in a[1].keys() | b[1].keys() if a[1].get(name) != b[1].get(name)]
    for name in a[0].keys() | b[0].keys():
        one, two = (of[0].get(name) for of in (a, b))
        if one is None or two is None or one.dtype != two.dtype or one.tobytes() != two.tobytes():
            wrong.append(f"{name} differs")
    return wrong


@contextlib.contextmanager
def kept_later_steps():
    """Leave the checkpoints of later steps in their place when a run goes on from an earlier one.

    The trainer renames them, or refuses the folder; a script of one's own may not, and then saves over them.
    """
    refuse_nothing = mock.patch.object(checkpoint, "claim")
    with mock.patch.object(checkpoint, "retire_after", return_value=[]), refuse_nothing:
        yield
