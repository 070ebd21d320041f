"""A training run that tests interrupt, and what must be the same whether it was interrupted or not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mpi_launch import ROOT

SCRIPT = str(ROOT / "examples/train_gpt.py")
STEPS = 60
FLAGS = (
    f"--model gpt-tiny --batch 8 --steps {STEPS} --dropout 0.1 --sample-length 20 --eval-every 20 --log-every 5 "
    "--save-every 10 --keep 3 --deterministic --data book.txt"
).split()
TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk; take {n % 7} down.\n" for n in range(200))

Outcome = tuple[list[dict[str, Any]], dict[str, str], str]


def outcome(run: Path) -> Outcome:
    """Metrics without times, digests of the last checkpoint's files, the sample."""
    files = sorted((run / f"checkpoints/step-{STEPS:08d}").glob("*.h5"))
    assert files
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return metrics(run), digests, (run / "sample.txt").read_text(encoding="utf-8")


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines that are there so far, without times; the last one may be half written."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    for record in records:
        record.pop("tokens_per_s", None)
    return records


def last_step(run: Path) -> int:
    """The last step of which there is a line, 0 before the first."""
    return max((int(record.get("step", 0)) for record in metrics(run)), default=0)


def undisturbed(folder: Path, shell: dict[str, str], ranks: int) -> Outcome:
    """What the run comes to on that many ranks if nothing happens; they are threads, which compute the same bits."""
    (folder / "book.txt").write_text(TEXT)
    words = [sys.executable, "-m", "mpitrain", "local", "-n", str(ranks), SCRIPT, *FLAGS, "--run", "run"]
    subprocess.run(words, cwd=folder, env=shell, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return outcome(folder / "run")
