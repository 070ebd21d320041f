"""The command line of `mpitrain verify`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from mpitrain.catalog import family_of
from mpitrain.comm.launcher import announced
from mpitrain.debug.capture import Record
from mpitrain.device import DEVICES
from mpitrain.doctor.machine import cores_allowed
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show
from mpitrain.verify import report
from mpitrain.verify.every import all_layouts
from mpitrain.verify.launch import mpirun
from mpitrain.verify.layouts import MOST_RANKS, Layout, parse, vocabulary
from mpitrain.verify.proof import FRESH, Outcome, Proof

EQUAL, DIFFERS, USER_ERROR = 0, 1, 2  # exit codes
UNREAD = 128 + signal.SIGPIPE  # as shells have it

TITLE = """usage: mpitrain verify --layout WORDS [--layout ...] [options] [SCRIPT [args]]
       mpitrain verify --all RANKS [options] [SCRIPT [args]]
       mpitrain verify --sweep COUNT [--seed S] [--device cuda]

Proves that a layout is the same training run as one rank: runs SCRIPT on one rank and in each layout, in float64 and
deterministic mode, and compares the loss, every gradient, weight and optimizer state of each step.  Without SCRIPT the
trainer of mpitrain with a tiny GPT; more of its options after "--".

"""

OPTIONS = {
    option.name: option
    for option in (
        Option("all", int, None, "every factorisation of so many ranks", Interval(1, MOST_RANKS), metavar="RANKS"),
        Option("transport", str, "local", "what moves the messages", choices=("local", "mpi"), metavar="NAME"),
        Option("first", int, 4, "compare so many steps, then end the script", Interval(1, 10**6), metavar="STEPS"),
        Option("at_once", int, None, "runs at the same time", Interval(1, 99), metavar="N", unset="default: the cores"),
        Option("check", bool, False, "check the states of all values in every run, too", off="--no-check"),
        Option("timeout", float, 300.0, "time limit of each run", Interval(1, 10**6), metavar="SECONDS"),
        Option("sweep", int, None, "random cases of the trainer", Interval(1, 10**7), metavar="COUNT"),
        Option("seed", int, 0, "of the sweep's first case; the next one's is S + 1", Interval(0, 2**62), metavar="S"),
        Option("device", str, "cpu", "of the sweep: what computes, the CPU or GPUs", choices=DEVICES, metavar="NAME"),
        Option("json", str, None, "write all that was found", metavar="FILE", unset="default: none"),
        Option("verbose", bool, False, "print what the scripts print, and every row", off="--no-verbose"),
    )
}

TRAINER = str(Path(__file__).with_name("trainer.py"))
# Blocks, micro-batches and rows that divide over four stages of two chunks, and over eight replicas.
SIZES = "--model gpt-tiny --layers 4 --batch 32 --microbatches 4"
# A pipeline that never drains goes on to the next evaluation.
BUILT_IN = [*SIZES.split(), *"--steps 100 --eval-every 4 --dropout 0.1 --lr 2e-3 --clip 0.1".split()]
# For layouts that spread experts: as many as eight ranks can share, and all that a router can do.
EXPERTS = "--experts 8 --top-k 2 --capacity-factor 1 --z-loss 1e-3 --jitter 1e-2".split()


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain verify`.

    Args:
        argv: words behind `verify`.

    Returns:
        0 if every layout is equal to one rank, 1 if one differs or fails, 2 if one was refused that was asked for by
        name, or if nothing could be compared; 141 if whoever read the output is gone (`| head`).

    Raises:
        UserError: the command line, or the script on one rank, is wrong.
    """
    try:
        code = _verify(list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end
        return UNREAD
    return code


def _verify(words: list[str]) -> int:
    if words[:1] in (["--help"], ["-h"]):
        print(help_text(TITLE + vocabulary(), OPTIONS, {"all": "Options"}))
        return EQUAL
    given, layouts, script = _read(words)
    found = announced(os.environ)
    if found is not None and found[1] > 1:
        raise LaunchError(f"mpitrain verify starts its ranks itself: run it without mpirun ({found[0]}={found[1]}).")
    path = None if given["json"] is None else str(given["json"])
    if path is not None:
        report.check_writable(path)
    if given["sweep"] is not None:
        from mpitrain.verify.sweep import main as sweep  # it needs all that training needs

        if layouts or script or given["all"] is not None or given["transport"] != "local":
            raise ConfigError("--sweep makes its own models and layouts: give no layout, script or transport with it.")
        return sweep(int(given["sweep"]), int(given["seed"] or 0), path, device=str(given["device"]))
    if given["device"] != "cpu":
        raise ConfigError(
            f"--device {given['device']} in front of the script is for --sweep.  The script has its own: give it behind"
            ' the script, or without one behind "--".'
        )
    named = dict.fromkeys(layouts)
    every = list(all_layouts(int(given["all"]))) if given["all"] is not None else []
    if _has_no_experts(script):
        every = [layout for layout in every if not layout.spreads_experts]
    _check_places(layouts, script, proves=bool(named or every))
    if not named and not every:
        raise ConfigError("mpitrain verify: give a --layout (dp2,tp2), --all RANKS or --sweep COUNT; --help says more.")
    if given["transport"] == "mpi":
        mpirun()
    with _ending_cleanly(), tempfile.TemporaryDirectory(prefix="mpitrain-verify-") as folder:
        command = _command(script, Path(folder))
        proof = Proof(
            command,
            Path(folder),
            int(given["first"] or 0),
            str(given["transport"]),
            int(given["at_once"] or cores_allowed()[0]),
            float(given["timeout"] or 0),
            echo=bool(given["verbose"]),
            states=bool(given["check"]),
            experts=_experts(script),
        )
        return _prove(proof, list(dict.fromkeys([*named, *every])), named, path, everything=bool(given["verbose"]))


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the block, as Ctrl-C does, so that no run is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, end)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _read(words: list[str]) -> tuple[dict[str, Value], list[Layout], list[str]]:
    """Options, layouts, and the script with its arguments (or "--" with those of the trainer)."""
    known = {option.flag: option for option in OPTIONS.values()}
    flags: list[str] = []
    layouts: list[Layout] = []
    place = 0
    while place < len(words) and words[place].startswith("--") and words[place] != "--":
        flag, equals, value = words[place].partition("=")
        place += 1
        takes_value = flag == "--layout" or (flag in known and known[flag].kind is not bool)
        if takes_value and not equals:
            value = words[place] if place < len(words) else ""
            place += 1
        if flag != "--layout":
            flags += [flag, value] if takes_value else [words[place - 1]]
        elif not value or value.startswith("--"):
            raise ConfigError(f"--layout: its value is missing.\n{vocabulary()}")
        else:
            layouts.append(parse(value))
    given = read_flags([word for word in flags if word], OPTIONS.values())
    return {name: given.get(name, option.default) for name, option in OPTIONS.items()}, layouts, words[place:]


def _check_places(layouts: Sequence[Layout], script: Sequence[str], proves: bool) -> None:
    """Refuse words of ours that stand where the script's are read; `proves`: whether there is any layout to prove."""
    loose = [str(layout) for layout in takewhile(bool, map(_as_layout, script))]
    if loose:
        several = " ".join(f"--layout {layout}" for layout in [*map(str, layouts), *loose])
        raise ConfigError(
            f"{script[0]}: there is no such script, but it is a layout: say {several}.\n"
            "Each --layout is a layout of its own; axes of one layout are joined by commas."
        )
    # Behind a script it could be the script's own option; where nothing else says what to prove, it is ours.
    late = next((word for word in script if word.partition("=")[0] in ("--layout", "--all", "--sweep")), "")
    if late and not proves:
        whose = "the trainer's" if script[0] == "--" else "the script's"
        raise ConfigError(
            f"{show(late)} stands behind {show(script[0])}, where all words are {whose} own.\n"
            f"Options of verify stand before it: mpitrain verify {late.partition('=')[0]} ... {show(script[0])}"
        )


def _as_layout(word: str) -> Layout | None:
    """What a word that is no file means as a layout, if anything."""
    if os.path.exists(word):
        return None
    try:
        return parse(word)
    except ConfigError:
        return None


def _command(script: list[str], folder: Path) -> list[str]:
    """The script to run; the trainer, with a small text and folders of its own, where none is given."""
    if script and script[0] != "--":
        if not os.path.isfile(script[0]):
            raise ConfigError(f"{show(script[0])}: there is no such script (looked from {os.getcwd()}).")
        return script
    more = script[1:]
    heads = [] if "--model" in more else ["--heads", "8"]  # so that they divide over 8 ranks
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {2 * n}.\n" for n in range(2000)))
    return [TRAINER, *BUILT_IN, *heads, "--data", str(text), "--run", FRESH, *more]


def _has_no_experts(script: Sequence[str]) -> bool:
    """Whether it is the trainer, with a model of a family that has no experts."""
    if script[:1] != ["--"] or "--model" not in script[:-1]:
        return False
    last = len(script) - 1 - script[::-1].index("--model")
    return family_of(script[min(last + 1, len(script) - 1)]) != "gpt"


def _experts(script: Sequence[str]) -> list[str]:
    """What gives the trainer's model experts, for layouts that spread them; a script of one's own says it itself."""
    own = [word.partition("=")[0] for word in script]
    return EXPERTS if own[:1] in ([], ["--"]) and "--experts" not in own else []


def _prove(
    proof: Proof, layouts: Sequence[Layout], named: Collection[Layout], path: str | None, everything: bool
) -> int:
    """Run, print as it goes, and write the JSON."""
    records: list[Record] = []
    for with_experts in sorted({proof.adds_experts(layout) for layout in layouts}):
        found = proof.one_rank(with_experts)
        words = f"one rank with {' '.join(proof.experts)}" if with_experts else "one rank"
        print(report.one_rank_line(found, words), flush=True)
        records = records or found
    width = max(len(str(layout)) for layout in layouts)
    outcomes: list[Outcome] = []
    for outcome in proof.outcomes(layouts):
        outcomes.append(outcome)
        text = report.line(str(outcome.layout), outcome.word, report.detail(outcome), outcome.seconds, width)
        print(text, flush=True)
    for outcome in outcomes:
        _tell(proof, outcome, outcome.layout in named, everything, alone=len(outcomes) == 1)
    code = _exit_code(outcomes, named)
    if len(outcomes) > 1:
        print("\n" + _summary(outcomes))
    if path is not None:
        report.write(path, report.as_json(proof.command, records, outcomes, code))
    return code


def _tell(proof: Proof, outcome: Outcome, is_named: bool, everything: bool, alone: bool) -> None:
    """What there is to say of a layout besides its line: why it was refused, how it failed, where it differs."""
    if outcome.word == "refused" and is_named:
        print(f"\n{outcome.layout} was refused by the script:\n{outcome.message}")
    if outcome.word == "failed" and not outcome.state_error:  # which is one of the hints
        print(f"\n{outcome.layout} {outcome.message}")
    if outcome.word in ("differs", "failed"):
        proof.explain(outcome)
        if outcome.hints:
            print("\n" + report.explanation(str(outcome.layout), outcome.hints, outcome.layout.is_stale))
    compared = outcome.verdict is not None and outcome.verdict.steps > 0
    if outcome.verdict is not None and compared and (outcome.word != "equal" or alone or everything):
        print("\n" + report.table(outcome.verdict, None if everything else report.ROWS))


def _exit_code(outcomes: Sequence[Outcome], named: Collection[Layout]) -> int:
    if any(outcome.word in ("differs", "failed") for outcome in outcomes):
        return DIFFERS
    refused = any(outcome.word == "refused" and outcome.layout in named for outcome in outcomes)
    return USER_ERROR if refused or not any(outcome.word == "equal" for outcome in outcomes) else EQUAL


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.word for outcome in outcomes)
    several = {"differs": "differ"}
    said = [
        f"{counts[word]} {word if counts[word] == 1 else several.get(word, word)}"
        for word in ("equal", "refused", "differs", "failed")
        if counts[word]
    ]
    text = f"{len(outcomes)} layouts: {', '.join(said)}"
    return text + ".  Nothing was proven." if counts["refused"] == len(outcomes) else text
