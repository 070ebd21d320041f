"""Some ranks write a text; the others, which hold the same weights, wait for them and hear how far they are.

The ranks of one pipeline, tp axis and set of experts write; with zero 3, where each rank holds some rows of the weights
only, all do.  However long it takes, no message waits for as long as its time limit: now and then all ranks meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

from mpitrain.comm.mesh import Mesh
from mpitrain.models.decoder import Decoder
from mpitrain.recording.outside import heard

T = TypeVar("T")

SHARE = 0.1  # of the longest that a message may wait: for about so long ranks that only wait hear nothing
LONGEST = 2.0  # seconds for which they do, and after which all hear that nobody reads any more


def writes(model: Decoder, mesh: Mesh) -> bool:
    """Whether this rank writes."""
    alone = ("pp", "tp", "ep")  # axes along which ranks need one another for every token
    return model.zero == 3 or all(index == 0 for axis, index in mesh.coords.items() if axis not in alone)


def in_turns(
    tokens: Iterator[T],
    length: int,
    mesh: Mesh,
    here: bool,
    timeout: float,
    over: Callable[[], bool] = lambda: False,
    unread: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """What some ranks write, as they write it; nothing on ranks that wait.

    Collective over the world, however many tokens the caller takes on each rank: all take all.

    Args:
        tokens: gives a token each time, or as many as there are texts; asked on ranks that write.
        length: how many times, at most.
        here: whether this rank writes.
        timeout: seconds that a message may wait.
        over: whether no more are wanted, the same on all ranks that write; asked after each token.
        unread: whether this rank wants no more; asked when all ranks meet, and then all of them end.
    """
    done, size, ends = 0, 1, False
    while done < length and not ends:
        began = time.perf_counter()
        for token in islice(tokens, size) if here else ():
            yield token
            if over():
                break
        took = time.perf_counter() - began
        took = heard("seconds of writing", partial(float, took))
        gone = heard("whether a reader has gone", lambda: bool(unread()))
        found = mesh.world.exchange([took, gone or (here and over())])
        slowest, ends = max(each for each, _ in found), any(each for _, each in found)
        done += size
        share = min(SHARE * timeout, LONGEST)
        size = min(length - done, max(1, int(size * share / max(slowest, 1e-9))))
