"""What MPI, slots, cores, threads, memory, GPU and HDF5 this machine has, and what to fix: `mpitrain doctor`.

Each check looks at one thing and returns findings; nothing here is used by training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpitrain.doctor.ask import Finding
from mpitrain.doctor.gpu import check_gpu
from mpitrain.doctor.launchers import check_mpi, check_slurm
from mpitrain.doctor.machine import (
    check_cores,
    check_extras,
    check_folder,
    check_kernels,
    check_numpy,
    check_python,
    check_shared_memory,
)

CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_numpy,
    check_cores,
    check_shared_memory,
    check_mpi,
    check_slurm,
    check_gpu,
    check_folder,
    check_kernels,
    check_extras,
)


def examine(checks: Sequence[Callable[[], list[Finding]]] = CHECKS) -> list[Finding]:
    """All findings in the order of the checks; a check that fails itself is a finding, not a crash."""

    def guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
        try:
            return check()
        except Exception as error:
            topic = check.__name__.removeprefix("check_")
            return [Finding(topic, "warn", f"could not be examined: {type(error).__name__}: {error}")]

    with ThreadPoolExecutor(max_workers=4) as pool:  # the checks wait for children, most of the time
        return [finding for findings in pool.map(guarded, checks) for finding in findings]


def report(findings: Sequence[Finding]) -> str:
    """The findings as text for a person."""
    lines = []
    for topic, level, text, fix in findings:
        lines.append(f"  {level:<5} {topic:<9} {text}")
        if fix:
            lines.append(f"  {'':<5} {'':<9} fix: {fix}")
    bad = [finding.topic for finding in findings if finding.level == "bad"]
    end = "Training can run here." if not bad else f"Training cannot run here until this is mended: {', '.join(bad)}."
    return "\n".join(["mpitrain doctor", "", *lines, "", end])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `mpitrain doctor [--json]`.

    Returns:
        0 if training can run on this machine, else 1.
    """
    parser = argparse.ArgumentParser(prog="mpitrain doctor", description="What this machine has, and what to fix.")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    args = parser.parse_args(argv)
    findings = examine()
    can_train = not any(finding.level == "bad" for finding in findings)
    if args.json:
        print(json.dumps({"can_train": can_train, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        print(report(findings))
    return 0 if can_train else 1
