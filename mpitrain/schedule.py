"""`mpitrain schedule`: print, draw and check a pipeline schedule, without a model and without ranks.

A schedule is read from its name or from a text file with one rank's actions a line.  Either way it is completed by the
same passes, proved by the same checker and timed by the same simulator as the schedule of a training run.
"""

from __future__ import annotations

import re
import signal

from mpitrain.options import Interval, Option

UNREAD = 128 + signal.SIGPIPE  # as shells have it
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
AROUND = ("LOAD", "COUNT", "REDUCE", "STEP")

_MAX_FILE = 4 << 20  # bytes; 64 ranks with 1,000 micro-batches each are 1 MiB
_MOST_WORK = 300_000  # Fs of all ranks; some seconds of simulation
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(|KiB|MiB|GiB)")
_SCALES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

TITLE = """usage: mpitrain schedule NAME [options]
       mpitrain schedule --file FILE [options]
       mpitrain schedule

Prints a pipeline schedule as a table of time, with its makespan, bubble, peak memory in flight, and whether it would
hang if sends were blocking.  With --file it checks one of yours: a line for each rank, its actions parted by spaces,
# begins a comment; messages and updates are added unless the file has some of its own.  Exit code 2: it cannot run.

"""

OPTIONS = {
    option.name: option
    for option in (
        Option("stages", int, 4, "ranks of the pipeline", Interval(1, 1024), metavar="P"),
        Option("microbatches", int, 8, "of a batch", Interval(1, 100_000), metavar="M"),
        Option("chunks", int, None, "stages of each rank", Interval(1, 64), metavar="V", unset="default"),
        Option("slices", int, None, "of each sequence", Interval(1, 1024), metavar="N", unset="default"),
        Option("batches", int, None, "of a row without flush", Interval(1, 10_000), metavar="N", unset="default"),
        Option("file", str, None, "a schedule of yours; - reads standard input", metavar="FILE", unset="default: none"),
        Option("costs", str, "f=1,b=1,w=1", "times; of each stage: f=1:1:2:1; message=0.1 for messages", metavar="C"),
        Option("bytes", str, None, "sizes by stage: saved=40MiB,kept=16MiB,boundary=2MiB", metavar="S", unset="none"),
        Option("width", int, None, "of a line", Interval(20, 10**6), metavar="N", unset="default: the terminal's"),
        Option("rows", bool, False, "print the rows alone, in the form that --file reads", off="--no-rows"),
        Option("compute", bool, False, "print F, B and W of the rows alone", off="--no-compute"),
        Option("svg", str, None, "write a picture", metavar="FILE", unset="default: none"),
        Option("arrows", bool, False, "draw messages into the picture", off="--no-arrows"),
    )
}
