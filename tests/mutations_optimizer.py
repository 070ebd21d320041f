"""Bugs that optimizers are known for whose steps depend on whole tensors: the part of `mutations.py` about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mutations import bug, put

from mpitrain.optim import adafactor
from mpitrain.optim.logical import Cut, LogicalSums, Sums


def forgets(*what: str) -> Any:
    """Sums of these kinds are those of the rank's own part."""
    whole = LogicalSums.__call__

    def forgetful(self: LogicalSums, own: Sequence[Sums]) -> list[Sums]:
        found = whole(self, own)
        return [
            {**sums, **{kind: mine[kind] for kind in what if kind in mine}}
            for sums, mine in zip(found, own, strict=True)
        ]

    return put(LogicalSums, "__call__", forgetful)


@bug("a root mean square is of a shard", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    with forgets("tensor"):
        yield


@bug("row sums are of the columns that a rank has", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    with forgets("rows"):
        yield


@bug("column sums are of the rows that a rank has", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    with forgets("columns"):
        yield


@bug("the sum of all rows is of the rows that a rank has", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    with forgets("matrix"):
        yield


@bug("every rank brings the sum of rows that all have", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    of = Cut.of
    with put(
        adafactor, "Cut", type("Cut", (), {"of": staticmethod(lambda p, mesh: replace(of(p, mesh), counts=True))})
    ):
        yield


@bug("the mean over a tensor is taken by the number of elements here", "tp2", "T25.6", optimizer="adafactor", lr=0.02)
def _() -> Iterator[None]:
    update = adafactor.update

    def local(p: Any, g: Any, state: Any, hyper: Any, shape: Any, counts: bool = True) -> Any:
        return update(p, g, state, hyper, p.shape, counts)

    with put(adafactor, "update", local):
        yield
