"""A run whose newest checkpoint is damaged goes on from the one before as if it had never seen the newest.

What a reducer remembers begins between the two, so that the older one has nothing of it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

from kept_state import TEXT, Watch, different, written

from mpitrain.comm.local import LocalWorld
from mpitrain.train import main

SCHEMES = {
    "PowerSGD": ("--reducer powersgd --powersgd-rank 2 --powersgd-start 3 --powersgd-tables", ""),
    "stale": ("--reducer stale --staleness 2 --stale-start 3", ""),
    "stale workers": ("--reducer flat", "--reducer stale --stale-workers --staleness 1"),
    "local": ("--reducer flat", "--reducer local --local-steps 2"),
}
"""Flags up to the older checkpoint, and those of later starts."""

OLDER, NEWEST, STEPS = 2, 6, 8


def after_damage(folder: Path, name: str) -> list[str]:
    """What is different in a run that began to read a damaged checkpoint from one that read the older one only."""
    before, after = SCHEMES[name]
    (folder / "text").write_text(TEXT)
    words = f"--model gpt-tiny --layers 1 --width 16 --seq-len 8 --batch 4 --steps {STEPS} --sample-length 0".split()
    words += ["--eval-every", "0", "--deterministic", "--data", str(folder / "text")]
    go_on = [*words, *(after or before).split(), "--resume", "latest"]

    def start(run: str, flags: list[str]) -> tuple[Watch, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), Watch(only=[OLDER, STEPS]) as watch:
            LocalWorld(2).run(main, [*flags, "--run", str(folder / run)])
        return watch, out.getvalue()

    start("run", [*words, *before.split(), "--stop-after", str(OLDER)])
    shutil.copytree(folder / "run", folder / "copy")
    start("run", [*go_on, "--stop-after", str(NEWEST)])
    damage_last_slab(folder / "run" / "checkpoints" / f"step-{NEWEST:08}")
    again, said = start("run", go_on)
    straight, _ = start("copy", go_on)
    wrong = [] if "Passed over: " in said else ["nobody is told that the newest was passed over"]
    for step in (OLDER, STEPS):
        wrong += [f"{name} after step {step}" for name in different(again.states[step], straight.states[step])]
    return wrong


def damage_last_slab(checkpoint: Path) -> None:
    """Change the first byte of what is read last: all that lies before it is good, and is filled by then."""
    slabs = [slab for tensor in written(checkpoint)["tensors"].values() for slab in tensor["slabs"]]
    last = max(slabs, key=lambda slab: slab["offset"])
    with (checkpoint / last["file"]).open("r+b") as file:
        file.seek(last["offset"])
        (byte,) = file.read(1)
        file.seek(last["offset"])
        file.write(bytes([byte ^ 255]))
