"""Groups of parameters: another learning rate or weight decay for those whose names match a pattern.

    AdamW(model.parameters(), lr=1e-3, groups=[Group("table.*", lr=0.5), Group("*.bias", lr=2.0)])

A rate is a *factor* on the schedule, so that all groups warm up and fall together.  The first pattern that matches a
name wins; a parameter that none matches has factor 1 and the optimizer's own decay.  Patterns are those of a shell (`*`
any characters, dots too; `?` one; `[ab]` one of these), and letters count as they are written.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import ConfigError
from mpitrain.nn.parameter import Parameter


@dataclass(frozen=True)
class Group:
    """How the parameters are treated whose names match.

    Args:
        pattern: `table.*`, `*.bias`, `blocks.[01].mlp.*`.
        lr: factor on the learning rate; 0 keeps them as they are.
        weight_decay: of all of them, norms and biases too, in place of the optimizer's; None: the optimizer's, for
            those that decay (`Parameter.decay`), which norms and biases do not.

    Raises:
        ConfigError: a factor or a decay that is negative or not finite, or no pattern.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigError("A group of parameters needs a pattern, as table.* or *.bias; it is empty.")
        for what, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Group {self.pattern}: {what} {value} is out of range; allowed: 0 or more.")


class Treatment(NamedTuple):
    """What an update does with a parameter: its weight decay, and the factor on its learning rate."""

    decay: float
    rate: float


def treatments(parameters: Iterable[Parameter], groups: Sequence[Group], weight_decay: float) -> list[Treatment]:
    """The treatment of each parameter: of the first group that matches its name."""
    found = []
    for p in parameters:
        group = _group_of(p.name, groups)
        own = weight_decay if p.decay else 0.0
        if group is None:
            found.append(Treatment(own, 1.0))
        else:
            found.append(Treatment(own if group.weight_decay is None else group.weight_decay, group.lr))
    return found


def check_groups(groups: Sequence[Group], names: Sequence[str], world: Communicator | None) -> None:
    """Refuse a group that no parameter of the whole model is in.

    Args:
        groups: the same on all ranks.
        names: of the parameters on this rank, which may be those of one stage only.
        world: the ranks that hold the model together; None: this rank holds all of it.

    Raises:
        ConfigError: no name matches a pattern, or earlier ones take all that do; the same on all ranks.

    Cost: one small message, and only if there are groups.
    """
    if not groups:
        return
    ranks = [list(names)] if world is None else world.exchange(list(names))
    all_names = list(dict.fromkeys(name for of_rank in ranks for name in of_rank))
    used = {_group_of(name, groups) for name in all_names}
    for number, group in enumerate(groups):
        if group in used and group not in groups[:number]:
            continue
        if any(fnmatchcase(name, group.pattern) for name in all_names):
            raise ConfigError(
                f"Parameter group {group.pattern}: the patterns before it take all that it matches, and the first that"
                " matches wins.  Put it before them, or leave it out."
            )
        near = difflib.get_close_matches(group.pattern, all_names, n=3, cutoff=0.0)
        raise ConfigError(
            f"Parameter group {group.pattern} matches no parameter of the model.\n"
            f"Names look like {', '.join(near)}; * stands for any characters."
        )


def _group_of(name: str, groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)
