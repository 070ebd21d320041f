"""What a trace costs: steps of the default training on 8 ranks under mpirun, traced and not, by turns.

    python benchmarks/trace_cost.py --undisturbed          about six minutes on two cores; needs root
    python benchmarks/trace_cost.py                        on a machine that does nothing else
    python benchmarks/trace_cost.py --show                 measure nothing, print what is kept
    python benchmarks/trace_cost.py --write-docs           figures of docs/how-to/trace-a-run.md

Steps are those of trace_steps.py; what is measured is kept in benchmarks/results/trace.json.  The exit code is 1 if the
trace of the default run costs more than 3 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import trace_page as page

RANKS = 8
RESULT = machine.RESULTS / "trace.json"
LAYOUTS = {
    page.DEFAULT: [],
    "`dp 2, tp 2, pp 2`, 4 micro-batches": "--dp 2 --tp 2 --pp 2 --microbatches 4".split(),
    "`dp 8`, operations in every step": ["--ops", "1"],
}


def measure(words: Sequence[str], rounds: int, undisturbed: bool) -> dict[str, Any]:
    """What trace_steps.py finds."""
    script = [sys.executable, str(Path(__file__).with_name("trace_steps.py")), "--rounds", str(rounds), *words]
    environment = machine.rank_environment(RANKS, tuned_malloc=False)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(page.DOCS.parent), os.environ.get("PYTHONPATH"))))
    command = [machine.mpirun(), "-n", str(RANKS), *script, *["--undisturbed"] * undisturbed]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="of ten steps (default 60)")
    parser.add_argument("--undisturbed", action="store_true", help="each round at real-time priority; needs root")
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write the page's figures")
    options = parser.parse_args(argv)
    if options.show or options.write_docs:
        result = json.loads((options.result if options.result.exists() else page.KEPT).read_text())
        print("\n".join(page.lines(result)))
        for path in page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    about = machine.describe() | {"load": os.getloadavg()[0], "undisturbed": options.undisturbed}
    print(machine.headline(about), flush=True)
    layouts = {name: measure(words, options.rounds, options.undisturbed) for name, words in LAYOUTS.items()}
    result = {"about": about, "pairs": 5, "layouts": layouts}
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(page.text_of(result))
    print("\n".join(page.lines(result)), f"kept in {options.result}", sep="\n")
    return 0 if page.reaches(result) else 1


if __name__ == "__main__":
    sys.exit(main())
