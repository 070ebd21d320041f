"""Training from settings to curve: the loop, and what is around it.

    settings -> ranks -> mesh -> corpus -> model -> steps fixed -> (resume) -> steps -> curve and sample

What a step is stands in `pipeline.executor`; the parts are put together in `assemble`.  A script of one's own uses the
same parts: README shows one of 20 lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from mpitrain import checkpoint, disk, faults
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
from mpitrain.checkpoint.saving import versions
from mpitrain.checkpoint.tools.source import Source
from mpitrain.clock import Clock, seconds
from mpitrain.comm.device_messages import use_device_messages
from mpitrain.comm.devices import device_of_rank
from mpitrain.comm.launcher import is_first
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.comm.world import World, world
from mpitrain.config import Config
from mpitrain.config_rules import check_layout
from mpitrain.curve import loss_curve
from mpitrain.data.corpus import Corpus
from mpitrain.data.packing import PackedTokens
from mpitrain.data.tokens import Tokens
from mpitrain.debug.digests import digesting
from mpitrain.debug.memory import MemoryLedger
from mpitrain.debug.states import StateChecker
from mpitrain.debug.trace import files as traces
from mpitrain.debug.trace.tracing import tracing
from mpitrain.device import CPU, GIB, Device
from mpitrain.errors import ConfigError, DeviceError, MeshError
from mpitrain.events import listen
from mpitrain.keep import Keeper, settings_of
from mpitrain.memory_table import Found, found_here, largest_of_ranks, of_blocks
from mpitrain.memory_table import table as memory_table
from mpitrain.metrics import read_metrics
from mpitrain.metrics.sinks import Sinks, check_libraries, files
from mpitrain.models.decoder import Decoder
from mpitrain.optim.groups import check_groups
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.scaler import power
from mpitrain.parallel.expert.counted import for_metrics, in_words, of_model
from mpitrain.parallel.replicas import ReplicaCheck, agree_on_arithmetic, check_replicas
from mpitrain.pipeline.hunter import Hunter
from mpitrain.pipeline.update import StepReport
from mpitrain.recording.outside import heard, place
from mpitrain.replay.recorded import announce, recorded
from mpitrain.report import Terminal, duration, start_block, step_line
from mpitrain.sample import sample
from mpitrain.startup import facts
from mpitrain.stopping import STOPPED_CODE, Request, Stop, hear_signal
from mpitrain.tokenizing.start import save_copy, tokenizer_of
from mpitrain.trace.facts import facts_of
from mpitrain.weights import check_fit
from mpitrain.weights import find as find_weights
from mpitrain.weights import tokenizer_of as tokenizer_beside

TRIAL_STEPS = 10
TRIAL_WARM_UP = 2  # of them, whose times do not count
BUDGET_SHARE = 0.95  # of the budget is planned: later steps may be slower than the ten that were timed
LONGEST_ROW = 256  # steps that overlap before the pipeline drains, if neither validation nor a checkpoint drains it
VALIDATION_ROWS = 32  # sequences that a rank evaluates at once


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
    with recorded(config, ranks, flags):
        ranks.agree(mistake)
        with faults.injected(config.faults, ranks):
            faults.remember(config.run)
            return _start(ranks, config, flags, began)


def _start(ranks: World, config: Config, flags: list[str], began: float) -> int:
    """What `main` does once its ranks have met; `config`: what it knew before."""
    ranks.board.limit = config.timeout
    if config.deterministic:
        ranks.set_deterministic()
    if config.check:
        ranks.set_checked()
    agree_on_arithmetic(ranks)  # before anything is said or written
    found: list[Path] = []
    origin = None
    if config.resume is not None:
        found = checkpoint.find(config.resume, config.run, ranks)
    if config.init is not None and not found:
        origin = find_weights(config.init, ranks)
    if config.resume is not None or origin is not None:
        config = together(ranks, lambda: settings_of(flags, found[0] if found else None, origin)) or config
    device = device_of_rank(ranks, config.device)
    use_device_messages(ranks, config.device_messages, device)
    mesh = _mesh(ranks, config, found, flags)
    check_layout(config, mesh.dp.size)
    with hear_signal() as request:
        stopped = Training(config, mesh, found, began, request, origin, device).run()
    return STOPPED_CODE if stopped else 0


def _mesh(ranks: World, config: Config, found: Sequence[Path], flags: list[str]) -> Mesh:
    """The layout.

    Raises:
        MeshError: it does not fit the ranks; says where it is from if no flag gave it.
    """
    try:
        return Mesh(ranks, pp=config.pp, dp=config.dp, cp=config.cp, tp=config.tp, ep=config.ep)
    except MeshError as error:
        axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(config, axis) > 1]
        kept = " ".join(f"--{axis}" for axis in axes if not settings.gives(flags, f"--{axis}"))
        if not found or not kept or settings.names_a_file(flags):
            raise
        raise MeshError(f"{error}\n{kept} of the saved run ({found[0]}) holds until a flag changes it.") from None


class Training:
    """One start of a run: from its first step, or on from a checkpoint.

    Args:
        config: the settings.
        mesh: the layout.
        found: the checkpoint to go on from, and older ones should it be damaged; none: start.
        began: when the process began, by `time.perf_counter`.
        request: whether somebody asks the process to stop.
        origin: the checkpoint whose weights a run begins with; None: it draws its own, or goes on.
        device: of this rank.

    Raises:
        UserError: on every rank, before the first step.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        found: Sequence[Path],
        began: float,
        request: Request | None = None,
        origin: Source | None = None,
        device: Device = CPU,
    ) -> None:
        self.config = config
        self.device = device
        self.mesh = mesh
        self.found = found
        self.origin = origin
        self.began = began
        self.world: World = mesh.world
        self.reports = mesh.is_reporter
        self.terminal = Terminal.of_launcher(sys.stdout)
        self.folder = place(run_folder(config, self.world))
        together(self.world, lambda: check_libraries(config.sinks), here=self.reports)
        beside = None if origin is None else tokenizer_beside(origin)
        self.tokenizer = tokenizer_of(config, self.world, found, beside)
        self.corpus: Corpus = read_corpus(config, self.world, self.tokenizer, self._say)
        self.tokens = (PackedTokens if config.pack else Tokens)(self.corpus, config.seq_len, config.seed)
        self.model: Decoder = build_model(config, self.corpus, mesh, device)
        check_groups(parameter_groups(config), [p.name for p in self.model.parameters()], self.world)
        if origin is not None:
            check_fit(self.model, origin, self.world)
        own = bool(found) and heard("whether it goes on", lambda: checkpoint.is_of(found[0], self.folder))
        if not own:  # last, so that a mistake leaves no folder behind
            together(self.world, lambda: checkpoint.claim(self.folder), here=self.world.rank == 0)
        self._lock = together(self.world, lambda: checkpoint.hold(self.folder), here=self.world.rank == 0)
        self.world.board.run_folder = str(self.folder)
        faults.remember(self.folder)
        self.stop = Stop(request or Request(), config.max_seconds, began)
        self.skipped = 0  # steps of this start whose gradients overflowed
        self._asked = False  # some rank was asked to stop
        self._val_loss: float | None = None  # the last that was measured
        self._told_of_blocks = False

    def run(self) -> bool:
        """All steps, and what comes after the last one.

        Returns:
            Whether it stopped before its end because it was asked to, or its time was up.
        """
        try:
            return self._run()
        except MemoryError as error:
            if self.device.kind == "cpu":
                raise
            raise DeviceError(
                f"rank {self.world.rank}: the device has no memory left: {str(error).splitlines()[0]}\n"
                "Take more --microbatches, --recompute full, --zero 3 or --offload optimizer; nvidia-smi shows who"
                " else is on it."
            ) from error
        finally:
            if self._lock is not None:
                os.close(self._lock)
            if self.model.elsewhere is not None:
                self.model.elsewhere.home.close()

    def _run(self) -> bool:
        if self.reports:
            block = facts(self.config, self.mesh, self.model, self.tokens, self.folder, self.device)
            self.terminal.heading(start_block("mpitrain", block))
        steps = self._fixed_steps()
        with self._traced():
            return self._train(steps)

    def _traced(self) -> contextlib.AbstractContextManager[None]:
        """What is noted of all that comes after the number of steps is fixed."""
        config = self.config
        if not config.trace:
            return contextlib.nullcontext()
        about = {
            "command": sys.argv,
            "model": f"{config.model}: {self.model.config.num_parameters:,} parameters in {config.dtype}",
            "versions": {**versions(), "messages": self.world.library},
            **facts_of(config, self.mesh, self.model),
        }
        where, ops, limit = self.folder / traces.FOLDER, config.trace_ops, config.trace_limit
        return tracing(self.world, where, ops=ops, limit=limit, facts=about)

    def _train(self, steps: int) -> bool:
        """The steps of a run of so many; as `run`."""
        optimizer = build_optimizer(self.config, self.model, self.mesh)
        self.executor = build_executor(self.config, self.model, optimizer, self.mesh, steps, self._answers)
        announce(self.config, self.mesh, self.model, self.executor, steps, self.tokens, self._say, VALIDATION_ROWS)
        of_state = self.model, optimizer, self.executor
        self.keeper = Keeper(self.config, self.mesh, *of_state, self.corpus, self.folder, self._say)
        done = self.keeper.resume(self.found, steps) if self.found else 0
        if self.origin is not None:
            self.keeper.begin_with(self.origin)
        check_replicas([*self.model.parameters(), *self.model.kept()], self.mesh, f"before step {done + 1}")
        reducer = self.executor.reducer
        self.replicas = ReplicaCheck(self.model, optimizer, reducer, self.mesh, self.config.check_replicas)
        together(self.world, self._write_settings, here=self.world.rank == 0)
        last = min(steps, max(self.config.stop_after or steps, done))
        every = self.config.digests
        with digesting(self.world, self.folder, every) if every else contextlib.nullcontext():
            reached, asked = self._steps(done, last, steps, optimizer)
        self._finish(reached, steps, asked)
        return asked

    def _answers(self) -> tuple[float, float]:
        """What this rank says at the end of a step: whether to stop, and whether it still writes."""
        return heard("answers", lambda: (float(self.stop.wanted), float(self.keeper.busy)))

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _steps(self, done: int, last: int, steps: int, optimizer: Optimizer) -> tuple[int, bool]:
        """Steps done + 1 ... last of a run of `steps`.

        Returns:
            The last step that was made, and whether the run was asked to stop there.
        """
        config, dp = self.config, self.mesh.dp
        log_every, eval_every = config.log_interval(steps), config.eval_interval(steps)
        metrics = together(self.world, lambda: self._metrics(done + 1), here=self.reports)
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
            step, asked = done, False
            while step < last and not asked:
                row = self._row(step, last, steps)
                reports = self.executor.run(list(islice(batches, row)))
                clock.tick(row)
                held = self._held(ledger, row) if ledger is not None and (step == done or step + row >= last) else None
                for report in reports:
                    step += 1
                    self.keeper.seen += 0 if report.skipped else report.targets
                    val_loss = None
                    if step == steps or (eval_every and step % eval_every == 0):
                        val_loss = self._val_loss = self._validate()
                        clock.restart()
                    if metrics is not None:
                        logged = step in (done + 1, last) or val_loss is not None or step % log_every == 0
                        peaks = largest_of_ranks(held) if held is not None and step == last else None
                        self._tell(metrics, clock, report, step, steps, val_loss, logged, peaks)
                if held is not None:
                    self._say_memory(held, step)
                asked = self._keep(reports, step, last, clock)
                self.stop.reserve = clock.seconds * row + self.keeper.seconds
            self.keeper.publish()
        self.terminal.end()
        return step, asked

    def _keep(self, reports: Sequence[StepReport], step: int, last: int, clock: Clock) -> bool:
        """Save if a checkpoint is due; the same on all ranks.

        Returns:
            Whether the run stops here because some rank was asked to.
        """
        config, keeper = self.config, self.keeper
        wanted, busy = (max(answers) for answers in zip(*(report.asked for report in reports), strict=True))
        self._asked = self._asked or wanted > 0
        stops = self._asked and step < last and self.executor.reducer.at_rest
        if keeper.saving and not busy:
            keeper.publish()
            clock.restart()
        final = stops or (step == last and (config.stop_after is not None or config.save_every > 0))
        saves = final or (config.save_every > 0 and step % config.save_every == 0)
        if self.replicas(step, len(reports), saves=saves):
            clock.restart()
        if saves:
            keeper.save(step, wait=final)
            clock.restart()
        return stops

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
        metrics: Sinks,
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
            tokens=self.keeper.seen,
            val_loss=val_loss,
            bits_per_byte=self.corpus.bits_per_byte(loss),
            val_bits_per_byte=None if val_loss is None else self.corpus.bits_per_byte(val_loss, val=True),
            loss_scale=scale,
            skipped=skipped,
            memory_peak_bytes=peaks,
            device_memory_bytes=self.device.held(),
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

    def _metrics(self, first_step: int) -> Sinks:
        """What takes the numbers of each step, from this one on."""
        config = self.config
        texts = {"settings": "\n".join(f"    {line}" for line in config.to_toml().splitlines())}
        return Sinks(self.folder, first_step, config.sinks, texts)

    def _held(self, ledger: MemoryLedger, row: int) -> list[Found]:
        """What every rank holds, and was predicted to; collective."""
        step = step_of(self.config, self.mesh, self.model, row)
        found = heard("what is held", lambda: found_here(ledger, step, self.config, self.model.elsewhere))
        return list(self.world.exchange(found))

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

    def _finish(self, last: int, steps: int, asked: bool) -> None:
        """How often gradients overflowed, the curve of the run, and a text that the model continues."""
        if self.skipped and self.executor.scaler is not None:
            steps_were = "step was" if self.skipped == 1 else "steps were"
            branch = "the lowest scale of a branch" if self.config.scaling == "blocks" else "the loss scale"
            self._say(f"{self.skipped} {steps_were} skipped; {branch} is {power(self.executor.scaler.shown)}")
        curve = self.folder / "loss.svg"
        together(self.world, lambda: self._draw_curve(curve), here=self.reports)
        self._say(f"curve {curve}")
        for name in files(self.config.sinks):
            self._say(f"metrics {self.folder}/{name}")
        if self.corpus.tokenizer is not None and self._val_loss is not None:
            bits = self.corpus.bits_per_byte(self._val_loss, val=True)
            self._say(f"validation loss {self._val_loss:.4f} nats a token, {bits or math.nan:.4f} bits a byte")
        held = self.device.held()
        if held is not None:
            self._say(f"device memory {held / GIB:.2f} GiB of {self.device.memory / GIB:.1f} on this rank")
        report, routing = self.executor.report, self.config.routing
        if report is not None and routing is not None:
            self._say(f"experts of the last step: {in_words(of_model(report.counted, report.rows), routing)}")
        if last < steps:
            why = f", as asked (exit code {STOPPED_CODE})" if asked else ""
            self._say(f"stopped after step {last} of {steps}{why}; go on with: --run {self.folder} --resume latest")
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
        disk.replace(path, loss_curve(records, title, caption, unit=unit).encode())

    def _sample(self) -> str:
        config, path = self.config, self.folder / "sample.txt"
        with self.executor.reducer.whole():
            text = sample(self.model, self.mesh, self.corpus, config.sample_length, config.seed, config.timeout)
        together(self.world, lambda: disk.replace(path, f"{text}\n".encode()), here=self.reports)
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
        mine = heard("seconds of a step", lambda: (float(np.mean(times[TRIAL_WARM_UP:])), validation))
        slowest = self.world.all_reduce(np.array(mine), op="max")
        return float(slowest[0]), float(slowest[1])

    def _write_settings(self) -> None:
        save_copy(self.tokenizer, self.folder)
        settings.write(self.config, str(self.folder / "config.toml"))

    def _say(self, text: str) -> None:
        if self.reports:
            self.terminal.line(text)
