"""The whole performance table, or some of its rows: mpitrain beside PyTorch in the same run.

    python benchmarks/table.py                          all rows, about a quarter of an hour
    python benchmarks/table.py --list                   their names
    python benchmarks/table.py --rows tokens-S adamw    these
    python benchmarks/table.py --missing                what the result file lacks
    python benchmarks/table.py --show                   measure nothing, print what is kept
    python benchmarks/table.py --write-docs             docs/performance.md and its figures from what is kept

Each measurement is kept as soon as it is done, in place of an older one of the same name: the table can be measured in
pieces, and broken off.  A row's measurement may bring other rows along; they are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import machine
import page
from measurements import MEASUREMENTS, Options
from rows import ROWS

RESULT = machine.RESULTS / "table.json"
HEADER = (
    f"{'row':<27}{'mpitrain':>16}{'PyTorch':>16}{'measured':>10}   {'min-max':<15}{'bar':>11}{'ambition':>11}"
    f"  {'reached':<9}{'foreign':>8}"
)


def lines(result: page.Result, measurements: list[str] | None = None) -> list[str]:
    """Rows as lines for a terminal; of these measurements, or all."""
    texts = []
    for row, figure in page.figures_of(result):
        if measurements is not None and row.measurement not in measurements:
            continue
        if figure is None:
            texts.append(f"{row.name:<27}{'not measured':>42}{row.asked(row.bar):>31}{row.asked(row.ambition):>11}")
            continue
        load = page.share(page.foreign(result["measurements"][row.measurement]["data"]))
        between = row.between(figure.low, figure.high)
        sides = f"{figure.mine or '-':>16}{figure.peer or '-':>16}{row.text(figure.value):>10}   {between:<15}"
        asked = f"{row.asked(row.bar):>11}{row.asked(row.ambition):>11}  {row.verdict(figure.value) or '-':<9}"
        texts.append(f"{row.name:<27}{sides}{asked}{load:>8}")
        texts += [f"{'':<4}{figure.note}"] if figure.note else []
    return texts


def measure(name: str, options: Options) -> dict[str, Any]:
    """One measurement with its surroundings."""
    about, loadavg, start = machine.describe(), os.getloadavg()[0], time.perf_counter()
    data = MEASUREMENTS[name](options)
    seconds = round(time.perf_counter() - start, 1)
    return {"about": about, "rounds": options.rounds, "seconds": seconds, "loadavg": loadavg, "data": _short(data)}


def _short(data: Any) -> Any:
    """Numbers with six digits: more were never measured."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {name: _short(value) for name, value in data.items()}
    return [_short(value) for value in data] if isinstance(data, (list, tuple)) else data


def load(path: Path) -> page.Result:
    """What is kept, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {"measurements": {}}


def keep(path: Path, result: page.Result) -> None:
    """Replace the file at once: breaking off leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: result["measurements"][name] for name in MEASUREMENTS if name in result["measurements"]}
    draft = path.with_suffix(".unfinished")
    draft.write_text(json.dumps({"measurements": ordered}, indent=1) + "\n")
    draft.replace(path)


def main() -> int:
    """Measure, keep and print; the exit code is 1 if a measurement failed."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help="measure these (--list names them)")
    parser.add_argument("--missing", action="store_true", help="measure what the result file lacks")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--stretch", type=float, default=1.5, help="seconds a training side and round (default 1.5)")
    parser.add_argument(
        "--undisturbed", action="store_true", help="pipelines: steps at real-time priority, for busy machines (root)"
    )
    parser.add_argument("--result", type=Path, default=RESULT, help=f"where figures are kept (default {RESULT})")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    parser.add_argument("--show", action="store_true", help="print what is kept and measure nothing")
    parser.add_argument("--write-docs", action="store_true", help="write docs/performance.md from what is kept")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.list:
        print("\n".join(f"{row.name:<27}{row.title}" for row in ROWS))
        return 0
    result = load(options.result)
    if options.show or options.write_docs:
        result = result if result["measurements"] else load(page.KEPT)  # nothing was measured here: what the page shows
        print("\n".join([HEADER, *lines(result)]))
        for path in page.write(result) if options.write_docs else ():
            print(f"written {path}")
        return 0
    asked = [row for row in ROWS if options.rows is None or row.name in options.rows]
    wanted = list(dict.fromkeys(row.measurement for row in asked))
    if options.missing:
        wanted = [name for name in wanted if name not in result["measurements"]]
    return _measure_all(wanted, result, options)


def _measure_all(wanted: list[str], result: page.Result, options: argparse.Namespace) -> int:
    about = machine.describe()
    print(machine.headline(about), f"command: {about['command']}", HEADER, sep="\n", flush=True)
    start, failed = time.perf_counter(), []
    for number, name in enumerate(wanted, start=1):
        print(f"[{number}/{len(wanted)}] {name} ...", file=sys.stderr, flush=True)
        try:
            measured = measure(name, Options(options.rounds, options.stretch, options.undisturbed))
        except (Exception, SystemExit) as error:  # the others are measured all the same
            traceback.print_exception(error, limit=None if isinstance(error, Exception) else 0)
            failed.append(name)
            continue
        result["measurements"][name] = measured
        keep(options.result, result)
        print("\n".join(lines(result, [name])), flush=True)
        print(
            f"    {measured['seconds']:.0f} s, {time.perf_counter() - start:.0f} s in all", file=sys.stderr, flush=True
        )
    print(f"{time.perf_counter() - start:.0f} s; kept in {options.result}")
    if failed:
        print(f"not measured, see above: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
