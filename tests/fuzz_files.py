"""Changed files of every kind that is read: is each refused or read, with nothing else touched?

    python tests/fuzz_files.py                             2,000 files from seed 0
    python tests/fuzz_files.py --files 20000 --seed 40000
    python tests/fuzz_files.py --seconds 3600              as many as an hour allows
    python tests/fuzz_files.py --one 4711 --keep FOLDER    write the file of one seed, and judge it

Kinds: HDF5 files that come alone, HDF5 files in a checkpoint whose sums were made anew, damaged checkpoints, manifests
and consolidated files with sums made anew, settings, corpora, metrics, pages of the flight board, recordings of ranks,
digests, weights of another tool, tokenizers, encoded texts.  A call has a process of its own with 512 MiB and 5 s of a
core.  Wrong is: any error but a UserError, a signal, a time limit, a path that is opened outside the folder of the
case, a bait file that HDF5 opened, other values than were saved from a damaged checkpoint, or a message of more than
five lines.  A file that comes alone may end the process that looks at it: that is what it has one for.

Exit code: 0 if nothing is wrong, 1 if something is.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "pure"))

from access_trace import opened_in
from confined import Outcome, outcomes
from hostile_cases import KINDS, VALUES, Bases, Case

MOST_WRONG = 20  # so many are shown; then something is wrong with everything
BATCH = 100  # files between two looks at the bait


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, help="how many (default 2000, or any number with --seconds)")
    parser.add_argument("--seed", type=int, default=0, help="of the first file; the next ones count up")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long")
    parser.add_argument("--kind", choices=KINDS, help="only files of this kind")
    parser.add_argument("--one", type=int, metavar="SEED", help="judge the file of one seed")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="with --one: leave it here, in a new folder")
    return parser.parse_args(arguments)


def case_of(seed: int, bases: Bases, folder: Path, only: str | None = None) -> tuple[str, Case]:
    """The kind and the case of a seed, its files written."""
    draw = random.Random(seed)
    kind = only or list(KINDS)[seed % len(KINDS)]
    folder.mkdir(parents=True)
    return kind, KINDS[kind](draw, bases, folder)


def outcome_of(case: Case, folder: Path) -> Outcome:
    function, *arguments = case.call
    (outcome,) = outcomes("hostile_calls", [["watched", str(folder), function, *arguments]])
    return outcome


def what_is_wrong(case: Case, outcome: Outcome) -> str:
    """Empty if nothing is."""
    if outcome.end == "refused":
        lines = outcome.text.split("\n")
        if len(lines) > 5 or not all(line.isprintable() for line in lines):
            return f"its message is not clear: {outcome.text!r}"
        return ""
    if outcome.end == "signal" and case.call[0] == "look_and_read":
        return ""  # of the process that looks at it, whose end refuses the file: `foreign.open_file`
    if outcome.end != "returned":
        return f"{outcome.end} {outcome.text}"
    if case.exact and not outcome.text.endswith(f"{VALUES})"):
        return f"a damaged checkpoint was loaded: {outcome.text}"
    return ""


def fuzz(given: argparse.Namespace, bases: Bases, place: Path) -> int:
    files = given.files if given.files is not None or given.seconds is not None else 2000
    ends: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    start = last = time.monotonic()
    number = wrongs = 0
    while (files is None or number < files) and (given.seconds is None or time.monotonic() - start < given.seconds):
        first = number
        with opened_in(bases.bait.parent) as opened:
            while number - first < BATCH and (files is None or number < files):
                seed, folder = given.seed + number, place / "case"
                kind, case = case_of(seed, bases, folder, given.kind)
                outcome = outcome_of(case, folder)
                shutil.rmtree(folder)
                number += 1
                ends[kind][outcome.end] += 1
                if wrong := what_is_wrong(case, outcome):
                    wrongs += 1
                    ends[kind]["WRONG"] += 1
                    print(f"\n# WRONG, seed {seed}, {kind}, {case.call[0]}: {wrong}", flush=True)
        if opened:
            wrongs += 1
            print(
                f"\n# WRONG, seeds {given.seed + first} to {given.seed + number - 1}: the bait was opened", flush=True
            )
        if wrongs >= MOST_WRONG:
            print(f"# {wrongs} are wrong: stopped here")
            break
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{number} files, {wrongs} wrong, {1e3 * (last - start) / number:.1f} ms each", flush=True)
    print(f"\nseeds {given.seed} to {given.seed + number - 1}")
    for kind, found in ends.items():
        if found:
            print(f"  {kind:20} " + ", ".join(f"{end} {count}" for end, count in found.most_common()))
    print(f"{number} files: {wrongs} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrongs else 0


def one(given: argparse.Namespace, bases: Bases, place: Path) -> int:
    folder = given.keep.absolute() / "case" if given.keep else place / "case"
    kind, case = case_of(given.one, bases, folder, given.kind)
    with opened_in(bases.bait.parent) as opened:
        outcome = outcome_of(case, folder)
    wrong = what_is_wrong(case, outcome) or ("the bait was opened" if opened else "")
    print(f"{kind}, {case.call}: {outcome.end} {outcome.text}\n{f'WRONG: {wrong}' if wrong else 'right'}")
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mpitrain-fuzz-", dir=memory) as folder:
        place = Path(folder)
        bases = Bases(place / "bases")
        return one(given, bases, place) if given.one is not None else fuzz(given, bases, place)


if __name__ == "__main__":
    sys.exit(main())
