"""Which GPUs there are, and whether `--device cuda` would work with them.

That CuPy can be imported does not mean that there is a device, nor does a device mean that kernels can be compiled for
it: so one is opened as training opens it, and computes something, in a child process.
"""

from __future__ import annotations

import json
import os
import sys

from mpitrain.doctor.ask import Finding, ask, ask_python

PROGRAM = """
import json
from mpitrain import kernels
from mpitrain.comm import nccl
from mpitrain.device import open_device
from mpitrain.errors import UserError
said = {}
try:
    device = open_device("cuda")
    said = {"count": device.count, "device": str(device), "version": device.xp.__version__}
    ones = device.xp.ones((64, 64), "float32")
    said["product"] = float((ones @ ones).sum())
    said["squares"] = float(kernels.sum_of_squares(ones))
    said["nccl"] = nccl.installed()
except UserError as error:
    said["refused"] = str(error)
except Exception as error:
    said["broken"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def check_gpu() -> list[Finding]:
    """NVIDIA devices, and whether mpitrain computes on them."""
    driver = ask(["nvidia-smi", "-L"], 15)
    listed = [line for line in driver.text.splitlines() if line.startswith("GPU ")] if driver.code == 0 else []
    answer = ask_python(PROGRAM, 120)
    try:
        said = json.loads(answer.text.splitlines()[-1])
    except (ValueError, IndexError):
        said = {"broken": answer.last_line}
    if "broken" in said:
        return [Finding("GPU", "warn", f"--device cuda does not work: {_first_line(said['broken'])}", "nvidia-smi")]
    if "refused" in said:
        return [_refused(said["refused"], listed)]
    found, right = [said["product"], said["squares"]], [64.0**3, 64.0**2]
    if found != right:
        text = f"{said['device']} computes wrong: {found} where {right} is right"
        return [Finding("GPU", "bad", text, "nvidia-smi -q   (look for ECC errors; take another device)")]
    return [
        Finding("GPU", "ok", f"--device cuda works: {said['device']}, CuPy {said['version']}"),
        *_nccl(said),
        *_hidden(listed, said),
    ]


def _refused(reason: str, listed: list[str]) -> Finding:
    """What a start with `--device cuda` would be told; only where there is a GPU does somebody have to act."""
    text = _first_line(reason).removeprefix("--device cuda: ").removeprefix("--device cuda ")
    if not listed:
        with_cupy = "" if "not installed" in text else " (CuPy is installed)"
        return Finding("GPU", "ok", f"none{with_cupy}; the CPU is used")
    if "not installed" in text:
        fix = f"{sys.executable} -m pip install 'mpitrain[cuda13]'   (cuda12 where nvidia-smi shows CUDA below 13)"
        return Finding("GPU", "note", f"{len(listed)} device(s), but no CuPy; the CPU is used", fix)
    fix = reason.splitlines()[-1] if "\n" in reason else "nvidia-smi"
    return Finding("GPU", "warn", f"{len(listed)} device(s) that --device cuda cannot use: {text}", fix)


def _nccl(said: dict[str, object]) -> list[Finding]:
    """Whether several devices can send to each other by NCCL."""
    if int(str(said["count"])) < 2:
        return []
    if said.get("nccl"):
        text = f"{said['nccl']} loads: --device-messages nccl, where every rank has a device of its own"
        return [Finding("NCCL", "ok", text)]
    text = "NCCL does not load; ranks send through the host, or by an MPI that takes memory of devices"
    return [Finding("NCCL", "note", text, f"{sys.executable} -m pip install nvidia-nccl-cu13   (cu12 with CUDA 12)")]


def _hidden(listed: list[str], said: dict[str, object]) -> list[Finding]:
    """Devices of this machine that this process does not see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or len(listed) <= int(str(said["count"])):
        return []
    text = f"{said['count']} of {len(listed)} device(s) are seen: CUDA_VISIBLE_DEVICES={visible}"
    return [
        Finding("GPU", "note", text, "unset CUDA_VISIBLE_DEVICES   (not inside a Slurm task, which dealt them out)")
    ]


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no reason was given"
