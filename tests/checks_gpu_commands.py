"""Training by the command line with `--device cuda`, against the same on the CPU: alone, as threads, under mpirun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "mpi"))  # where launches are
from mpi_launch import ROOT, environment, find_mpirun

from mpitrain.debug.compare import FLOAT64_TOLERANCE

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
FLAGS = (
    "--model gpt-tiny --batch 8 --steps 4 --dropout 0.1 --lr 0.002 --dtype float64 --deterministic --log-every 1"
    " --sample-length 0 --eval-every 4 --save-every 4"
).split()
LAYOUTS = {
    "one rank": (1, "alone", ""),
    "two threads": (2, "local", "--microbatches 2"),
    "two threads, tensor parallel": (2, "local", "--tp 2"),
    "two processes": (2, "mpirun", ""),
    "two processes, a pipeline": (2, "mpirun", "--pp 2 --microbatches 2"),
}
"""By name: ranks, what starts them, further flags."""
TIMEOUT = 240.0


def has_mpi() -> bool:
    """Whether there is an MPI to launch with."""
    return find_mpirun() is not None


def losses(device: str, layout: str, run: Path, *more: str, timeout: float = TIMEOUT) -> list[float]:
    """Train in processes of its own on a file of this clone, and tell the losses, that of validation among them.

    Raises:
        RuntimeError: it did not end well; with the last lines that it wrote.
    """
    ranks, how, flags = LAYOUTS[layout]
    python = [sys.executable, "-m", "mpitrain", "local", "-n", str(ranks)] if how == "local" else [sys.executable]
    mpirun = [str(find_mpirun()), "-n", str(ranks)] if how == "mpirun" else []
    command = [*mpirun, *python, SCRIPT, *FLAGS, *flags.split(), "--data", str(ROOT / "run_mpi.sh")]
    command += ["--run", str(run), "--device", device, *more]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False, cwd=run.parent
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: " + "\n".join((done.stdout + done.stderr).splitlines()[-12:]))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(record[key]) for record in records for key in ("loss", "val_loss") if key in record]


def gap(layout: str, folder: Path, *more: str, timeout: float = TIMEOUT) -> float:
    """The largest difference between losses on the GPU and on the CPU, in units of the bound of float64."""
    mine, right = (
        np.array(losses(device, layout, folder / device, *more, timeout=timeout)) for device in ("cuda", "cpu")
    )
    return float(np.abs(mine - right).max() / (FLOAT64_TOLERANCE * np.abs(right).max()))
