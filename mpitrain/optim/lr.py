"""Learning rates: pure functions of the number of the update, so a resumed run needs no schedule state.

    warm-up      peak * (update + 1) / warmup                               update = 0 .. warmup - 1
    cosine       peak * (1 + cos(pi * progress)) / 2 down to `final`        progress = 0 at warmup, 1 at total

Paper: warm-up, Goyal et al. 2017, arXiv:1706.02677, section 2.2; cosine, Loshchilov and Hutter 2016, arXiv:1608.03983,
eq. 5.
"""

from __future__ import annotations

import math


def warmup_updates(warmup: float, total: int) -> int:
    """A warm-up as a number of updates: a value below 1 is a fraction of the total, any other is the number itself.

    Never more than the total.
    """
    assert warmup >= 0, warmup
    return min(total, round(warmup * total) if warmup < 1 else round(warmup))


def warmup_cosine(update: int, total: int, warmup: int, peak: float, final: float = 0.0) -> float:
    """Rise in a straight line to `peak`, then fall along half a cosine to `final`.

    Args:
        update: number of the update, counted from 0.
        total: updates of the whole run; from there on the rate is `final`.
        warmup: updates of the rise; 0 begins at the peak.
        peak: the largest rate.
        final: where the cosine ends.

    Returns:
        The learning rate of this update: above 0 for the first and (if `peak` is) the last one.
    """
    if update >= total:
        return final
    if update < warmup:
        return peak * (update + 1) / warmup
    progress = (update - warmup) / (total - warmup)
    return final + (peak - final) * (1.0 + math.cos(math.pi * progress)) / 2.0


def constant(update: int, peak: float, warmup: int = 0) -> float:
    """The peak from the end of the warm-up on."""
    return peak * (update + 1) / warmup if update < warmup else peak
