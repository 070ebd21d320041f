"""The parts of a GPU check that say whether it is right, each in a process of its own (started by gpu_check.py).

    python benchmarks/gpu_parts.py PART RESULT SECONDS [AFTER [tiny]]

A part appends one JSON line to RESULT for each thing that it has tried, so what was found stays if it is ended: by its
time limit, or by a kernel after whose error the device takes no more work from this process.  It then ends with code 3,
and is started again AFTER so many things.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # where the checks are

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
from mpitrain import kernels
from mpitrain.device import Device, cuda_version, open_device

BROKEN = 3
"""Exit code of a process whose device takes no more work."""
FIRST = ("bfloat16", "float32", "float16", "float64")
"""Precisions; what a training run needs most comes first."""


class Scale(NamedTuple):
    """How large and how often.

    rounds: of each way to read something stale; width: of the products that keep the device busy meanwhile; most:
    things of a part that are tried; steps: after which memory is looked at.
    """

    rounds: int = 200
    width: int = 2048
    most: int = 10**9
    steps: tuple[int, ...] = (3, 5, 40)


USUAL, TINY = Scale(), Scale(7, 8, 4, (3, 4))


class Thing(NamedTuple):
    """Something to try: a name, and what tries it and gives (whether it is right, words or numbers)."""

    name: str
    act: Callable[[], tuple[bool, Any]]


def device_facts(device: Device) -> dict[str, Any]:
    """What the device is, and what drives it."""
    runtime = device.xp.cuda.runtime
    found = runtime.getDeviceProperties(device.number)
    return {
        "name": device.name,
        "memory": device.memory,
        "count": device.count,
        "capability": f"{found['major']}.{found['minor']}",
        "processors": int(found.get("multiProcessorCount", 0)),
        "driver": cuda_version(int(runtime.driverGetVersion())),
        "runtime": cuda_version(int(runtime.runtimeGetVersion())),
        "cupy": str(device.xp.__version__),
    }


def compiled(source: str, dtype: str) -> tuple[str, str, float, str]:
    """Compile a source for a precision, in a process of its own, into the folder in which CuPy keeps what it compiles.

    Returns:
        source, dtype, seconds, and what went wrong.
    """
    from mpitrain.backend import dtype_of
    from mpitrain.kernels.cuda import launch

    device, began = open_device("cuda"), time.monotonic()
    try:
        options = launch.options(dtype_of(dtype))
        device.xp.RawModule(code=launch.text(source), options=options, backend="nvrtc").compile()
    except Exception as error:
        return source, dtype, time.monotonic() - began, f"{type(error).__name__}: {error}"[:2000]
    return source, dtype, time.monotonic() - began, ""


def compile_all(write: Callable[..., None]) -> None:
    """All sources in all precisions at once, on all cores: the other parts find them compiled."""
    from mpitrain.kernels.cuda import launch

    works = [(source, dtype) for dtype in FIRST for source in launch.sources()]
    workers = min(len(os.sched_getaffinity(0)), 8)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for source, dtype, seconds, error in pool.map(compiled, *zip(*works, strict=True)):
            write(name=f"{source}, {dtype}", ok=not error, found=error, seconds=round(seconds, 2))
            if error:
                print(f"  BAD  {source}, {dtype}: {error.splitlines()[0]}", flush=True)


def of_kernels(device: Device, scale: Scale, dtype: str = FIRST[0]) -> Iterator[Thing]:
    """Every case of every kernel in a precision, the largest last."""
    from kernel_case import Case, measure
    from kernel_cases import CASES

    def tried(case: Case) -> tuple[bool, Any]:
        found = measure(case, kernels, device.xp, dtype)
        return found.ok, found.problems if found.problems else found.share

    for name, case in sorted(CASES.items(), key=lambda item: ("default", "slow", "gpu").index(item[1].cost)):
        if dtype in case.dtypes:
            yield Thing(f"{name}, {dtype}", lambda case=case: tried(case))  # type: ignore[misc]


def of_training(device: Device, scale: Scale) -> Iterator[Thing]:
    """Training runs: float64 against NumPy, then lower precisions, then the same bits again."""
    import checks_gpu_training as checks

    def equal(name: str) -> tuple[bool, Any]:
        found = checks.judged(checks.RUNS[name], device.xp, device.use)
        return found.ok, found.share if found.ok else found.worst

    def close(name: str, dtype: str) -> tuple[bool, Any]:
        found = checks.gap(checks.LOWER[name], dtype, device.xp)
        return found.ok, {"loss": found.loss, "gradient": found.gradient}

    def again() -> tuple[bool, Any]:
        first, second = (checks.bits(checks.LOWER["GPT"], "bfloat16", device.xp) for _ in range(2))
        return first == second, ""

    for name in checks.RUNS:
        yield Thing(f"{name}, float64", lambda name=name: equal(name))  # type: ignore[misc]
    for name in checks.LOWER:
        for dtype in checks.LOSS_BOUND:
            yield Thing(f"{name}, {dtype}", lambda name=name, dtype=dtype: close(name, dtype))  # type: ignore[misc]
    yield Thing("the same bits when run again, bfloat16", again)


def of_streams(device: Device, scale: Scale) -> Iterator[Thing]:
    """Stale reads, some rounds of each way; and whether memory comes back."""
    import checks_gpu_streams as checks
    import checks_gpu_training as training

    xp = device.xp

    def none(stale: Callable[[], int]) -> Callable[[], tuple[bool, Any]]:
        def act() -> tuple[bool, Any]:
            found = stale()
            return found == 0, f"{found} stale reads of {scale.rounds}"

        return act

    def memory() -> tuple[bool, Any]:
        pool = xp.get_default_memory_pool()
        gc.collect()
        before = int(pool.used_bytes())
        held = training.held_after_steps(xp, pool, scale.steps)
        gc.collect()
        after = int(pool.used_bytes())
        return after == before and len(set(held)) == 1, {"before": before, "after": after, "held": held}

    def door(way: str) -> tuple[bool, Any]:
        checks.door(xp, way, device.use)
        return True, ""

    yield Thing("copies to the host and back", none(lambda: checks.copies(xp, *scale[:2])))
    yield Thing("messages of two ranks on one GPU", none(lambda: checks.messages(xp, 2, *scale[:2], device.use)))
    yield Thing("offloaded arrays", none(lambda: checks.offloaded(xp, *scale[:2])))
    yield Thing("memory returns to where it was", memory)
    for way in ("staged", "mpi"):
        yield Thing(f"all that is promised of messages, {way}", lambda way=way: door(way))  # type: ignore[misc]


def of_commands(device: Device, scale: Scale) -> Iterator[Thing]:
    """The command line with --device cuda, against the CPU."""
    import checks_gpu_commands as checks

    def tried(layout: str) -> tuple[bool, Any]:
        if checks.LAYOUTS[layout][1] == "mpirun" and not checks.has_mpi():
            return True, "left out: no mpirun here"
        with tempfile.TemporaryDirectory(prefix="mpitrain-gpu-") as folder:
            found = checks.gap(layout, Path(folder))
        return found <= 1.0, found

    for layout in checks.LAYOUTS:
        yield Thing(layout, lambda layout=layout: tried(layout))  # type: ignore[misc]


PARTS: dict[str, Callable[[Device, Scale], Iterator[Thing]]] = {
    **{f"kernels in {dtype}": partial(of_kernels, dtype=dtype) for dtype in FIRST},
    "training": of_training,
    "streams": of_streams,
    "commands": of_commands,
}


def works(device: Device) -> bool:
    """Whether the device still takes work from this process."""
    try:
        return bool((device.xp.ones(3) + 1).sum() == 6)
    except RuntimeError:
        return False


def main(part: str, result: str, seconds: float, after: int = 0, scale: Scale = USUAL) -> int:
    """Try everything of a part, as long as there is time."""
    began = time.monotonic()
    with Path(result).open("a") as file:

        def write(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        device = open_device("cuda")
        if part == "device":
            write(**device_facts(device))
            return 0
        if part == "compile":
            compile_all(write)
            return 0
        things = list(islice(PARTS[part](device, scale), scale.most))
        write(of=len(things))
        for number, thing in enumerate(things[after:], after):
            if time.monotonic() - began > seconds:
                write(left=len(things) - number)
                return 0
            start = time.monotonic()
            try:
                ok, found = thing.act()
            except Exception as error:
                ok, found = (
                    False,
                    f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exc(limit=-3))[-1500:],
                )
            took = time.monotonic() - start
            write(name=thing.name, ok=ok, found=found, seconds=round(took, 3), number=number)
            if not ok or not part.startswith("kernels"):
                words = "" if ok else f": {str(found).splitlines()[0]}"
                print(f"  {'ok ' if ok else 'BAD'}  {thing.name}, {took:.1f} s{words}", flush=True)
            if not ok and not works(device):
                return BROKEN
    return 0


if __name__ == "__main__":
    part, result, seconds, *rest = sys.argv[1:]
    sys.exit(main(part, result, float(seconds), int(rest[0]) if rest else 0, TINY if "tiny" in rest else USUAL))
