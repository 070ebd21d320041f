"""The command line of `mpitrain trace`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.comm.launcher import announced
from mpitrain.debug.trace.files import read
from mpitrain.debug.trace.page.html import write_page
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.metrics import read_metrics
from mpitrain.options import Interval, Option, help_text, read_flags, show
from mpitrain.trace.findings import findings
from mpitrain.trace.known import Known, know
from mpitrain.trace.perfetto import write_perfetto
from mpitrain.trace.step_report import step_report
from mpitrain.trace.summary import summary
from mpitrain.trace.words import plain, size

LONGEST_TITLE = 48
UNREAD = 128 + signal.SIGPIPE  # as shells have it
_BOLD, _PLAIN = "\033[1m", "\033[0m"

TITLE = """usage: mpitrain trace RUN [options]

Says what the trace of a run shows: where the time of a step went on each rank, who waited for whom, how idle pipelines
were, what was sent over each axis beside what theory predicts, the slowest ops, and who held how much memory.
RUN is the folder of a run that was trained with --trace, or the one that a script gave to tracing()."""

_NONE = "default: none"
OPTIONS = {
    option.name: option
    for option in (
        Option("step", int, None, "one page on this step instead", Interval(0, 2**31), metavar="N", unset=_NONE),
        Option("ranks", str, None, "of that page: 0,5", metavar="LIST", unset="default: all, or 8 that delay most"),
        Option("json", bool, False, "print what the summary says as JSON", off="--no-json"),
        Option("html", str, None, "write a page for a browser, with a timeline", metavar="FILE", unset=_NONE),
        Option("perfetto", str, None, "write what ui.perfetto.dev opens; .gz: packed", metavar="FILE", unset=_NONE),
    )
}
GROUPS = {"step": "On the terminal", "html": "Files"}


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain trace`.

    Args:
        argv: words behind `trace`.

    Returns:
        0; 141 if whoever read the output is gone (`| head`).

    Raises:
        UserError: the command line is wrong, there is no trace, or a file cannot be written.
    """
    try:
        _run(list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return UNREAD
    except OSError as error:
        _drop_output()
        raise ConfigError(f"the output cannot be written: {error.strerror}.") from None
    return 0


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the end


def _say(text: str) -> None:
    """Print, with a question mark for what the output has no sign for."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _run(words: list[str]) -> None:
    if not words or "--help" in words or "-h" in words:
        print(help_text(TITLE, OPTIONS, GROUPS))
        return
    found = announced(os.environ)
    if found is not None and found[1] > 1:
        raise LaunchError(f"mpitrain trace is one process: run it without mpirun ({found[0]}={found[1]}).")
    folder = words.pop(0)
    if folder.startswith("-"):
        raise ConfigError(f"mpitrain trace {show(folder)}: the folder of the run comes first; --help says more.")
    flags = read_flags(words, OPTIONS.values())
    step, ranks, as_json = flags.get("step"), flags.get("ranks"), bool(flags.get("json"))
    if as_json and step is not None:
        raise ConfigError("--json is of the summary, --step prints one step as text; give one of them.")
    if ranks is not None and step is None:
        raise ConfigError("--ranks chooses ranks of --step N; give both.")
    of_step = None if ranks is None else _numbers(str(ranks))
    for flag in ("html", "perfetto"):
        if flag in flags:
            _refuse_what_is_no_file(flag, str(flags[flag]))
    title = plain(folder, LONGEST_TITLE)
    known = know(read(Path(folder)))
    if step is not None:
        _say(step_report(known, title, int(step), of_step, _mark))
    if "html" in flags:
        _page(known, str(flags["html"]), title)
    if "perfetto" in flags:
        path = str(flags["perfetto"])
        nbytes = write_perfetto(known, path)
        _say(f"{show(path)}: {size(nbytes)}; open it at https://ui.perfetto.dev, which sends it nowhere.")
    if as_json:
        print(json.dumps(findings(known, title).as_json(), indent=1, allow_nan=False))
    elif step is None and not {"html", "perfetto"} & set(flags):
        _say(summary(findings(known, title), _mark))


def _refuse_what_is_no_file(flag: str, path: str) -> None:
    """A file takes the place of what has its name, and must not that of a device, or of a link as /dev/stdout."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise ConfigError(f"--{flag} {show(path)}: is there and is no file; name one that may be written anew.")


def _page(known: Known, path: str, title: str) -> None:
    written = write_page(Path(path), known.trace, known.clocks, _curve(known.trace.folder), title=title)
    left_out = f"; {written.left_out}" if written.left_out else ""
    _say(f"{show(path)}: {size(written.nbytes)}, open it in a browser{left_out}.")


def _curve(folder: Path) -> list[dict[str, object]]:
    """What the run measured, if the trace is in the folder of a run."""
    try:
        return list(read_metrics(folder.parent / "metrics.jsonl"))
    except OSError:
        return []


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and len(word) < 8 for word in words):
        raise ConfigError(f"--ranks {show(text)}: must be numbers of ranks, parted by commas: 0,5.")
    return [int(word) for word in words]


def _mark(text: str) -> str:
    """A heading, bold where somebody looks."""
    looks = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    return f"{_BOLD}{text}{_PLAIN}" if looks else text
