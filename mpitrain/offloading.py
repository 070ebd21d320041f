"""From settings to what a rank has elsewhere: the plan, made before the first step, and the store that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.together import together
from mpitrain.config import Config
from mpitrain.config_rules import memory_size, unfit_for_offload
from mpitrain.errors import UserError
from mpitrain.memory.home import Home
from mpitrain.memory.offload import Offload, region_of
from mpitrain.memory.policy import Policy
from mpitrain.memory.store import Region, Store, open_store
from mpitrain.pipeline.action import Schedule
from mpitrain.plan.memory.offload import (
    ACTIVATIONS,
    CHOICES,
    OPTIMIZER,
    PARAMETERS,
    Plan,
    elsewhere,
    of_ranks,
    within,
)
from mpitrain.plan.memory.pending import pending_gradients
from mpitrain.plan.traffic import Step

MIB = 2**20
KINDS = {"adamw": ("first_moment", "second_moment"), "sgd": ("velocity",)}
"""What optimizers keep of each weight."""


class Elsewhere(NamedTuple):
    """What a rank has elsewhere.

    plan: what, and in which pieces; home: where it lives; step: from which the plan was made.
    """

    plan: Plan
    home: Home
    step: Step

    def policy(self, inner: Policy | None) -> Policy | None:
        """The policy for tapes, around another one."""
        if ACTIVATIONS not in self.plan.what:
            return inner
        plan = self.plan
        return Offload(
            self.home.store,
            slots=plan.slots,
            slot_bytes=plan.slot_bytes,
            group=plan.group,
            distance=plan.distance,
            inner=inner,
        )

    @property
    def fetch_distance(self) -> int | None:
        """How many actions ahead FETCH stands; None: there is none."""
        return self.plan.distance if ACTIVATIONS in self.plan.what else None


def build_elsewhere(config: Config, step: Step, rows: Schedule, mesh: Mesh, like: Array) -> Elsewhere | None:
    """What the settings say is elsewhere; None: nothing.  Collective over the world.

    Args:
        config: the settings.
        step: a step as this rank sees it.
        rows: the schedule, nothing of it offloaded.
        mesh: the layout.
        like: an array as the model has them.

    Raises:
        ConfigError: the budget cannot be kept; on every rank.
    """
    asked = config.offloads
    if not asked and config.memory_budget is None:
        return None
    besides = partial(pending_gradients, config=config)
    if config.memory_budget is None:
        found = of_ranks(step, rows, asked or (), config.prefetch, besides)
    else:
        choices = CHOICES if asked is None else [asked]
        allowed = [choice for choice in choices if not any(unfit_for_offload(config, choice))]
        budget = memory_size(config.memory_budget)
        kinds = (OPTIMIZER, ACTIVATIONS, PARAMETERS)
        fit = [name for name in kinds if not any(unfit_for_offload(config, frozenset((name,))))]

        def most(total: int) -> int:
            return max(mesh.world.exchange(total))

        found = within(step, rows, budget, allowed, config.prefetch, most, besides, fit)
    plans = mesh.world.exchange([sorted(found.what), found.distance])  # the sizes of pieces are a rank's own business
    assert all(plan == plans[0] for plan in plans), plans
    if not found.what:
        return Elsewhere(found, Home(_refused), step)

    def open(regions: Sequence[Region]) -> Store:
        made: list[Store] = []
        mine = {"like": like, "rank": mesh.world.rank, "pending": found.pending}
        try:
            together(mesh.world, lambda: made.append(open_store(config.offload_to, regions, **mine)))
        except UserError:  # perhaps of another rank
            for store in made:
                store.close()
            raise
        return made[0]

    home = Home(
        open,
        kinds=KINDS[config.optimizer] if OPTIMIZER in found.what and _keeps_state(config) else (),
        masters=OPTIMIZER in found.what,
        others=[region_of(found.slots, found.slot_bytes)] if ACTIVATIONS in found.what else [],
    )
    return Elsewhere(found, home, step)


def _refused(regions: Sequence[Region]) -> Store:
    raise AssertionError("nothing is offloaded")


def _keeps_state(config: Config) -> bool:
    return config.optimizer != "sgd" or config.momentum > 0


def describe(found: Elsewhere, config: Config) -> str:
    """The plan in words, for the start block."""
    plan = found.plan
    most = ", ".join(f"{name} {nbytes / MIB:,.1f}" for name, nbytes in plan.here.items())
    budget = "" if config.memory_budget is None else f", budget {memory_size(config.memory_budget) / MIB:,.1f}"
    if not plan.what:
        return f"nothing: at most {plan.total / MIB:,.1f} MiB a rank ({most}){budget}"
    where = config.offload_to if config.offload_to != "host" else "host memory"
    pieces = [f"fetched {plan.distance} ahead"] if plan.distance else ["fetched when it is needed"]
    pieces += [f"groups of {plan.group / MIB:,.2f} MiB"] if ACTIVATIONS in plan.what else []
    pieces += [f"windows of {plan.window:,}"] if plan.what & {OPTIMIZER, PARAMETERS} else []
    return (
        f"{', '.join(sorted(plan.what))} to {where}, {elsewhere(found.step, plan) / MIB:,.1f} MiB a rank, "
        f"{', '.join(pieces)}; here at most {plan.total / MIB:,.1f} MiB ({most}){budget}"
    )
