"""mpitrain beside PyTorch on one GPU: two processes that take turns, a precision at a time (part of gpu_check.py).

build     both make the same GPT from the same initial values and make a step: their losses must agree
rounds    each side runs about two seconds of steps; who begins changes from round to round; the median counts
look      where a step's time goes: host without waits, device without gaps, kernels; the most memory
ops       the operations of a step one by one
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_chips import mfu, peak, step_flops
from gpu_ops import OPS, Size, itemsize

SIDES = str(Path(__file__).with_name("gpu_sides.py"))
ROUNDS = 5
ROUND = 2.0  # seconds of a side
WARM = 3  # steps before the rounds
BUILD_LIMIT = 120.0  # seconds for a side to start, or to make its model
LEAST = 30.0  # seconds that an answer may take though less time is left: a side that is late then did not hang
GIB = 2**30


class Pair(NamedTuple):
    """What is measured at once: the precision of mpitrain, that of PyTorch and its mode; None: that side rests."""

    mine: str | None
    torchs: tuple[str, str] | None


PAIRS = (
    Pair("bfloat16", ("bfloat16", "autocast")),
    Pair("float32", ("float32", "plain")),
    Pair("float16", ("bfloat16", "plain")),
)


class Task(NamedTuple):
    """What is trained: sizes of the GPT, sequences of a step; and how long the device is kept busy (`gpu_timing`)."""

    config: dict[str, Any]
    batch: int
    busy: int = 20
    width: int = 4096

    @property
    def tokens(self) -> int:
        return int(self.batch * self.config["seq_len"])

    @property
    def flops(self) -> int:
        names = ("seq_len", "width", "layers", "vocab")
        return step_flops(batch=self.batch, **{name: self.config[name] for name in names})

    def size(self, weights: int) -> Size:
        c = self.config
        return Size(self.batch, c["seq_len"], c["width"], c["heads"], c["vocab"], weights)


GPT_125M = {
    **{"vocab": 50304, "layers": 12, "width": 768, "heads": 12, "seq_len": 1024},
    **{"tied": True, "dropout": 0.0},
}
"""GPT-2's smallest, its vocabulary filled up to a multiple of 64, which both sides profit from."""


def task_for(memory: int) -> Task:
    """As many sequences of 1024 tokens a step as a device with so many bytes has room for, at most 8."""
    return Task(GPT_125M, 8 if memory > 30 * GIB else 4 if memory > 18 * GIB else 2)


class Failed(Exception):
    """A side cannot go on, or not in time."""


class Side:
    """A process of gpu_sides.py.

    Attributes:
        gone: whether it has ended, or gives no answer.
    """

    def __init__(self, library: str, device: str, values: Path, width: int) -> None:
        command = [sys.executable, SIDES, library, device, str(values), str(width)]
        self.library = library
        self.gone = False
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(json.loads(line[1:]))
        self._answers.put(None)

    def answer(self, limit: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=max(1.0, limit))
        except queue.Empty:
            self.gone = True
            raise Failed(f"{self.library} gave no answer within {limit:.0f} s") from None
        if found is None:
            self.gone = True
            raise Failed(f"{self.library} ended with exit code {self._process.wait()}")
        if "error" in found:
            raise Failed(f"{self.library}: {found['error']}")
        return found

    def ask(self, limit: float, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.gone = True
            raise Failed(f"{self.library} ended with exit code {self._process.wait()}") from None
        return self.answer(limit)

    def close(self) -> None:
        self._process.kill()
        self._reader.join()
        with contextlib.suppress(OSError):  # of what it was not given any more
            self._process.communicate()


def measured(
    task: Task,
    facts: dict[str, Any],
    left: Callable[[], float],
    say: Callable[[str], None],
    *,
    torch_device: str | None = "cuda",
    rounds: int = ROUNDS,
    seconds: float = ROUND,
) -> dict[str, Any]:
    """The whole measurement.

    Args:
        task: what is trained.
        facts: of the device (`gpu_parts.device_facts`).
        left: gives the seconds that are left.
        say: progress.
        torch_device: where PyTorch trains; None: it does not.
        rounds, seconds: of a precision, and of a side in each.

    Returns:
        `rows` of trainings and `ops` of single operations; in `left` what was left out for want of time, in `troubles`
        what went wrong.
    """
    found: dict[str, Any] = {"task": task._asdict(), "flops": task.flops, "rows": [], "ops": []}
    found |= {"troubles": [], "left": []}
    found["torch"] = "" if torch_device and importlib.util.find_spec("torch") else "PyTorch is not installed"
    with tempfile.TemporaryDirectory(prefix="mpitrain-gpu-") as folder:
        values = Path(folder) / "values.npz"
        sides: dict[str, Side] = {}
        try:
            sides["mpitrain"] = Side("mpitrain", "cuda", values, task.width)
            sides["mpitrain"].answer(BUILD_LIMIT)
            if not found["torch"]:
                sides["PyTorch"] = Side("torch", str(torch_device), values, task.width)
                _started(sides, found)
            for pair in PAIRS:
                if float(facts["capability"]) < 8 and pair.mine == "bfloat16":
                    continue
                if left() < 20:
                    found["left"].append(pair.mine)
                    continue
                found["rows"] += _pair(pair, task, facts, sides, found, left, say, rounds, seconds)
            _ops(task, facts, sides, found, left, say)
        except Failed as error:
            if str(error) not in " ".join(found["troubles"]):
                found["troubles"].append(str(error))
                say(f"  BAD  {error}")
        finally:
            for side in sides.values():
                side.close()
    return found


def _started(sides: dict[str, Side], found: dict[str, Any]) -> None:
    """Goes on without PyTorch where it does not start."""
    try:
        sides["PyTorch"].answer(BUILD_LIMIT)
    except Failed as error:
        found["torch"] = str(error)
        sides.pop("PyTorch").close()


def _pair(
    pair: Pair,
    task: Task,
    facts: dict[str, Any],
    sides: dict[str, Side],
    found: dict[str, Any],
    left: Callable[[], float],
    say: Callable[[str], None],
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Build both, let them take turns, look, drop; a row for each side."""
    how = {"mpitrain": (pair.mine, "plain"), "PyTorch": pair.torchs or (None, "")}
    rows: dict[str, dict[str, Any]] = {}
    for name, side in list(sides.items()):
        dtype, mode = how[name]
        if dtype is None:
            continue
        try:
            built = side.ask(BUILD_LIMIT, do="build", dtype=dtype, mode=mode, task=task._asdict())
            once = side.ask(max(LEAST, left()), do="run", steps=WARM)["seconds"] / WARM
        except Failed as error:
            found["troubles"].append(f"{dtype}, {mode}: {error}")
            say(f"  BAD  {dtype}, {mode}: {error}")
            if side.gone:
                raise
            continue
        rows[name] = {"side": name, "dtype": dtype, "mode": mode, **built, "steps": max(1, round(seconds / once))}
        rows[name]["times"] = []
    for number in range(rounds):
        for name in list(rows) if number % 2 == 0 else list(reversed(rows)):
            if left() > 15 or number == 0:
                steps = rows[name]["steps"]
                took = sides[name].ask(max(LEAST, left()), do="run", steps=steps)
                rows[name]["times"].append(took["seconds"] / steps)
                rows[name]["last_loss"] = took["loss"]
    for name, row in rows.items():
        row["seconds"] = statistics.median(row["times"])
        row["tokens_per_s"] = task.tokens / row["seconds"]
        row["mfu"] = mfu(task.flops, row["seconds"], peak(facts["name"], row["dtype"]))
        try:
            row |= sides[name].ask(max(LEAST, left()), do="look", busy=task.busy)
            sides[name].ask(60.0, do="drop")
        except Failed as error:
            found["troubles"].append(f"{name}, {row['dtype']}: {error}")
        say(_words(row))
    return list(rows.values())


def _words(row: dict[str, Any]) -> str:
    share = f", MFU {row['mfu']:.1%}" if row["mfu"] is not None else ""
    looked = f", host {row['host_ms']:.1f} ms, device {row['device_ms']:.1f} ms" if "host_ms" in row else ""
    return (
        f"  {row['side']:<9} {row['dtype']}, {row['mode']}: {row['tokens_per_s']:,.0f} tokens/s{share},"
        f" {1e3 * row['seconds']:.1f} ms a step{looked}"
    )


def _ops(
    task: Task,
    facts: dict[str, Any],
    sides: dict[str, Side],
    found: dict[str, Any],
    left: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    """One by one, as long as there is time; one that fails is a trouble and no more."""
    weights = max((row["parameters"] for row in found["rows"]), default=1)
    size = task.size(min(weights, 2**27))
    dtypes = ["bfloat16", "float32"] if float(facts["capability"]) >= 8 else ["float16", "float32"]
    works = [(name, dtype) for dtype in dtypes for name in OPS if dtype == dtypes[0] or not name.endswith("(float32)")]
    for number, (name, dtype) in enumerate(works):
        if left() < 10:
            found["left"].append(f"{len(works) - number} of {len(works)} operations")
            break
        row: dict[str, Any] = {"name": name, "dtype": dtype}
        for key, side in sides.items():
            try:
                row[key] = side.ask(LEAST, do="op", name=name, dtype=dtype, size=list(size))["ms"]
            except Failed as error:
                found["troubles"].append(f"{name}, {dtype}: {error}")
                row[key] = None
                if side.gone:
                    raise
        op = OPS[name]
        row["flops"], row["bytes"] = op.done(size), op.moved(size) * itemsize(name, dtype)
        found["ops"].append(row)
    say(f"  {len(found['ops'])} operations, one by one")


def remember(start: float, total: float) -> Callable[[], float]:
    """What gives the seconds that are left of a total, from a time of `time.monotonic` on."""
    return lambda: total - (time.monotonic() - start)
