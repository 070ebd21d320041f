"""Learning rates: pure functions of the number of the update, so a resumed run needs no schedule state.

Each rises in a straight line first, peak * (update + 1) / warmup for update = 0 .. warmup - 1, and then

    constant        stays at the peak
    linear          falls in a straight line                 peak (1 - progress)              progress = 0 at warmup,
    cosine          falls along half a cosine                peak (1 + cos(pi progress)) / 2              1 at total
    inverse_sqrt    falls as one over the root of time       peak sqrt(warmup / (update + 1))

Linear and cosine end at `final`; the other two do not know the end of the run.

Paper: warm-up, Goyal et al. 2017, arXiv:1706.02677, section 2.2; linear, Devlin et al. 2018, arXiv:1810.04805, appendix
A.2; cosine, Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5; inverse root, Vaswani et al. 2017, arXiv:1706.03762,
eq. 3, where the peak is d^-0.5 warmup^-0.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Schedule = Callable[[int, int, int, float, float], float]
"""(update, total, warmup, peak, final) -> the rate of this update.

update: counted from 0; total: updates of the whole run; warmup: updates of the rise, 0 begins at the peak; peak: the
largest rate; final: where a schedule that ends ends.
"""


def warmup_updates(warmup: float, total: int) -> int:
    """A warm-up as a number of updates: a value below 1 is a fraction of the total, any other is the number itself.

    Never more than the total.
    """
    assert warmup >= 0, warmup
    return min(total, round(warmup * total) if warmup < 1 else round(warmup))


def constant(update: int, total: int, warmup: int, peak: float, final: float = 0.0) -> float:
    """The peak from the end of the warm-up on, also after the run's end."""
    return _rise(update, warmup, peak) if update < warmup else peak


def linear(update: int, total: int, warmup: int, peak: float, final: float = 0.0) -> float:
    """Fall in a straight line to `final`, which the first update after the run would have."""
    if update >= total:
        return final
    if update < warmup:
        return _rise(update, warmup, peak)
    return final + (peak - final) * (1.0 - _progress(update, total, warmup))


def cosine(update: int, total: int, warmup: int, peak: float, final: float = 0.0) -> float:
    """Fall along half a cosine to `final`, which the first update after the run would have.

    Above 0 for the first and (if `peak` is) the last update.
    """
    if update >= total:
        return final
    if update < warmup:
        return _rise(update, warmup, peak)
    return final + (peak - final) * (1.0 + math.cos(math.pi * _progress(update, total, warmup))) / 2.0


def inverse_sqrt(update: int, total: int, warmup: int, peak: float, final: float = 0.0) -> float:
    """Fall as 1 / sqrt(t), t = update + 1, from the peak that the last update of the warm-up has.

    Without a warm-up the first update has the peak.
    """
    if update < warmup:
        return _rise(update, warmup, peak)
    return peak * math.sqrt(max(1, warmup) / (update + 1))


SCHEDULES: Mapping[str, Schedule] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
}
"""By the name on the command line."""

ENDING = ("linear", "cosine")
"""Schedules that end somewhere: those for which `final` counts."""


def _rise(update: int, warmup: int, peak: float) -> float:
    return peak * (update + 1) / warmup


def _progress(update: int, total: int, warmup: int) -> float:
    return (update - warmup) / (total - warmup)
