"""The command line of `mpitrain checkpoint`: look into checkpoints, prove them whole, compare them, write them anew.

One process does it, without MPI; a bad checkpoint is a message and an exit code, never a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpitrain.checkpoint import foreign
from mpitrain.checkpoint.manifest import MANIFEST
from mpitrain.checkpoint.tools import inspecting, listing, onefile, reports, verifying, wording
from mpitrain.checkpoint.tools.comparing import compare, nbytes_to_read
from mpitrain.checkpoint.tools.progress import Progress
from mpitrain.checkpoint.tools.resharding import check_target, keep_weights, to_files, to_one_file
from mpitrain.checkpoint.tools.source import Source, is_run, nbytes
from mpitrain.comm.launcher import announced
from mpitrain.errors import CheckpointError, ConfigError, LaunchError
from mpitrain.options import Interval, Option, Value, help_text, read_flags, show, suggest

SAME, DIFFERENT = 0, 1  # exit codes: whole and damaged, too; a mistake of the user, or trouble, is 2
UNREAD = 128 + signal.SIGPIPE  # as shells have it

Given = Mapping[str, Value]

_TENSORS = Option(
    "tensors", str, None, "only tensors of such names, as 'weight/*.bias'", metavar="PATTERN", unset="default: all"
)
_JSON = Option("json", bool, False, "print all of it as one JSON object", off="--no-json")
_TOLERANCE = Option(
    "tolerance",
    float,
    None,
    "differences that do not count, in units of a tensor's largest element",
    Interval(0, 1e6),
    metavar="X",
    unset="default: the same is what has the same bits",
)
_RANKS = Option("ranks", int, None, "how many files", Interval(1, 10**5), metavar="N", unset="default: none")
_ONE_FILE = Option("one_file", str, None, "one file with whole tensors", metavar="OUT.h5", unset="default: none")
_WEIGHTS = Option("weights_only", bool, False, "leave out what only training needs", off="--no-weights-only")
_FORCE = Option("force", bool, False, "replace what is there", off="--no-force")


class Tool(NamedTuple):
    """One of the words.

    Attributes:
        usage: lines after "mpitrain checkpoint".
        help: what it does.
        operands: how many paths it takes, at least and at most.
        options: its own.
        run: does it; the exit code.
    """

    usage: tuple[str, ...]
    help: str
    operands: tuple[int, int]
    options: tuple[Option, ...]
    run: Callable[[list[str], Given], int]


def main(argv: Sequence[str], more: Mapping[str, Tool] = MappingProxyType({})) -> int:
    """Run `mpitrain checkpoint`.

    Args:
        argv: words behind `checkpoint`.
        more: tools of higher floors, by their words.

    Returns:
        0; of verify 1 if something is damaged, of diff 1 if the two are different; 141 if whoever read the output is
        gone (`| head`).

    Raises:
        UserError: the command line is wrong, or what it names is no checkpoint, or cannot be read or written.
    """
    try:
        code = _run(list(argv), {**TOOLS, **more})
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end
        return UNREAD
    return code


def _run(words: list[str], tools: Mapping[str, Tool]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(_overview(tools))
        return SAME
    word, *rest = words
    tool = tools.get(word)
    if tool is None:
        near = suggest(word, tools)
        raise ConfigError(
            f"mpitrain checkpoint {show(word)}: there is no such tool; there are {', '.join(tools)}.{near}\n"
            "mpitrain checkpoint --help says what each does."
        )
    if "--help" in rest or "-h" in rest:
        print(_help(tool))
        return SAME
    found = announced(os.environ)
    if found is not None and found[1] > 1:
        raise LaunchError(f"mpitrain checkpoint is one process: run it without mpirun ({found[0]}={found[1]}).")
    paths, given = _read(word, tool, rest)
    return tool.run(paths, given)


def _read(word: str, tool: Tool, words: list[str]) -> tuple[list[str], Given]:
    """The paths and the options; they may stand in any order, and behind `--` everything is a path."""
    takes_value = {option.flag for option in tool.options if option.kind is not bool}
    paths: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for item in rest:
        if item == "--":
            paths += rest
        elif item.startswith("-") and item != "-":
            flags.append(item)
            if item in takes_value:
                flags += [value] if (value := next(rest, None)) is not None else []
        else:
            paths.append(item)
    given = read_flags(flags, tool.options)
    fewest, most = tool.operands
    if not fewest <= len(paths) <= most or not all(paths):
        number = f"{len(paths)}" if all(paths) else "an empty one"
        takes = {(1, 1): "one path", (2, 2): "two paths"}.get(tool.operands, f"{fewest} or {most} paths")
        named = f": {' '.join(map(show, paths))}" if paths else ""
        lines = "\n       ".join(f"mpitrain checkpoint {usage}" for usage in tool.usage)
        raise ConfigError(f"mpitrain checkpoint {word}: takes {takes}, not {number}{named}.\nusage: {lines}")
    return paths, {option.name: given.get(option.name, option.default) for option in tool.options}


# ---------------------------------------------------------------------------------------------------------------- tools


def _inspect(paths: list[str], given: Given) -> int:
    path, patterns = _there(paths[0]), _patterns(given)
    if is_run(path) and not patterns:
        found = listing.entries(path)
        _tell(given, lambda: listing.run_text(path, found), lambda: listing.run_json(path, found))
    elif _is_foreign(path):
        with foreign.open_file(path) as file:
            _tell(
                given,
                lambda: inspecting.foreign_text(file, patterns),
                lambda: inspecting.foreign_json(file, patterns),
            )
    else:
        source = Source.of(paths[0])
        _tell(
            given,
            lambda: inspecting.checkpoint_text(source, patterns),
            lambda: inspecting.checkpoint_json(source, patterns),
        )
    return SAME


def _verify(paths: list[str], given: Given) -> int:
    path = _there(paths[0])
    targets = [path]
    if is_run(path):
        targets = [entry.folder for entry in listing.entries(path) if entry.state != "left behind"]
        if not targets:
            raise CheckpointError(f"{show(path)}: the run has no checkpoints yet.")
    elif path.is_dir() and not (path / MANIFEST).exists():
        raise CheckpointError(f"{show(path)}: is neither a checkpoint (it has no {MANIFEST}) nor a run.")
    import h5py  # noqa: F401  # before the clock runs

    verdicts = []
    with Progress("verify", sum(map(verifying.nbytes_of, targets))) as progress:
        for target in targets:
            try:
                verdicts.append(verifying.verify(target, progress.add))
            except CheckpointError as error:
                if target == path:
                    raise
                damage = verifying.Damage(MANIFEST, "", str(error))  # one of many: the others are read, too
                verdicts.append(verifying.Verdict(target, damages=[damage]))
            if not given["json"]:
                progress.clear()
                print(reports.verdict_text(verdicts[-1]), flush=True)
    if given["json"]:
        print(json.dumps(verifying.as_json(verdicts), indent=1))
    elif len(verdicts) > 1:
        print(reports.verdicts_text(verdicts))
    return SAME if all(verdict.whole for verdict in verdicts) else DIFFERENT


def _diff(paths: list[str], given: Given) -> int:
    a, b = map(Source.of, paths)
    patterns, tolerance = _patterns(given), given["tolerance"]
    with Progress("diff", nbytes_to_read(a, b, patterns)) as progress:
        found = compare(a, b, patterns, None if tolerance is None else float(tolerance), progress.add)
    _tell(given, lambda: reports.comparison_text(a, b, found), lambda: reports.comparison_json(a, b, found))
    return SAME if found.same else DIFFERENT


def _reshard(paths: list[str], given: Given) -> int:
    one_file, ranks = given["one_file"], given["ranks"]
    if (one_file is None) == (ranks is None):
        raise ConfigError("mpitrain checkpoint reshard: give either DST and --ranks N, or --one-file OUT.h5.")
    if (one_file is None) != (len(paths) == 2):
        with_ranks = "with --ranks N, DST, the new checkpoint, stands behind SRC"
        wanted = with_ranks if one_file is None else "with --one-file OUT.h5, leave DST out"
        raise ConfigError(f"mpitrain checkpoint reshard: {wanted}.")
    source = Source.of(paths[0])
    manifest = keep_weights(source.manifest) if given["weights_only"] else source.manifest
    named = paths[1] if one_file is None else str(one_file)
    target = check_target(named, manifest, one_file is not None, bool(given["force"]))
    began = time.perf_counter()
    with Progress("reshard", sum(map(nbytes, manifest.tensors.values()))) as progress:
        if ranks is None:
            sizes = [to_one_file(source, manifest, target, progress.add)]
        else:
            sizes = to_files(source, manifest, target, int(ranks), progress.add)
    seconds = time.perf_counter() - began
    span = f" of {wording.size(min(sizes))} to {wording.size(max(sizes))}" if len(sizes) > 1 else ""
    for note in source.notes:
        print(f"passed over: {note}")
    print(f"{show(source)} -> {show(named)}")
    tensors = wording.count(len(manifest.tensors), "tensor")
    print(f"{tensors} in {wording.count(len(sizes), 'file')}{span}; {wording.speed(sum(sizes), seconds)}")
    return SAME


# --------------------------------------------------------------------------------------------------------------- common


def _there(text: str) -> Path:
    path = Path(text)
    if not os.path.lexists(path):
        raise CheckpointError(f"{show(text)}: there is no such file or folder (looked from {os.getcwd()}).")
    return path


def _is_foreign(path: Path) -> bool:
    return not path.is_dir() and onefile.read_head(path) is None


def _patterns(given: Given) -> list[str]:
    return [str(given["tensors"])] if given["tensors"] is not None else []


def _tell(given: Given, text: Callable[[], str], as_json: Callable[[], object]) -> None:
    print(json.dumps(as_json(), indent=1) if given["json"] else text())


TOOLS: Mapping[str, Tool] = {
    "inspect": Tool(
        ("inspect PATH [options]",),
        "What is in a run, a checkpoint or an HDF5 file, as far as its index tells; no value is read.",
        (1, 1),
        (_TENSORS, _JSON),
        _inspect,
    ),
    "verify": Tool(
        ("verify PATH [options]",),
        "Read all of a checkpoint, or of each of a run's, and compare every byte with its sums.\n"
        "Exit code 1: something is damaged; each file and tensor that is, is named.",
        (1, 1),
        (_JSON,),
        _verify,
    ),
    "diff": Tool(
        ("diff A B [options]",),
        "What two checkpoints hold that is not the same, whatever the layouts in which they were saved.\n"
        "Exit code 1: they are different; 2: one of them cannot be read.",
        (2, 2),
        (_TENSORS, _TOLERANCE, _JSON),
        _diff,
    ),
    "reshard": Tool(
        ("reshard SRC DST --ranks N [options]", "reshard SRC --one-file OUT.h5 [options]"),
        "Write a checkpoint anew, over N files of nearly equal size, or as one file that any HDF5 tool reads.",
        (1, 2),
        (_RANKS, _ONE_FILE, _WEIGHTS, _FORCE),
        _reshard,
    ),
}


def _overview(tools: Mapping[str, Tool]) -> str:
    lines = [
        f"{'usage: ' if not number else '       '}mpitrain checkpoint {usage}"
        for number, usage in enumerate(usage for tool in tools.values() for usage in tool.usage)
    ]
    lines += [
        "",
        "PATH, A, B and SRC are a checkpoint (RUN/checkpoints/step-00000100), a run, whose newest one is meant, or a",
        "file that reshard --one-file wrote; inspect also takes an HDF5 file of another program.",
    ]
    for word, tool in tools.items():
        first, *rest = tool.help.splitlines()
        lines += ["", f"{word:<9} {first}", *(f"{'':<9} {line}" for line in rest)]
    return "\n".join([*lines, "", "mpitrain checkpoint WORD --help lists the options of a word."])


def _help(tool: Tool) -> str:
    head = "\n".join(
        f"{'       ' if n else 'usage: '}mpitrain checkpoint {usage}" for n, usage in enumerate(tool.usage)
    )
    return help_text(f"{head}\n\n{tool.help}\n", {option.name: option for option in tool.options}, {})
