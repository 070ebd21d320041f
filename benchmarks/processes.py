"""The living processes of one side, and what runs in a process of its own and prints its result.

Processes that train live through a whole measurement: neither start-up nor imports count, and while one side runs the
others sleep in the kernel.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
from sides import Task

PATIENCE_S = 600


class Processes:
    """The living processes of one side: told together, answering one by one.

    Args:
        name: "mpitrain" or "torch".
        task: what they train.
        tuned_malloc: whether malloc is told to keep freed memory.
        environment: variables beside those that both sides get.

    Attributes:
        before_model: bytes resident in all of them when everything was imported and the text was read.
        kernels: the level of mpitrain's kernels that computes; "torch" for the other side.
    """

    def __init__(
        self, name: str, task: Task, *, tuned_malloc: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.task = name, task
        self._folder = tempfile.TemporaryDirectory(prefix="mpitrain-bench-")
        address = f"{self._folder.name}/socket"
        surroundings = machine.rank_environment(task.ranks, tuned_malloc=tuned_malloc) | dict(environment or {})
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
                    subprocess.Popen(command, env=surroundings, stdin=subprocess.DEVNULL) for command in commands
                ]
                for _ in range(task.ranks):
                    self._connections.append(self._accept(listener))
            self._files = [connection.makefile("rw") for connection in self._connections]
            hellos = [self._read(file) for file in self._files]
            self._loss_is_whole = all(hello["total"] for hello in hellos)
            self.before_model = sum(hello["before_model"] for hello in hellos)
            self.kernels: str = hellos[0]["kernels"]
        except BaseException:
            self.close()
            raise

    def run(
        self, steps: int, warm: int, batch: int | None = None, watch: bool = False, undisturbed: bool = False
    ) -> dict[str, Any]:
        """Run steps on all processes; the slowest one's time counts.

        Args:
            steps: that are timed.
            warm: steps before them.
            batch: sequences of the global batch; the task's where left out.
            watch: make the steps once more, to see which share of them stands in messages (mpitrain only).
            undisturbed: time each step at real-time priority (`machine.undisturbed`).
        """
        load = machine.Load()
        size = self.task.batch if batch is None else batch
        for file in self._files:
            command = {"run": steps, "warm": warm, "batch": size, "watch": watch, "undisturbed": undisturbed}
            file.write(json.dumps(command) + "\n")
            file.flush()
        replies = [self._read(file) for file in self._files]
        seconds = max(reply["seconds"] for reply in replies)
        losses = [reply["loss"] for reply in replies]
        return {
            "tokens_per_s": steps * size * self.task.seq_len / seconds,
            "ms_per_step": 1e3 * seconds / steps,
            "cpu_ms_per_step": 1e3 * sum(reply["cpu"] for reply in replies) / steps,
            "loss": losses[0] if self._loss_is_whole else sum(losses),
            "faults_per_step": max(reply["faults"] for reply in replies),
            "peak_bytes": sum(reply["peak_bytes"] for reply in replies),
            **(_watched(replies) if watch else {}),
            **load.report(own=sum(reply["cpu_in_all"] for reply in replies)),
        }

    def look(self) -> dict[str, Any]:
        """One more step, of the first process: owners: bytes by owner when most were alive; peak: their sum; flops."""
        for file in self._files:
            file.write(json.dumps({"look": self.task.batch}) + "\n")
            file.flush()
        replies = [self._read(file) for file in self._files]
        return replies[0]

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


def _watched(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest share of a rank's time in messages, and of each rank, in their order, ms by kind of action."""
    return {
        "in_messages": max(reply["in_messages"] for reply in replies),
        "actions": [reply["actions"] for reply in sorted(replies, key=lambda reply: reply["rank"])],
    }


def _commands(name: str, ranks: int, arguments: list[str], rendezvous: str) -> list[list[str]]:
    """One command a process that is started from here: mpirun starts all of its ranks by itself."""
    script = [str(Path(__file__).with_name("sides.py")), *arguments]
    if name == "torch":
        return [[sys.executable, *script, str(rank), rendezvous] for rank in range(ranks)]
    return [_python(ranks, script)]


def _python(ranks: int, script: Sequence[str]) -> list[str]:
    """A script of mpitrain's on so many ranks."""
    if ranks == 1:
        return [sys.executable, *script]
    return [machine.mpirun(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *script]


def result_of(script: str, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """Run a script of this folder on its own, on one thread a rank, and read the JSON that it prints.

    Returns:
        What it printed, and the `load` meanwhile.
    """
    load, before = machine.Load(), children_cpu()
    done = subprocess.run(
        _python(ranks, [str(Path(__file__).with_name(script)), *arguments]),
        env=machine.rank_environment(ranks, tuned_malloc=True),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} ended with exit code {done.returncode}; its own words stand above")
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "load": [load.report(own=children_cpu() - before)]}


def children_cpu() -> float:
    """CPU seconds of the processes that were started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
