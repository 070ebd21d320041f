"""Training from settings to curve: the loop, and what is around it.

    settings -> ranks -> mesh -> corpus -> model -> steps fixed -> (resume) -> steps -> curve and sample

What a step is stands in `pipeline.executor`; the parts are put together in `assemble`.  A script of one's own uses the
same parts: README shows one of 20 lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import checkpoint
from mpitrain import config as settings
from mpitrain.assemble import (
    build_executor,
    build_model,
    build_optimizer,
    parameter_groups,
    read_corpus,
    run_folder,
    step_of,
)
from mpitrain.clock import Clock, seconds
from mpitrain.comm.launcher import is_first
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World, world
from mpitrain.config import Config
from mpitrain.config_rules import check_layout
from mpitrain.curve import loss_curve
from mpitrain.data.corpus import Corpus
from mpitrain.data.tokens import Tokens
from mpitrain.debug.memory import MemoryLedger
from mpitrain.debug.states import StateChecker
from mpitrain.errors import CheckpointError, ConfigError, MeshError
from mpitrain.events import listen
from mpitrain.memory_table import Found, found_here, largest_of_ranks, of_blocks
from mpitrain.memory_table import table as memory_table
from mpitrain.metrics import MetricsWriter, read_metrics
from mpitrain.models.gpt import GPT
from mpitrain.optim.groups import check_groups
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import power
from mpitrain.parallel.expert.counted import for_metrics, in_words, of_model
from mpitrain.parallel.local_sgd import OWN as OF_WORKERS
from mpitrain.parallel.local_sgd import parted
from mpitrain.parallel.powersgd import ERROR as POWERSGD_ERROR
from mpitrain.parallel.powersgd import Q as POWERSGD_Q
from mpitrain.parallel.replicas import agree_on_arithmetic, check_replicas
from mpitrain.parallel.stale import KIND as PENDING
from mpitrain.pipeline.hunter import Hunter
from mpitrain.pipeline.update import StepReport
from mpitrain.report import Terminal, duration, start_block, step_line
from mpitrain.routing import usual_router
from mpitrain.sample import sample
from mpitrain.startup import facts

TRIAL_STEPS = 10
TRIAL_WARM_UP = 2  # of them, whose times do not count
BUDGET_SHARE = 0.95  # of the budget is planned: later steps may be slower than the ten that were timed
LONGEST_ROW = 256  # steps that overlap before the pipeline drains, if neither validation nor a checkpoint drains it
VALIDATION_ROWS = 32  # sequences that a rank evaluates at once
SCALING = ("loss_scaling", "loss_scale")
"""Settings with which a resumed run begins its scales anew."""
OLDER = {"kv_heads": None, "experts": None, "top_k": 1, "router": None, "renormalize": False, "moe_every": 1}
"""Settings that runs of an earlier version do not name, and what they were."""
MUST_STAY = ("layers", "width", "heads", "seq_len", "tied", "gelu", "dtype", "seed", "batch", "optimizer", *OLDER)
"""Settings that a resumed run cannot change: another model, other data order, other optimizer state."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; every rank calls it.

    Args:
        argv: flags without the program's name; None: this process's.

    Returns:
        The exit code, 0.

    Raises:
        UserError: whatever is wrong with settings, ranks, data or files, on every rank; `mpitrain.cli.guarded` and the
            MPI guard print it once.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    if settings.wants_help(flags):
        if is_first(os.environ):
            print(settings.usage("mpitrain train | python examples/train_gpt.py"))
        return 0
    began = time.perf_counter()
    mistake: ConfigError | None = None
    try:
        config = settings.parse_first(flags)
    except ConfigError as error:
        if not settings.names_a_file(flags):
            raise  # a mistake in the flags is made by all ranks
        config, mistake = Config(), error  # the file may be missing on one host only
    ranks = world(config.start_timeout)
    ranks.agree(mistake)
    ranks.board.limit = config.timeout
    if config.deterministic:
        ranks.set_deterministic()
    if config.check:
        ranks.set_checked()
    agree_on_arithmetic(ranks)  # before anything is said or written
    if config.resume is not None:
        found = checkpoint.find(config.resume, config.run, ranks)
        config = together(ranks, lambda: _settings_of_resumed(flags, found)) or config
    else:
        found = None
    mesh = _mesh(ranks, config, found, flags)
    check_layout(config, mesh.dp.size)
    Training(config, mesh, found, began).run()
    return 0


def _mesh(ranks: World, config: Config, found: Path | None, flags: list[str]) -> Mesh:
    """The layout.

    Raises:
        MeshError: it does not fit the ranks; says where it is from if no flag gave it.
    """
    try:
        return Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
    except MeshError as error:
        axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(config, axis) > 1]
        kept = " ".join(f"--{axis}" for axis in axes if not settings.gives(flags, f"--{axis}"))
        if found is None or not kept or settings.names_a_file(flags):
            raise
        raise MeshError(f"{error}\n{kept} of the saved run ({found}) holds until a flag changes it.") from None


def _settings_of_resumed(flags: list[str], found: Path) -> Config:
    """The settings with which the run was started, and flags that win over them; its number of steps stays.

    How many ranks divided the batch is of the start that is over: unless it is asked for, all that are left do now.
    """
    saved = checkpoint.read_manifest(found).scalars.get("config")
    if isinstance(saved, dict):
        saved = {**OLDER, **saved}
    if not isinstance(saved, dict) or not saved.keys() >= {"steps", *MUST_STAY}:
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
    for name in MUST_STAY:
        before, now = (_meant(of, name) for of in (saved, asdict(config)))
        if before != now:
            raise CheckpointError(
                f"{found} was saved with {name} {before}, now it is {now}.\n"
                f"A run goes on with the {name} that it began with: leave the option out, or start a new run."
            )
    return config


def _meant(config: Mapping[str, Any], name: str) -> Any:
    """A setting; of one that nobody asked for, what it then is."""
    if config[name] is None and name == "kv_heads":
        return config["heads"]
    if config[name] is None and name == "router":
        return usual_router(config["top_k"])
    return config[name]


class Training:
    """One start of a run: from its first step, or on from a checkpoint.

    Args:
        config: the settings.
        mesh: the layout.
        found: the checkpoint to go on from.
        began: when the process began, by `time.perf_counter`.

    Raises:
        UserError: on every rank, before the first step.
    """

    def __init__(self, config: Config, mesh: Mesh, found: Path | None, began: float) -> None:
        self.config = config
        self.mesh = mesh
        self.found = found
        self.began = began
        self.world: World = mesh.world
        self.reports = mesh.is_reporter
        self.terminal = Terminal.of_launcher(sys.stdout)
        self.folder = run_folder(config, self.world)
        self.corpus: Corpus = read_corpus(config, self.world)
        self.tokens = Tokens(self.corpus, config.seq_len, config.seed)
        self.model: GPT = build_model(config, self.corpus, mesh)
        check_groups(parameter_groups(config), [p.name for p in self.model.parameters()], self.world)
        if found is None:  # last, so that a mistake leaves no folder behind
            together(self.world, lambda: checkpoint.claim(self.folder), here=self.world.rank == 0)
        self._lock = together(self.world, lambda: checkpoint.hold(self.folder), here=self.world.rank == 0)
        self.world.board.run_folder = str(self.folder)
        self.seen = 0  # targets learned from
        self.skipped = 0  # steps of this start whose gradients overflowed
        self._told_of_blocks = False

    def run(self) -> None:
        """All steps, and what comes after the last one."""
        try:
            self._run()
        finally:
            if self._lock is not None:
                os.close(self._lock)
            if self.model.elsewhere is not None:
                self.model.elsewhere.home.close()

    def _run(self) -> None:
        if self.reports:
            block = facts(self.config, self.mesh, self.model, self.corpus, self.folder)
            self.terminal.heading(start_block("mpitrain", block))
        steps = self._fixed_steps()
        optimizer = build_optimizer(self.config, self.model, self.mesh)
        self.executor = build_executor(self.config, self.model, optimizer, self.mesh, steps)
        done = 0 if self.found is None else self._resume(self.found, optimizer)
        if done > steps:
            raise CheckpointError(
                f"{self.found} has {done} steps behind it, but --steps is {steps}.  Ask for more steps than that."
            )
        held = self.model.parameters() if self.model.zero < 3 else self.model.shares()
        check_replicas(held, self.mesh, f"before step {done + 1}")
        together(self.world, self._write_settings, here=self.world.rank == 0)
        last = min(steps, max(self.config.stop_after or steps, done))
        self._steps(done, last, steps, optimizer)
        self._finish(last, steps)

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _steps(self, done: int, last: int, steps: int, optimizer: Optimizer) -> None:
        """Steps done + 1 ... last of a run of `steps`."""
        config, dp = self.config, self.mesh.dp
        log_every, eval_every = config.log_interval(steps), config.eval_interval(steps)
        path = self.folder / "metrics.jsonl"
        metrics = together(self.world, lambda: MetricsWriter(path, done + 1), here=self.reports)
        clock = Clock(config.batch * config.seq_len)
        batches = self.tokens.batches(config.batch, dp.rank, dp.size, done, last, self.model.positions_here)
        apart = self.executor.reducer.apart
        checker = StateChecker(self.model.parameters(), self.mesh, apart) if config.check else None
        ledger = MemoryLedger({"corpus": (self.corpus.train, self.corpus.val)}) if config.memory else None
        hunter = Hunter(self.model, optimizer, self.world.rank) if config.check else None
        listeners = [listener for listener in (checker, hunter, ledger) if listener is not None]
        with metrics or contextlib.nullcontext(), contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listen(listener))
            step = done
            while step < last:
                row = self._row(step, last, steps)
                reports = self.executor.run(list(islice(batches, row)))
                clock.tick(row)
                held = self._held(ledger, row) if ledger is not None and (step == done or step + row >= last) else None
                for report in reports:
                    step += 1
                    self.seen += 0 if report.skipped else report.targets
                    val_loss = None
                    if step == steps or (eval_every and step % eval_every == 0):
                        val_loss = self._validate()
                        clock.restart()
                    if metrics is not None:
                        logged = step in (done + 1, last) or val_loss is not None or step % log_every == 0
                        peaks = largest_of_ranks(held) if held is not None and step == last else None
                        self._tell(metrics, clock, report, step, steps, val_loss, logged, peaks)
                if held is not None:
                    self._say_memory(held, step)
                if (config.save_every and step % config.save_every == 0) or (step == last and config.stop_after):
                    self._say(f"saved {self._save(step, optimizer)}")
                    clock.restart()
        self.terminal.end()

    def _row(self, done: int, last: int, steps: int) -> int:
        """How many steps are made before anything else: one, or where steps overlap as many as nothing interrupts.

        What is measured or saved must not depend on how often a line is printed, so lines wait for the row's end.
        """
        if self.executor.versions is None:
            return 1
        stops = (self.config.eval_interval(steps), self.config.save_every)
        return min(last - done, LONGEST_ROW, *(every - done % every for every in stops if every))

    def _tell(
        self,
        metrics: MetricsWriter,
        clock: Clock,
        report: StepReport,
        step: int,
        steps: int,
        val_loss: float | None,
        logged: bool,
        peaks: Mapping[str, int] | None,
    ) -> None:
        """What a step did: to the file of metrics always, to the terminal where a line is due."""
        loss, norm, lr, left = report.loss, report.grad_norm, report.lr, (steps - step) * clock.seconds
        speed = clock.speed_of_step
        scale, skipped = (None, None) if self.executor.scaler is None else (report.scale, int(report.skipped))
        metrics.write(
            step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens_per_s=speed,
            tokens=self.seen,
            val_loss=val_loss,
            loss_scale=scale,
            skipped=skipped,
            memory_peak_bytes=peaks,
            **for_metrics(of_model(report.counted, report.rows)),
        )
        self.skipped += report.skipped
        if logged or report.skipped:
            text = step_line(
                step,
                steps,
                loss=loss,
                val_loss=val_loss,
                grad_norm=norm,
                lr=lr,
                tokens_per_s=clock.speed,
                seconds_left=left,
                skipped=report.skipped,
                scales=(report.scale, report.next_scale),
            )
            self.terminal.line(text)
        self.terminal.progress(step, steps, f"loss {loss:.4f}  {clock.speed:,.0f} tok/s  left {duration(left)}")

    def _held(self, ledger: MemoryLedger, row: int) -> list[Found]:
        """What every rank holds, and was predicted to; collective."""
        step = step_of(self.config, self.mesh, self.model, row)
        return list(self.world.exchange(found_here(ledger, step, self.config, self.model.elsewhere)))

    def _say_memory(self, held: Sequence[Found], step: int) -> None:
        """Who holds how much; after the first step also what a block keeps."""
        self._say(f"\n{memory_table(held, f'after step {step}')}\n")
        if not self._told_of_blocks:
            self._told_of_blocks = True
            self._say(f"{of_blocks(step_of(self.config, self.mesh, self.model))}\n")

    def _validate(self) -> float:
        """Loss on the validation text, a mean over all ranks' windows."""
        dp, rows = self.mesh.dp, VALIDATION_ROWS * self.mesh.dp.size
        return self.executor.evaluate(self.tokens.validation(rows, dp.rank, dp.size, self.model.positions_here))

    def _finish(self, last: int, steps: int) -> None:
        """How often gradients overflowed, the curve of the run, and a text that the model continues."""
        if self.skipped and self.executor.scaler is not None:
            steps_were = "step was" if self.skipped == 1 else "steps were"
            branch = "the lowest scale of a branch" if self.config.scaling == "blocks" else "the loss scale"
            self._say(f"{self.skipped} {steps_were} skipped; {branch} is {power(self.executor.scaler.shown)}")
        curve = self.folder / "loss.svg"
        together(self.world, lambda: self._draw_curve(curve), here=self.reports)
        self._say(f"curve {curve}")
        report, routing = self.executor.report, self.config.routing
        if report is not None and routing is not None:
            self._say(f"experts of the last step: {in_words(of_model(report.counted, report.rows), routing)}")
        if last < steps:
            self._say(f"stopped after step {last} of {steps}; go on with: --run {self.folder} --resume latest")
        elif self.config.sample_length:
            self._say(f"sample {self.folder / 'sample.txt'}\n\n{self._sample()}\n")
        self._say(f"done in {duration(time.perf_counter() - self.began)}")

    def _draw_curve(self, path: Path) -> None:
        unit = "nats/byte" if self.corpus.kind == "bytes" else "nats/token"
        records = list(read_metrics(self.folder / "metrics.jsonl"))
        config, ranks = self.config, self.world.size
        caption = f"{config.batch} x {config.seq_len} tokens a step, {ranks} rank{'s' if ranks > 1 else ''}"
        experts = "" if config.experts is None else f", {config.experts} expert{'s' if config.experts > 1 else ''},"
        title = f"{config.model}{experts} on {self.corpus.source}"
        path.write_text(loss_curve(records, title, caption, unit=unit))

    def _sample(self) -> str:
        config, path = self.config, self.folder / "sample.txt"
        with self.executor.reducer.whole():
            text = sample(self.model, self.mesh, self.corpus, config.sample_length, config.seed, config.timeout)
        together(self.world, lambda: path.write_text(text + "\n", encoding="utf-8"), here=self.reports)
        return text

    # -- before the first step ----------------------------------------------------------------------------------------

    def _fixed_steps(self) -> int:
        """The number of steps: as given, or what the budget allows; the same on all ranks, and fixed from here on."""
        config = self.config
        if config.steps is not None:
            return config.steps
        assert config.budget is not None
        step, validation = self._trial()
        if config.eval_every is None:
            budget = config.budget - settings.DEFAULT_EVALUATIONS * validation
        else:
            budget = config.budget - validation
            step += validation / config.eval_every if config.eval_every else 0.0
        steps = max(1, int(BUDGET_SHARE * budget / step))
        self.config = config.fixed(steps)
        self._say(f"budget of {config.budget:g} s at {1000 * step:.1f} ms a step: {steps:,} steps\n")
        return steps

    def _trial(self) -> tuple[float, float]:
        """Seconds of a step and of a validation, on the slowest rank; nothing is left of the steps that were timed."""
        config, dp = self.config, self.mesh.dp
        elsewhere = self.model.elsewhere is not None and bool(self.model.elsewhere.plan.what)
        before = [] if elsewhere else [share.master.copy() for share in self.model.shares()]
        scales = None if self.model.branch_scales is None else self.model.branch_scales.state_dict()
        self.executor = build_executor(
            config, self.model, build_optimizer(config, self.model, self.mesh), self.mesh, TRIAL_STEPS
        )
        times = []
        positions = self.model.positions_here
        for batch in self.tokens.batches(config.batch, dp.rank, dp.size, 0, TRIAL_STEPS, positions):
            times.append(seconds(lambda batch=batch: self.executor.step(batch)))
        validation = seconds(self._validate)
        if elsewhere:  # a copy might not fit here
            for flat in self.model.flats:
                flat.start(config.seed)
        for share, master in zip(self.model.shares(), before, strict=not elsewhere):
            share.master[...] = master
            share.refresh()
        self.executor.reducer.updated()
        if scales is not None:
            self.model.branch_scales.load_state(scales)
        slowest = self.world.all_reduce(np.array([np.mean(times[TRIAL_WARM_UP:]), validation]), op="max")
        return float(slowest[0]), float(slowest[1])

    def _write_settings(self) -> None:
        settings.write(self.config, str(self.folder / "config.toml"))

    # -- save and resume ----------------------------------------------------------------------------------------------

    def _save(self, step: int, optimizer: Optimizer) -> Path:
        scalars = {
            "updates": optimizer.updates,
            "tokens": self.seen,
            "data": {"next_step": step, "sha256": self.corpus.sha256},
            "config": asdict(self.config),
        }
        if self.executor.scaler is not None:
            scalars["scaler"] = self.executor.scaler.state_dict()
        self.executor.reducer.join()
        states = {**optimizer.state_tensors(), **self.executor.reducer.state_tensors()}
        tensors = checkpoint.slabs_of(self.model.shares(), states, self.mesh.coords)
        return checkpoint.save(self.folder, step, tensors, scalars, self.world, layout=self.mesh.sizes)

    def _resume(self, found: Path, optimizer: Optimizer) -> int:
        """Fill weights, optimizer and reducer from a checkpoint; the number of steps that are done."""
        reducer, shapes = self.executor.reducer, checkpoint.shapes(found, self.world)
        states = {**optimizer.state_tensors(), **reducer.state_to_fill(shapes)}
        tensors = checkpoint.slabs_of(self.model.shares(), states, self.mesh.coords)
        besides = [name for name in shapes if name.startswith((POWERSGD_Q, POWERSGD_ERROR, PENDING, OF_WORKERS))]
        saved = checkpoint.load(found, tensors, self.world, besides=besides)
        for flat in self.model.flats:
            flat.refresh()
        self.executor.reducer.updated()
        counts, data = [saved.get(name) for name in ("updates", "tokens")], saved.get("data")
        if not (isinstance(data, dict) and isinstance(data.get("sha256"), str) and all(type(n) is int for n in counts)):
            raise CheckpointError(f"{found} is damaged: its manifest lacks updates, tokens or the text's sha256.")
        if data["sha256"] != self.corpus.sha256:
            raise CheckpointError(
                f"{found} was trained on another text (sha256 {data['sha256'][:12]}) than\n{self.corpus}.\n"
                "Give the same text with --data PATH, or start a new run."
            )
        optimizer.updates = saved["updates"]
        said = self.world.exchange(reducer.resumed(optimizer.updates))
        told = dict.fromkeys(line for text in said for line in text.splitlines())
        if self.config.reducer != "powersgd" and any(name.startswith(f"{POWERSGD_ERROR}/") for name in shapes):
            told[f"what PowerSGD left out of gradients is lost: --reducer {self.config.reducer} adds none of it"] = None
        if self.config.reducer != "stale" and any(name.startswith(PENDING) for name in shapes):
            told[f"gradients on their way to the weights are lost: --reducer {self.config.reducer} takes none"] = None
        if self.config.reducer != "local" and parted(shapes):
            told[f"moments of all workers but the first are lost: --reducer {self.config.reducer} has one set"] = None
        self._resume_scaler(found, saved)
        self.seen = saved["tokens"]
        together(self.world, lambda: checkpoint.retire_after(self.folder, saved["step"]), here=self.world.rank == 0)
        self._say(f"go on after step {saved['step']} from {found}\n")
        for text in told:
            self._say(f"{text}\n")
        return int(saved["step"])

    def _resume_scaler(self, found: Path, saved: dict[str, Any]) -> None:
        """Go on with the scales of gradients, unless other ones were asked for."""
        scaler, before = self.executor.scaler, saved.get("config")
        if scaler is None:
            return
        asked = [[of.get(name) for name in SCALING] for of in (asdict(self.config), before or {})]
        if asked[0] != asked[1]:
            self._say("the scale of the gradients begins anew: other options than before were asked for")
        elif isinstance(saved.get("scaler"), dict):
            scaler.load_state(saved["scaler"])
        else:
            raise CheckpointError(f"{found} is damaged: its manifest lacks the scale of the gradients.")

    def _say(self, text: str) -> None:
        if self.reports:
            self.terminal.line(text)
