"""Weights that parts of different stages share: the first and the last stage may, as a table that is the head too.

Each of the two holds the weight, in a part of its own, and the gradients of both are summed over the two ends
(`{"ends": REPLICATE}` in its spec).  A weight that any other two stages hold would be two weights of one name, which
learn apart.  On one rank parts share whatever they like: they hold the same `Parameter`.

The first stages may be frozen, all of them that come before the first weight which is trained: backward ends there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.nn.freezing import first_stage, lowest_trained
from mpitrain.nn.module import Module


def compare_stages(model: Module, mesh: Mesh) -> None:
    """Find out at which stage backward ends, and refuse weights that stages share which cannot.

    Collective over the world.

    Args:
        model: its `trains_from` is set.
        mesh: the layout.

    Raises:
        ConfigError: all weights are frozen, or one is on other stages than it may be; the same on every rank.

    Cost: one small message; nothing where pp has one rank.
    """
    mine = [lowest_trained(model), any(p.frozen for p in model.parameters())]
    if mesh.pp.size == 1:
        model.trains_from = first_stage([mine])
        return
    speaks = all(index == 0 or axis == "pp" for axis, index in mesh.coords.items())
    names = {_key(p.name): p.name for p in model.parameters()} if speaks else {}
    tied = {_key(p.name) for p in model.parameters() if p.spec.tied} if speaks else set()
    found = mesh.world.exchange([mesh.pp.rank, [[key, key in tied] for key in names], mine])
    model.trains_from = first_stage([told for _, _, told in found])
    holders: dict[str, list[int]] = {}
    promised: set[str] = set()
    for rank, told, _ in found:
        for key, is_tied in told:
            holders.setdefault(key, []).append(rank)
            promised |= {key} if is_tied else set()
    ends = [0, (model.num_stages - 1) % mesh.pp.size]
    wrong = [key for key, ranks in holders.items() if _is_wrong(sorted(ranks), key in promised, ends)]
    if not wrong:
        return
    name = next(filter(None, mesh.world.exchange(names.get(wrong[0], ""))), "")
    raise ConfigError(_why(name, sorted(holders[wrong[0]]), wrong[0] in promised))


def _is_wrong(ranks: list[int], tied: bool, ends: list[int]) -> bool:
    return ranks != ends if tied else len(ranks) > 1


def _why(name: str, ranks: Sequence[int], tied: bool) -> str:
    here = f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} of axis pp"
    if tied:
        return (
            f'{name} is tied over the ends of the pipeline, {{"ends": REPLICATE}}, but {here} hold'
            f"{'s' * (len(ranks) < 2)} it.\n"
            "The first and the last stage each need a part that holds it, and no other stage does."
        )
    return (
        f"{name} is held by {here}: two stages of a pipeline would train a weight each.\n"
        'Only the first and the last stage can share one: Parameter(..., {"ends": REPLICATE}) in a part of each.\n'
        "Or keep the parts that share it in one stage."
    )


def _key(name: str) -> str:
    """Stands for a name, in a message that is short."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
