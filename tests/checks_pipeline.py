"""Pipelines with data, tensor and context parallelism on eight ranks, as checks that any world can run.

Every layout with every schedule, tied and untied, is the same training run as one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checks_layouts import SIZES, equals_one_rank

from mpitrain.comm.world import World

LAYOUTS = {
    "dp2_tp2_pp2": {"dp": 2, "tp": 2, "pp": 2},
    "pp4_tp2": {"tp": 2, "pp": 4},
    "dp2_pp2_cp2": {"dp": 2, "pp": 2, "cp": 2},
}
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb_h1": {"schedule": "zb-h1"},
}
EIGHT = replace(SIZES, layers=4)


def _check(layout: str, schedule: str, tied: bool) -> Callable[[World], None]:
    def check(world: World) -> None:
        how = {**LAYOUTS[layout], **SCHEDULES[schedule]}
        equals_one_rank(world, sizes=EIGHT, micros=4, batch=8, steps=3, tied=tied, **how)

    check.__name__ = f"{layout}_{schedule}_{'tied' if tied else 'untied'}"
    return check


MORE = [_check(layout, schedule, tied) for layout in LAYOUTS for schedule in SCHEDULES for tied in (False, True)]
"""All of them."""
CHECKS = [
    _check("dp2_tp2_pp2", "interleaved", tied=True),
    _check("pp4_tp2", "1f1b", tied=False),
    _check("pp4_tp2", "zb_h1", tied=True),
    _check("dp2_pp2_cp2", "zb_h1", tied=False),
    _check("dp2_pp2_cp2", "1f1b", tied=True),
]
"""Each layout and each schedule, tied and untied."""
