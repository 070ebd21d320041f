"""A Slurm cluster of two nodes on one machine, for a test: its own daemons, on free ports and below one folder.

    with Cluster(folder, os.environ) as cluster:
        cluster.run("srun", "-N2", "-n4", "hostname")

Both nodes are this host (`slurmd -N`), so they share its cores and its files; what Slurm does (allocations, steps, PMI,
signals, requeues) is real.  Nothing of the machine's own Slurm or munge is used or changed.  Two settings are here
because one machine plays two: `TmpFS` with %n keeps the nodes' PMIx folders apart, and with `config_overrides` a node
has as many cores as it says.

Every process of the cluster, its jobs' too, carries a token in its environment.  A guard process kills all that carry
it when the test ends, also by SIGKILL: what the guard then sees is the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

TOKEN = "MPITRAIN_TEST_CLUSTER"
NODES = ("n1", "n2")
CORES = 2  # of each node

CONFIG = """\
ClusterName=mini
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is queued again waits until its old credentials are void: two minutes unless this says otherwise.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=5
JobRequeue=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=graceful Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> str:
    """What keeps a cluster from being started here, in words; empty if nothing does."""
    if os.geteuid() != 0:
        return "a cluster on one machine needs root: slurmd starts the processes of any user"
    absent = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on PATH: apt-get install slurm-wlm munge libpmix-dev"
    return ""


class Cluster:
    """Two nodes of two cores.  Use as a context manager, so that nothing outlives it.

    Args:
        folder: for its files; a short path, since a socket's may have 107 characters.
        variables: the environment of the daemons and of those who use the cluster.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self._token = uuid.uuid4().hex
        self.variables = {**variables, "SLURM_CONF": str(folder / "slurm.conf"), TOKEN: self._token}
        self._guard: subprocess.Popen[bytes] | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        for name in ("controller", "spool", "log", *(f"tmp/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        controller, *ports = _free_ports(1 + len(NODES))
        lines = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CORES} RealMemory=1000"
            for node, port in zip(NODES, ports, strict=True)
        ]
        config = CONFIG.format(folder=self.folder, controller=controller, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(config)
        # It carries no token, and Ctrl-C does not come to its session.
        self._guard = subprocess.Popen(
            [sys.executable, __file__, self._token], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            socket_path = self.folder / "munge.socket"
            files = {"key-file": key, "socket": socket_path}
            files |= {name: self.folder / f"munged.{name}" for name in ("pid-file", "log-file", "seed-file")}
            self._daemon("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
            _wait(socket_path.exists, 10, "munged did not make its socket", self._logs)
            self._daemon("slurmctld", "-D")
            for node in NODES:
                self._daemon("slurmd", "-D", "-N", node)
            _wait(lambda: self._idle() == len(NODES), 30, "the nodes did not become idle", self._logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.communicate()
        for daemon in self._daemons:
            daemon.wait()

    def _daemon(self, *command: str) -> None:
        with (self.folder / "log" / "daemons").open("a") as log:
            started = subprocess.Popen(
                command,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(started)

    def _idle(self) -> int:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).split()
        return states.count("idle")

    def _logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in (self.folder / "log").iterdir())

    def run(self, *command: str, seconds: float = 20, check: bool = True, cwd: Path | None = None, **more: str) -> str:
        """What a command of Slurm's printed; killed if it takes too long, as one that waits for a node may."""
        done = subprocess.run(
            command,
            env={**self.variables, **more},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}"
        return done.stdout

    def left_behind(self) -> list[int]:
        """Its living processes."""
        return carriers(self._token)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: `JobState`, `Restarts`, `ExitCode`, ..."""
        words = self.run("scontrol", "show", "--oneliner", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, condition: Callable[[], bool], seconds: float, told: Callable[[], str]) -> float:
        """Wait for a condition; the seconds that it took.  `told` says what is known if it does not come true."""
        return _wait(condition, seconds, "waited in vain", lambda: f"{told()}\n{self._logs()}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(condition: Callable[[], bool], seconds: float, trouble: str, told: Callable[[], str]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{trouble} for {seconds} s\n{told()}"
        time.sleep(0.1)
    return time.monotonic() - began


def carriers(token: str) -> list[int]:
    """The living processes that carry it in their environment."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if mark in Path(f"/proc/{int(entry)}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def guard(token: str) -> None:
    """Wait for the end of the standard input; then kill whoever carries the token, until nobody does."""
    sys.stdin.buffer.read()
    while alive := carriers(token):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    guard(sys.argv[1])
