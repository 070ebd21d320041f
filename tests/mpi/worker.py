"""Run on every rank: a list of checks of a module, one after the other.   python worker.py MODULE CHECKS FOLDER FIRST

Each rank writes a line of JSON a check to FOLDER/rank-N.jsonl: [name, ""] or [name, traceback].  A check that fails on
one rank leaves the others inside a message, so a failure ends the launch, and the next one goes on behind it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from mpitrain.comm.world import world


def main() -> None:
    faulthandler.dump_traceback_later(float(os.environ["MPITRAIN_TEST_STACKS_AFTER"]), exit=True)
    checks = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    folder, first = Path(sys.argv[3]), int(sys.argv[4])
    ranks = world()
    with open(folder / f"rank-{ranks.rank}.jsonl", "a", buffering=1) as report:
        for check in checks[first:]:
            trouble = ""
            try:
                check(ranks)
            except Exception:
                trouble = traceback.format_exc()
            report.write(json.dumps([check.__name__, trouble]) + "\n")
            if trouble:
                sys.exit(1)
            ranks.barrier()


if __name__ == "__main__":
    main()
