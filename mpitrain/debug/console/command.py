"""The command line of `mpitrain debug`."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.debug.console.terminal import Line, commands_of, commands_of_file, standard
from mpitrain.errors import ConfigError

USAGE = """usage: mpitrain debug -n RANKS [options] SCRIPT [args]

Runs SCRIPT on RANKS ranks that are threads of this process, and stops before its first line.  Then commands look at
all ranks, and let them go on in lock step; help lists them.  No MPI is needed, and nothing listens on a network.

  -n RANKS           number of ranks
  --commands FILE    commands that come first, a line each; # begins a comment
  -c COMMANDS        the same on the command line, parted by ;  (may be given again)
  --no-history       neither read nor write the history of commands

Where nobody sits at a terminal, the session ends with the commands.  Exit code: that of the script, or of quit CODE;
1 or its own if a rank failed, 2 if a command could not be done, 3 if ranks still stood when the commands were used up,
130 after Ctrl-C."""

MOST_RANKS = 1024


def main(argv: Sequence[str]) -> int:
    """Run `mpitrain debug`.

    Args:
        argv: words behind `debug`.

    Returns:
        The exit code.

    Raises:
        UserError: the command line is wrong, or the file of commands cannot be read.
    """
    words = list(argv)
    count, script, keep = "", list[Line](), True
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        if flag in ("--help", "-h"):
            print(USAGE)
            return 0
        if flag == "--no-history":
            keep = False
            continue
        name, equals, value = flag.partition("=")
        if name not in ("-n", "--commands", "-c"):
            raise ConfigError(f"{flag}: no such option of mpitrain debug; the script's own stand behind the script")
        if not equals:
            if not words:
                raise ConfigError(f"{flag}: a value is missing")
            value = words.pop(0)
        if name == "-n":
            count = value
        else:
            script += commands_of_file(value) if name == "--commands" else commands_of(value, "-c")
    if not words or not count:
        raise ConfigError("usage: mpitrain debug -n RANKS [options] SCRIPT [args]; mpitrain debug --help")
    if not (count.isascii() and count.isdigit() and len(count) < 9 and 1 <= int(count) <= MOST_RANKS):
        raise ConfigError(f"-n {count}: the number of ranks must be a whole number from 1 to {MOST_RANKS}")
    from mpitrain.blas import one_thread
    from mpitrain.debug.console.console import Console

    one_thread()  # as each rank has under mpirun: the same bits in deterministic mode
    with standard(script, keep_history=keep) as terminal:
        return Console(int(count), words[0], words[1:], terminal).run()
