"""Launch ranks under the MPI of this environment, with a time limit that holds, and leave no process behind.

Used by the fixture in conftest.py and by kill_matrix.py.  Every launch carries a token in its environment, by which its
processes are found again wherever a launcher has put them: ranks live in process groups of their own, so killing
mpirun's group does not reach them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TOKEN = "MPITRAIN_TEST_LAUNCH"
_TAG = re.compile(r"^(?:\[\d+,(\d+)\]<std\w+>: ?|\[(\d+)\] )", re.MULTILINE)


def find_mpirun() -> str | None:
    """The mpirun that belongs to this Python's environment, else the one on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@functools.cache
def vendor(mpirun: str) -> str:
    """`openmpi`, `openmpi4` (an old one, whose options differ) or `mpich`."""
    text = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    if "HYDRA" in text or "mpich" in text.lower():
        return "mpich"
    return "openmpi4" if "Open MPI) 4." in text else "openmpi"


_TAGGED = {"mpich": ["-prepend-rank"], "openmpi": ["--output", "tag"], "openmpi4": ["--tag-output"]}


def environment(**more: str) -> dict[str, str]:
    """What lets more ranks than cores run as root, with one BLAS thread each."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "MPITRAIN_"))}
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
    }
    return env | more


@dataclass
class Run:
    """How a launch ended.

    Attributes:
        code: exit code of the launcher; None if it had to be killed.
        output: stdout and stderr of all ranks, tags taken away.
        seconds: until every process was gone.
        left_behind: processes that lived on after the launcher had ended, for longer than the grace.
    """

    code: int | None
    output: str
    seconds: float
    left_behind: list[int] = field(default_factory=list)

    def check(self) -> Run:
        """Fail unless all went well."""
        assert self.code == 0, f"exit code {self.code} after {self.seconds:.1f} s\n{self.output}"
        assert not self.left_behind, f"processes left behind: {self.left_behind}\n{self.output}"
        return self


class Launch:
    """A running mpirun.  Use as a context manager, so that nothing outlives it."""

    def __init__(self, ranks: int, *command: str, timeout: float = 60, env: dict[str, str] | None = None) -> None:
        mpirun = find_mpirun()
        assert mpirun is not None
        self.timeout = timeout
        self._token = uuid.uuid4().hex
        self._began = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        # Of its own: mpirun does not start beside what a killed one with the same process number has left behind.
        self._scratch = tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True)
        # Of its own, too: what Open MPI's ranks share stays there if they are all killed.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else self._scratch.name
        self._shared = tempfile.TemporaryDirectory(prefix="mpi-", dir=memory, ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [mpirun, *_TAGGED[vendor(mpirun)], "-n", str(ranks), *command],
            env=environment(
                **{
                    _TOKEN: self._token,
                    "MPITRAIN_TEST_STACKS_AFTER": str(max(2.0, timeout - 4)),
                    "TMPDIR": self._scratch.name,
                    "OMPI_MCA_btl_sm_backing_directory": self._shared.name,
                },
                **(env or {}),
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self._output.close()
        self._shared.cleanup()
        self._scratch.cleanup()

    def processes(self) -> list[int]:
        """All living processes of this launch, the launcher's own among them."""
        mark = f"{_TOKEN}={self._token}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found.append(int(entry))
        return found

    def ranks(self) -> list[int]:
        """Process ids of the Python processes."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if os.path.basename(words[0]).startswith(b"python"):
                    found.append(pid)
        return found

    def left_files(self) -> list[str]:
        """What lies in the folders for temporary files and for shared memory that this launch was given."""
        roots = [Path(self._scratch.name), Path(self._shared.name)]
        return sorted(str(path.relative_to(root)) for root in roots for path in root.rglob("*") if not path.is_dir())

    def output(self) -> str:
        """What was written so far, without tags."""
        self._output.seek(0)
        text = self._output.read().decode(errors="replace").replace("\r\n", "\n").replace("\0", "")
        return _TAG.sub("", text)

    def wait(self, grace: float = 3.0) -> Run:
        """Wait for the end; kill what does not end in time.

        Args:
            grace: seconds that processes may live on after the launcher.
        """
        code: int | None
        try:
            code = self.process.wait(max(0.1, self.timeout - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            code = None
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        ended = time.monotonic()
        while (left := self.processes()) and time.monotonic() - ended < grace:
            time.sleep(0.05)
        seconds = time.monotonic() - self._began
        self._kill_all()
        return Run(code, self.output(), seconds, left)

    def _kill_all(self) -> None:
        for _ in range(20):
            alive = self.processes()
            if not alive:
                break
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def launch(
    ranks: int, *command: str, timeout: float = 60, env: dict[str, str] | None = None, grace: float = 3.0
) -> Run:
    """Run a command on that many ranks, to its end."""
    with Launch(ranks, *command, timeout=timeout, env=env) as running:
        return running.wait(grace)
