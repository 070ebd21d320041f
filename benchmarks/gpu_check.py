"""One GPU, checked and measured: is every kernel right, is training right, and how fast is it beside PyTorch.

    .venv/bin/python benchmarks/gpu_check.py                    everything, within 8 minutes
    .venv/bin/python benchmarks/gpu_check.py --parts kernels    one part: kernels, streams, training, speed, commands
    .venv/bin/python benchmarks/gpu_check.py --json FILE --page FILE

It needs CuPy and a GPU, and PyTorch for the comparison: without PyTorch mpitrain is measured alone.  Where there is no
GPU it says so and ends with exit code 0; where something is wrong, with 1.

Each part is a process of its own, so a kernel that breaks the device, or hangs, costs that part alone.  The result is
a JSON file and a page of figures beside it.  What was not asked for, or had no time left, is said to be not checked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpitrain  # noqa: F401 - before NumPy (mpitrain/blas.py)

# isort: split
import gpu_page
import gpu_parts
import gpu_speed
import machine

HERE = Path(__file__).resolve().parent
SHARES = {"kernels": 0.3, "streams": 0.1, "training": 0.12, "speed": 0.38, "commands": 0.1}
"""Of the time that is left when a part begins, beside the parts that follow: what one leaves goes to the next."""
HANG = 30.0  # seconds that a part may go on beyond its limit before it is ended
MARKS = {True: "ok ", False: "BAD", None: "-  "}  # of verdicts
TINY = {"vocab": 64, "layers": 1, "width": 32, "heads": 2, "seq_len": 16, "tied": True, "dropout": 0.0}


def main(argv: list[str]) -> int:
    """Run the parts, say what they found, write it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(SHARES),
        default=list(SHARES),
        metavar="PART",
        help=f"which of {', '.join(SHARES)} (all)",
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="for all parts together (7.5)")
    parser.add_argument("--json", type=Path, help="where the result goes (benchmarks/results/)")
    parser.add_argument("--page", type=Path, help="where the page goes, a .md (beside the result)")
    parser.add_argument("--tiny", action="store_true", help="small sizes: to try this script, not a device")
    args = parser.parse_args(argv)
    start = time.monotonic()
    found: dict[str, Any] = {"machine": machine.describe(), "minutes": args.minutes, "tiny": args.tiny}
    device = _part("device", 90.0, args.tiny)
    if device["lines"]:
        found["device"] = device["lines"][0]
        print(gpu_page.device_words(found["device"]), flush=True)
        found["compiled"] = _compiled(args.tiny)
        for place, name in enumerate(args.parts):
            here = SHARES[name] / sum(SHARES[other] for other in args.parts[place:])
            limit = max(10.0, here * (60.0 * args.minutes - (time.monotonic() - start)))
            print(f"{name}: at most {limit:.0f} s", flush=True)
            if name == "speed":
                found[name] = _speed(found["device"], limit, args.tiny)
            else:
                found[name] = _kernels(limit, args.tiny) if name == "kernels" else _tried(name, limit, args.tiny)
    else:
        found["skipped"] = device["error"]
        print(f"skipped, nothing was checked: {device['error']}")
    found["seconds"] = round(time.monotonic() - start, 1)
    _write(found, args.json, args.page)
    if "skipped" in found:
        return 0
    verdicts = gpu_page.verdicts(found)
    print()
    for ok, words in verdicts:
        print(f"{MARKS[ok]} {words}")
    return 1 if any(ok is False for ok, _ in verdicts) else 0


def _part(name: str, limit: float, tiny: bool, after: int = 0) -> dict[str, Any]:
    """Run a part in a process: the lines that it wrote, its exit code, what it said when it failed."""
    with tempfile.TemporaryDirectory(prefix="mpitrain-gpu-") as folder:
        result = Path(folder) / "lines"
        result.touch()
        command = [sys.executable, str(HERE / "gpu_parts.py"), name, str(result), str(limit), str(after)]
        command += ["tiny"] if tiny else []
        error = ""
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            said = process.communicate(timeout=limit + HANG)[1]
            code = process.returncode
            if code not in (0, gpu_parts.BROKEN):
                error = _last_words(said, code)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            code, error = -1, f"it was ended after {limit + HANG:.0f} s"
        lines = [json.loads(line) for line in result.read_text().splitlines() if line.endswith("}")]
    return {"lines": lines, "code": code, "error": error}


def _compiled(tiny: bool) -> dict[str, Any]:
    """All CUDA source, before anything is measured."""
    start = time.monotonic()
    run = _part("compile", 120.0, tiny)
    bad = [line for line in run["lines"] if not line["ok"]]
    took = round(time.monotonic() - start, 1)
    print(
        f"compiled {len(run['lines']) - len(bad)} of {len(run['lines'])} sources and precisions in {took} s", flush=True
    )
    return {
        "things": run["lines"],
        "of": len(run["lines"]),
        "seconds": took,
        "troubles": [run["error"]] * bool(run["error"]),
    }


def _last_words(said: str, code: int) -> str:
    """The error itself, where a Python traceback came before it: DeviceError names what is missing."""
    lines = [line for line in said.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith(" ")]
    words = (named or lines or [f"exit code {code}"])[-1]
    return words.partition("DeviceError: ")[2] or words


def _kernels(limit: float, tiny: bool) -> dict[str, Any]:
    """All precisions at once: what takes the time is NumPy's, on one core each."""
    names = [f"kernels in {dtype}" for dtype in gpu_parts.FIRST]
    with ThreadPoolExecutor(len(names)) as pool:
        parts = list(pool.map(lambda name: _tried(name, limit, tiny), names))
    return {
        "things": [thing for part in parts for thing in part["things"]],
        "of": sum(part["of"] for part in parts),
        "troubles": [trouble for part in parts for trouble in part["troubles"]],
        "seconds": max(part["seconds"] for part in parts),
    }


def _tried(name: str, limit: float, tiny: bool) -> dict[str, Any]:
    """A part that tries things; begun anew behind one that broke the device, or hung, or killed the process."""
    start, things, of, after, troubles = time.monotonic(), [], 0, 0, []
    while True:
        rest = limit - (time.monotonic() - start)
        run = _part(name, max(1.0, rest), tiny, after)
        here = [line for line in run["lines"] if "name" in line]
        of = next((line["of"] for line in run["lines"] if "of" in line), of)
        things += here
        after = (here[-1]["number"] + 1) if here else after
        if run["code"] == 0:
            break
        if run["code"] != gpu_parts.BROKEN:
            troubles.append(f"number {after} of {of}: {run['error']}")
            after += 1  # what was under way when it ended
        if rest < 5 or after >= of or len(troubles) > 20:
            break
    bad = sum(not thing["ok"] for thing in things)
    print(f"  {name}: {len(things)} of {of} tried, {bad} wrong, {len(troubles)} troubles", flush=True)
    return {"things": things, "of": of, "troubles": troubles, "seconds": round(time.monotonic() - start, 1)}


def _speed(facts: dict[str, Any], limit: float, tiny: bool) -> dict[str, Any]:
    left = gpu_speed.remember(time.monotonic(), limit)
    if tiny:
        import torch

        task = gpu_speed.Task(TINY, 2, busy=1, width=64)
        there = "cuda" if torch.cuda.is_available() else "cpu"
        return gpu_speed.measured(task, facts, left, print, torch_device=there, rounds=2, seconds=0.05)
    return gpu_speed.measured(gpu_speed.task_for(facts["memory"]), facts, left, print)


def _write(found: dict[str, Any], to: Path | None, page: Path | None) -> None:
    if to is None:
        to = machine.keep("gpu-check", found)
    else:
        to.write_text(json.dumps(found, indent=1) + "\n")
    page = to.with_suffix(".md") if page is None else page
    gpu_page.write(found, page)
    print(f"{to} and {page} were written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
