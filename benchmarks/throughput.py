"""Speed beside PyTorch: the same training in mpitrain and in its PyTorch twin, in interleaved rounds.

    python benchmarks/throughput.py                               rows S:1 S:2 mini:8
    python benchmarks/throughput.py --rows S:1 M:1 --rounds 9     one rank against one thread, two sizes

A row is SIZE:RANKS.  With one rank PyTorch runs on one thread; with more, mpirun's ranks stand against as many DDP
processes with gloo, one thread each; more ranks than cores are allowed.  All processes of both sides live through the
whole row, so no start-up is measured, and one side sleeps while the other runs.  Both train the same model from the
same initial values on the same batches, and their losses are compared before anything is timed.

The ratio is the median over the rounds of mpitrain's tokens/s over PyTorch's in the same round: above 1 mpitrain is the
faster one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
from sides import Task

SIZES = {
    "mini": {"layers": 2, "width": 128, "heads": 4, "seq_len": 64, "batch": 16},
    "S": {"layers": 4, "width": 256, "heads": 4, "seq_len": 128, "batch": 8},
    "M": {"layers": 6, "width": 384, "heads": 6, "seq_len": 256, "batch": 8},
    "long": {"layers": 6, "width": 384, "heads": 6, "seq_len": 1024, "batch": 2},
}
FIRST_STEPS = 3  # before anything is timed; their last losses must agree
STRETCH_S = 2.0  # of a timed stretch, where --steps is not given
PATIENCE_S = 600


class Processes:
    """The living processes of one side: told together, answering one by one."""

    def __init__(self, name: str, task: Task, *, tuned_malloc: bool) -> None:
        self.name, self.task = name, task
        self._folder = tempfile.TemporaryDirectory(prefix="mpitrain-bench-")
        address = f"{self._folder.name}/socket"
        environment = machine.rank_environment(task.ranks, tuned_malloc=tuned_malloc)
        arguments = [name, address, json.dumps(task._asdict())]
        commands = _commands(name, task.ranks, arguments, f"{self._folder.name}/rendezvous")
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._files: list[Any] = []
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(task.ranks)
                listener.settimeout(1.0)
                self._children += [
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) for command in commands
                ]
                for _ in range(task.ranks):
                    self._connections.append(self._accept(listener))
            self._files = [connection.makefile("rw") for connection in self._connections]
            self._loss_is_whole = all([self._read(file)["total"] for file in self._files])
        except BaseException:
            self.close()
            raise

    def run(self, steps: int, warm: int) -> dict[str, Any]:
        """Run steps on all processes; the slowest one's time counts."""
        load = machine.Load()
        for file in self._files:
            file.write(json.dumps({"run": steps, "warm": warm}) + "\n")
            file.flush()
        replies = [self._read(file) for file in self._files]
        seconds = max(reply["seconds"] for reply in replies)
        losses = [reply["loss"] for reply in replies]
        return {
            "tokens_per_s": steps * self.task.tokens_per_step / seconds,
            "ms_per_step": 1e3 * seconds / steps,
            "cpu_ms_per_step": 1e3 * sum(reply["cpu"] for reply in replies) / steps,
            "loss": losses[0] if self._loss_is_whole else sum(losses),
            "faults_per_step": max(reply["faults"] for reply in replies),
            "peak_bytes": sum(reply["peak_bytes"] for reply in replies),
            **load.report(own=sum(reply["cpu_in_all"] for reply in replies)),
        }

    def close(self) -> None:
        """Let the processes end; kill what does not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(b'{"stop": true}\n')
            connection.close()
        for file in self._files:
            file.close()
        for child in self._children:
            for end in (lambda: None, child.terminate, child.kill):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=10)
                    break
        self._folder.cleanup()

    def _accept(self, listener: socket.socket) -> socket.socket:
        for _ in range(PATIENCE_S):
            with contextlib.suppress(TimeoutError):
                connection, _address = listener.accept()
                connection.settimeout(PATIENCE_S)
                return connection
            if any(child.poll() is not None for child in self._children):
                break
        raise SystemExit(f"{self.name}: a process ended before it was ready; its own words stand above")

    def _read(self, file: Any) -> dict[str, Any]:
        line = file.readline()
        if not line:
            raise SystemExit(f"{self.name}: a process ended in the middle of a run; its own words stand above")
        return json.loads(line)


def _commands(name: str, ranks: int, arguments: list[str], rendezvous: str) -> list[list[str]]:
    """One command a process that is started from here: mpirun starts all of its ranks by itself."""
    script = [str(Path(__file__).with_name("sides.py")), *arguments]
    if name == "torch":
        return [[sys.executable, *script, str(rank), rendezvous] for rank in range(ranks)]
    if ranks == 1:
        return [[sys.executable, *script]]
    return [[machine.mpirun(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *script]]


@contextlib.contextmanager
def started(task: Task, *, tuned_malloc: bool) -> Iterator[dict[str, Processes]]:
    """Both sides, alive."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in ("torch", "mpitrain"):
            sides[name] = Processes(name, task, tuned_malloc=tuned_malloc)
            stack.callback(sides[name].close)
        yield sides


def measure(task: Task, *, rounds: int, steps: int | None, tuned_malloc: bool) -> dict[str, Any]:
    """One row.

    Returns:
        task, steps; for each side the rounds and their medians; ratios by round and their median.
    """
    with started(task, tuned_malloc=tuned_malloc) as sides:
        first = {name: side.run(1, FIRST_STEPS - 1) for name, side in sides.items()}
        _same_training(task, {name: run["loss"] for name, run in first.items()})
        if steps is None:
            steps = min(200, max(3, round(STRETCH_S * 1e3 / sides["torch"].run(3, 0)["ms_per_step"])))
            sides["mpitrain"].run(3, 0)  # so that both have made the same steps
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for name in order:
                runs[name].append(sides[name].run(steps, 1))
    pairs = list(zip(runs["mpitrain"], runs["torch"], strict=True))
    ratios = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in pairs]
    cpu_ratios = [theirs["cpu_ms_per_step"] / mine["cpu_ms_per_step"] for mine, theirs in pairs]
    medians = {
        name: {key: statistics.median(run[key] for run in side) for key in side[0]} for name, side in runs.items()
    }
    return {
        "task": task._asdict(),
        "steps": steps,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_ratio": statistics.median(cpu_ratios),
        "medians": medians,
        "rounds": runs,
    }


def _same_training(task: Task, losses: dict[str, float]) -> None:
    """Refuse to compare trainings that are not the same; with dropout the masks differ, so losses only resemble."""
    tolerance = 1e-4 if not task.dropout else 0.05
    mine, theirs = losses["mpitrain"], losses["torch"]
    if abs(mine - theirs) > tolerance * abs(theirs):
        raise SystemExit(f"after {FIRST_STEPS} steps the losses differ: mpitrain {mine:.6f}, PyTorch {theirs:.6f}")


def _row(text: str) -> tuple[str, int]:
    size, _, ranks = text.partition(":")
    if size not in SIZES or not ranks.isdigit() or int(ranks) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no SIZE:RANKS with a size of {', '.join(SIZES)}, as in S:2")
    return size, int(ranks)


def line(label: str, row: dict[str, Any]) -> str:
    """A row as a line for a terminal."""
    mine, theirs = row["medians"]["mpitrain"], row["medians"]["torch"]
    foreign = max(run["foreign"] + run["steal"] for side in row["rounds"].values() for run in side)
    return (
        f"{label:<10}{mine['tokens_per_s']:>12,.0f}{theirs['tokens_per_s']:>12,.0f}{row['ratio']:>8.3f}"
        f"   {min(row['ratios']):.3f}-{max(row['ratios']):.3f}{row['cpu_ratio']:>9.3f}"
        f"{mine['ms_per_step']:>10.1f}{theirs['ms_per_step']:>8.1f}"
        f"{mine['faults_per_step']:>9.0f}{theirs['faults_per_step']:>7.0f}"
        f"{mine['peak_bytes'] / 1e6:>8.0f}{theirs['peak_bytes'] / 1e6:>7.0f}{100 * foreign:>8.0f} %"
    )


HEADER = (
    f"{'row':<10}{'mpitrain':>12}{'PyTorch':>12}{'ratio':>8}   {'min-max':<11}{'of CPU':>9}"
    f"{'ms/step':>10}{'':>8}{'faults':>9}{'':>7}{'MB':>8}{'':>7}{'foreign':>10}"
)


def main() -> None:
    """Parse, measure row after row, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=_row, default=[("S", 1), ("S", 2), ("mini", 8)], metavar="SIZE:RANKS")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--steps", type=int, help="timed steps a round (default: 2 s of PyTorch's)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--per-rank", action="store_true", help="the size's batch is each rank's, not all ranks'")
    parser.add_argument(
        "--malloc",
        choices=("tuned", "system"),
        default="tuned",
        help="glibc's malloc on both sides: told to keep freed memory (default), or as it is",
    )
    options = parser.parse_args()
    about = machine.describe()
    print(machine.headline(about), HEADER, sep="\n", flush=True)
    rows = {}
    for size, ranks in options.rows:
        sizes = dict(SIZES[size])
        sizes["batch"] *= ranks if options.per_rank else 1
        task = Task(**sizes, ranks=ranks, dropout=options.dropout, dtype=options.dtype)
        row = measure(task, rounds=options.rounds, steps=options.steps, tuned_malloc=options.malloc == "tuned")
        rows[f"{size}:{ranks}"] = row
        print(line(f"{size}:{ranks}", row), flush=True)
    print(f"kept in {machine.keep('throughput', {'machine': about, 'options': vars(options), 'rows': rows})}")


if __name__ == "__main__":
    main()
