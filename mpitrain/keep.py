"""What a run keeps on the disk, and how it goes on from there.

    settings_of     the settings of a run that goes on: those that were saved, and flags that win over them
    Keeper          saves the state of a run, at once or in the background, and fills a run with what was saved

The file format stands in `checkpoint`; here is what of a training must be in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mpitrain import checkpoint
from mpitrain import config as settings
from mpitrain.catalog import family_of
from mpitrain.checkpoint.tools.source import Source
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.data.corpus import Corpus
from mpitrain.errors import CheckpointDamaged, CheckpointError
from mpitrain.models.decoder import Decoder
from mpitrain.optim.optimizer import Optimizer
from mpitrain.options import show
from mpitrain.parallel.local_sgd import OWN as OF_WORKERS
from mpitrain.parallel.local_sgd import parted
from mpitrain.parallel.powersgd import ERROR as POWERSGD_ERROR
from mpitrain.parallel.powersgd import Q as POWERSGD_Q
from mpitrain.parallel.stale import KIND as PENDING
from mpitrain.pipeline.executor import Executor
from mpitrain.routing import usual_router
from mpitrain.weights import BROUGHT, IMPORTED, fill, said_besides, settings_in, tokenizer_of

SCALING = ("loss_scaling", "loss_scale")
"""Settings with which a resumed run begins its scales anew."""
OLDER = {
    "freeze": None,
    "hidden": None,
    "window": None,
    "norm_eps": None,
    "rope_theta": None,
    "rope_scaling": None,
    "vocab": None,
    "kv_heads": None,
    "experts": None,
    "top_k": 1,
    "router": None,
    "renormalize": False,
    "moe_every": 1,
}
"""Settings that runs of an earlier version do not name, and what they were."""
MUST_STAY = ("layers", "width", "heads", "seq_len", "tied", "gelu", "seed", "batch", "optimizer", *OLDER)
"""Settings that a resumed run cannot change: another model, other data order, other optimizer state."""


def settings_of(flags: list[str], found: Path | None, origin: Source | None = None) -> Config:
    """The settings with which the run was started, and flags that win over them; its number of steps stays.

    Without a checkpoint (`--resume auto` found none) they are those of a run that begins, with the model in `origin` if
    it begins with the weights of another one.

    How many ranks divided the batch is of the start that is over: unless it is asked for, all that are left do now.
    """
    if found is None:
        return replace(settings.parse(flags, None if origin is None else _begun_with(origin)), resume=None)
    scalars = checkpoint.read_manifest(found).scalars
    if IMPORTED in scalars:
        raise CheckpointError(
            f"{found} holds the weights of another tool, and nothing to go on with.\n"
            f"Begin a new run with them: --init {show(found)}"
        )
    saved = scalars.get("config")
    if isinstance(saved, dict):
        saved = {**OLDER, **saved}
    if not isinstance(saved, dict) or not saved.keys() >= {"steps", "dtype", *MUST_STAY}:
        raise CheckpointError(f"{found} holds no settings: it was not saved by training.  Resume from another one.")
    # Settings may name another place: the folder was moved or copied, or is seen from another working directory.
    home = str(found.parent.parent) if found.parent.name == "checkpoints" else None
    named = settings.names_a_file(flags)
    if home is not None and not named and Path(home, "config.toml").is_file():
        config = settings.parse(["--config", f"{home}/config.toml", "--run", home, *flags])
        if not settings.gives(flags, "--dp"):
            config = replace(config, dp=None)
    else:
        config = settings.parse(flags, {**saved, "run": home, "dp": None})
    new_stages = any(settings.gives(flags, flag) for flag in ("--pp", "--schedule", "--chunks", "--balance"))
    if new_stages and not named and not settings.gives(flags, "--stage-layers"):
        config = replace(config, stage_layers=None)  # what was given was for the stages of before
    if config.steps is None:
        config = config.fixed(saved["steps"])
    before, now = saved["dtype"], config.dtype
    if before != now and "float64" in (before, now):
        raise CheckpointError(
            f"{found} was saved with dtype {show(before)}, now it is {now}: float64 is another run, with"
            " weights and moments of its own.\nA run of float64 goes on in float64; one of float32, float16 or bfloat16"
            " (masters of float32) in any of these three."
        )
    families = family_of(str(saved.get("model"))), config.family
    if families[0] != families[1]:
        raise CheckpointError(
            f"{found} is a {families[0]}, --model {config.model} is a {families[1]}: start a new run."
        )
    for name in MUST_STAY:
        before, now = (_meant(of, name) for of in (saved, asdict(config)))
        if before != now:
            raise CheckpointError(
                f"{found} was saved with {name} {show(before)}, now it is {now}.\n"
                f"A run goes on with the {name} that it began with: leave the option out, or start a new run."
            )
    return config


def _begun_with(origin: Source) -> dict[str, Any]:
    """Settings of a run that begins with the weights of a checkpoint: those of its model, and the words it knows."""
    tokenizer = tokenizer_of(origin)
    return {**settings_in(origin), **({} if tokenizer is None else {"tokenizer": str(tokenizer)})}


def _meant(config: Mapping[str, Any], name: str) -> Any:
    """A setting; of one that nobody asked for, what it then is."""
    if config[name] is None and name == "kv_heads":
        return config["heads"]
    if config[name] is None and name == "router":
        return usual_router(config["top_k"])
    return config[name]


class Keeper:
    """Saves and fills the state of a run.

    Args:
        config: the settings.
        mesh: the layout.
        model: its weights.
        optimizer: its moments, and the number of updates.
        executor: its reducer and its scales.
        corpus: the text, whose hash is saved.
        folder: of the run.
        say: tells people, on the rank that reports.

    Attributes:
        seen: targets learned from.
        seconds: that the last save took the ranks, if it did not go on in the background.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Decoder,
        optimizer: Optimizer,
        executor: Executor,
        corpus: Corpus,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.mesh, self.model, self.corpus, self.folder = config, mesh, model, corpus, folder
        self.optimizer, self.executor = optimizer, executor
        self.seen = 0
        self.seconds = 0.0
        self._brought: dict[str, Any] = {}  # what another tool said of the weights that the run began with
        self._say = say
        self._saving: checkpoint.Saving | None = None
        self._snapshot: checkpoint.Snapshot | None = None
        if config.async_save:
            self._snapshot = checkpoint.Snapshot()
            self._snapshot.reserve(self._tensors())

    # -- save ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether this rank still writes a save in the background."""
        return self._saving is not None and self._saving.busy

    @property
    def saving(self) -> bool:
        """Whether a save has begun and is not published; the same on all ranks."""
        return self._saving is not None

    def save(self, step: int, *, wait: bool) -> None:
        """Save the state after so many steps.  Collective over the world.

        Args:
            step: steps that are done.
            wait: return when the checkpoint is there; else, with --async-save, when it is copied.

        Raises:
            CheckpointError: some rank could not; the same on all ranks.
        """
        self.publish()
        began = time.perf_counter()
        self.executor.reducer.join()
        self._saving = checkpoint.begin(
            self.folder,
            step,
            self._tensors(),
            self._scalars(step),
            self.mesh.world,
            layout=self.mesh.sizes,
            keep=self.config.keep,
            read_back=self.config.read_back,
            snapshot=None if wait else self._snapshot,
        )
        if wait or self._snapshot is None:
            self.publish()
            self.seconds = time.perf_counter() - began

    def publish(self) -> None:
        """Wait for the save that is under way, if there is one, and make it a checkpoint.  Collective over the world.

        Raises:
            CheckpointError: some rank could not write it; the same on all ranks.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            self._say(f"saved {saving.finish()}")

    def _tensors(self) -> list[checkpoint.SlabRef]:
        """What this rank holds of all that is saved."""
        reducer = self.executor.reducer
        states = {**self.optimizer.state_tensors(), **reducer.state_tensors()}
        return checkpoint.slabs_of(self.model.kept(), states, self.mesh, reducer.apart)

    def _scalars(self, step: int) -> dict[str, Any]:
        scalars = {
            "updates": self.optimizer.updates,
            "tokens": self.seen,
            "data": {"next_step": step, "sha256": self.corpus.sha256, **self._words()},
            "config": asdict(self.config),
        }
        if self.executor.scaler is not None:
            scalars["scaler"] = self.executor.scaler.state_dict()
        if self._brought:
            scalars[BROUGHT] = self._brought
        return scalars

    def _words(self) -> dict[str, str]:
        """What is saved of the tokenizer: its hash; the file is in the folder of the run."""
        return {} if self.corpus.tokenizer is None else {"tokenizer": self.corpus.tokenizer.sha256}

    # -- begin, resume ------------------------------------------------------------------------------------------------

    def begin_with(self, origin: Source) -> None:
        """Fill the weights from a checkpoint; all else is as at the start of a run.  Collective over the world.

        Raises:
            CheckpointError: it does not fit, or is damaged; the same on all ranks.
        """
        fill(self.model, origin, self.mesh.world)
        self.executor.reducer.updated()
        self._brought = said_besides(origin)
        self._say(f"begin with the weights of {origin}\n")

    def resume(self, found: Sequence[Path], steps: int) -> int:
        """Fill weights, optimizer, reducer and scales from the first checkpoint that is not damaged.

        Collective over the world.  Checkpoints of later steps, of a future that is given up, are renamed.

        Args:
            found: the newest first.
            steps: of the run.

        Returns:
            The number of steps that are done.

        Raises:
            CheckpointError: it does not fit, has more steps behind it, or all are damaged; the same on all ranks.
        """
        for number, path in enumerate(found):
            try:
                return self._fill(path, steps)
            except CheckpointDamaged as error:
                if number + 1 < len(found):
                    self._say(f"Passed over: {error}")
                elif number == 0:
                    raise
                else:
                    raise CheckpointDamaged(f"{error}\nIt was the last one: all {len(found)} are damaged.") from None
        raise AssertionError("there was nothing to go on from")

    def _fill(self, found: Path, steps: int) -> int:
        """Fill everything from this checkpoint; the number of steps that are done."""
        optimizer, reducer, world = self.optimizer, self.executor.reducer, self.mesh.world
        shapes = checkpoint.shapes(found, world)
        states = {**optimizer.state_tensors(), **reducer.state_to_fill(shapes)}
        tensors = checkpoint.slabs_of(self.model.kept(), states, self.mesh, reducer.apart)
        besides = [name for name in shapes if name.startswith((POWERSGD_Q, POWERSGD_ERROR, PENDING, OF_WORKERS))]
        saved = checkpoint.load(found, tensors, world, besides=besides)
        for flat in self.model.flats:
            flat.refresh()
        reducer.updated()
        counts, data = [saved.get(name) for name in ("updates", "tokens")], saved.get("data")
        known = isinstance(data, dict) and isinstance(data.get("sha256"), str)
        if not known or not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
            raise CheckpointError(f"{found} is damaged: its manifest lacks updates, tokens or the text's sha256.")
        if data["sha256"] != self.corpus.sha256:
            raise CheckpointError(
                f"{found} was trained on another text (sha256 {show(data['sha256'][:12])}) than\n{self.corpus}.\n"
                "Give the same text with --data PATH, or start a new run."
            )
        optimizer.updates = saved["updates"]
        said = world.exchange(reducer.resumed(optimizer.updates))
        told = dict.fromkeys(line for text in said for line in text.splitlines())
        if self.config.reducer != "powersgd" and any(name.startswith(f"{POWERSGD_ERROR}/") for name in shapes):
            told[f"what PowerSGD left out of gradients is lost: --reducer {self.config.reducer} adds none of it"] = None
        if self.config.reducer != "stale" and any(name.startswith(PENDING) for name in shapes):
            told[f"gradients on their way to the weights are lost: --reducer {self.config.reducer} takes none"] = None
        if self.config.reducer != "local" and parted(shapes):
            told[f"moments of all workers but the first are lost: --reducer {self.config.reducer} has one set"] = None
        self._resume_scaler(found, saved)
        self.seen = saved["tokens"]
        brought = saved.get(BROUGHT)
        self._brought = brought if isinstance(brought, dict) else {}
        if saved["step"] > steps:
            raise CheckpointError(
                f"{found} has {saved['step']} steps behind it, but --steps is {steps}.  Ask for more steps than that."
            )

        def give_up() -> None:
            if world.rank == 0:
                checkpoint.retire_after(self.folder, saved["step"])

        checkpoint.agreed(world, give_up, f"{self.folder}: checkpoints of later steps cannot be renamed")
        self._say(f"go on after step {saved['step']} from {found}\n")
        for text in told:
            self._say(f"{text}\n")
        return int(saved["step"])

    def _resume_scaler(self, found: Path, saved: dict[str, Any]) -> None:
        """Go on with the scales of gradients, unless other ones were asked for."""
        scaler, before = self.executor.scaler, saved.get("config")
        dtype = before.get("dtype") if isinstance(before, dict) else self.config.dtype
        if dtype != self.config.dtype:
            scale = "have no scale" if scaler is None else "begin with a new scale"
            self._say(f"{self.config.dtype} from here on, {dtype} before: masters stay float32, and gradients {scale}")
            return
        if scaler is None:
            return
        asked = [[of.get(name) for name in SCALING] for of in (asdict(self.config), before or {})]
        if asked[0] != asked[1]:
            self._say("the scale of the gradients begins anew: other options than before were asked for")
        elif isinstance(saved.get("scaler"), dict):
            scaler.load_state(saved["scaler"])
        else:
            raise CheckpointError(f"{found} is damaged: its manifest lacks the scale of the gradients.")
