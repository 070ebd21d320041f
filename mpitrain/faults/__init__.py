"""Faults on purpose: one rank is killed, stopped, slowed down or failed at an exact place, to see what the others do.

    --faults "kill rank=1 at=message:all_reduce n=41; slow rank=0 at=action:F seconds=0.2"
    --faults "io rank=1 errno=ENOSPC at=disk:write n=3"
    --faults "random seed=7 faults=2 steps=50 within=40"

A fault strikes once, on its rank, as the n-th event that matches it begins.  What happens then is what would have
happened without this package: the signal is a real one, the exception comes out of the call that the rank was in, the
OSError out of the operation on the disk.

Scripts that know nothing of this are given faults by the environment: MPITRAIN_FAULTS, which `world()` reads.
"""

from __future__ import annotations

from mpitrain.faults.fault import ERRNOS, HOWS, KINDS, Fault, InjectedFault
from mpitrain.faults.injector import DONE, VARIABLE, Injector, begin, injected, remember
from mpitrain.faults.words import DRAWN, parse, plan

__all__ = [
    "DONE",
    "DRAWN",
    "ERRNOS",
    "HOWS",
    "KINDS",
    "VARIABLE",
    "Fault",
    "InjectedFault",
    "Injector",
    "begin",
    "injected",
    "parse",
    "plan",
    "remember",
]
