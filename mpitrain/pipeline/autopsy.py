"""Which value was the first that is not finite, on which rank, and how it came to be.

A step is not finite, and all ranks know it: by the agreement before the update, so no weight has changed.  Masks, order
and sums are pure functions, hence the same step runs once more to the same values, this time with a `Hunter` that looks
at every one.  Then ranks exchange what each saw first, and who *made* what is not finite stands out from those to whom
it came:

    made       all inputs were finite, and the result is not
    message    what came is not finite, though all that ranks gave to it was: a sum too large, or the network
    came       a rank gave it, which has a finding of its own

A hunter that listened all along (`--check`) makes the second run unnecessary.  It is the only way where steps overlap:
there weights have changed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpitrain.comm.communicator import Communicator
from mpitrain.events import LISTENERS
from mpitrain.pipeline.finding import LIMITS, Finding
from mpitrain.pipeline.hunter import SUMS, Hunter


@dataclass(frozen=True)
class Autopsy:
    """What all ranks know of a step that is not finite; the same on every rank.

    Attributes:
        finding: the first value that is not finite; None: everything was finite when the step ran again.
        made: ranks that made such a value of their own, or to which one came that nobody gave.
        reached: ranks to which it came.
    """

    finding: Finding | None
    made: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Two lines: what and where; of which values."""
        found = self.finding
        if found is None:
            return (
                "All values were finite when the same step ran a second time: memory or a processor failed,\n"
                "or the model is not a pure function of weights, batch and step."
            )
        return f"First: {_what(found)}, {_where(found)}.\n{_values(found)}.{self._ranks()}"

    def _ranks(self) -> str:
        assert self.finding is not None
        others = [rank for rank in self.made if rank != self.finding.rank]
        told = [f"{_ranks(others)} made one of {'its' if len(others) == 1 else 'their'} own"] if others else []
        told += [f"it came to {_ranks(self.reached)}"] if self.reached else []
        return "".join(f"  {sentence[0].upper()}{sentence[1:]}." for sentence in told)

    @property
    def way_out(self) -> str:
        """What to do about it, where that is not the learning rate; else ''."""
        if self.finding is None:
            return "look at this machine, or see whether --check finds it live"
        if self.finding.kind == "weight" and self.finding.inputs:
            return "a lower --lr" + (", or --dtype bfloat16" if self.finding.result.dtype == "float16" else "")
        if self.finding.is_undefined:
            place = f" of {self.finding.path}" if self.finding.path else ""
            op = self.finding.op.removesuffix(".backward")
            return f"look at what {op}{place} is given: a root or logarithm of a negative number, or 0 / 0"
        if self.finding.result.dtype == "float16" and self.finding.passed and self.finding.kind != "message":
            return "--dtype bfloat16, or smaller values there (a lower --lr, a longer --warmup)"
        return {
            "data": "look at this batch of the data",
            "weight": "go on from a checkpoint that was saved before",
            "state": "go on from a checkpoint that was saved before",
            "message": "look at the network and the memory of these hosts",
        }.get(self.finding.kind, "")

    @property
    def may_be_of_a_scale(self) -> bool:
        """Whether a lower scale of the gradients may help: they passed a range on their way."""
        found = self.finding
        return found is not None and found.direction in ("backward", "communication") and not found.is_undefined


def autopsy(executor: Any, batches: Sequence[Any]) -> Autopsy | None:
    """Find the first value that is not finite in the step that was just refused.

    Collective over the world: every rank calls it at the same point.  Weights, optimizer state, loss scale and the
    executor's counters stay as they are; gradients are those of the same step again.

    Args:
        executor: the `Executor` whose step it was.
        batches: this rank's batches of the row.

    Returns:
        What was found; None where steps overlap and no hunter listens: the row cannot run again.

    Cost: without a hunter that listens one more step, whose values are all looked at; two small exchanges.
    """
    world = executor.mesh.world
    hunter = next((one for one in LISTENERS.get() if isinstance(one, Hunter)), None)
    if not all(world.exchange(hunter is not None)):
        if executor.versions is not None:
            return None
        hunter = Hunter(executor.model, executor.optimizer, world.rank)
        executor.run_again(batches, hunter)
    assert hunter is not None
    hunter.finish()
    return agree(hunter, world)


def agree(hunter: Hunter, world: Communicator) -> Autopsy:
    """Choose one finding of all ranks.  Collective over the world.

    What was made comes before what came; among several the earliest, by micro-batch, direction and order of the ops,
    then that of the lowest rank.
    """
    told = world.exchange(None if hunter.finding is None else hunter.finding.to_json())
    found = [Finding.from_json(one) for one in told if one is not None]
    messages = sorted({one.message for one in found if one.message})
    answers = world.exchange([hunter.gifts.get(message) for message in messages])
    gifts = {message: [answer[i] for answer in answers if answer[i]] for i, message in enumerate(messages)}
    made = [_overflowed(one, gifts) for one in found if all(finite for finite, _ in gifts.get(one.message, ()))]
    if not found:
        return Autopsy(None)
    first = min(made or found, key=lambda one: (one.order, one.rank))
    causes = {one.rank for one in made if (one.message or None) != first.message}
    return Autopsy(first, tuple(sorted(causes)), tuple(sorted({one.rank for one in found} - causes - {first.rank})))


def _overflowed(found: Finding, gifts: dict[str, list[Any]]) -> Finding:
    """The finding, as one of a sum where what ranks gave to the message may have been too large to be added."""
    if found.kind != "message" or found.verb not in SUMS or found.result.nans:
        return found
    total = sum(largest for _, largest in gifts[found.message])
    return replace(found, kind="sum") if total >= LIMITS.get(found.result.dtype, float("inf")) else found


# -- words ------------------------------------------------------------------------------------------------------------


def _what(found: Finding) -> str:
    """What is not finite, and what made it."""
    place = f" of {found.path}" if found.path else ""
    inside = f" inside {found.op}{place}" if found.op else place
    verb, axis = found.verb, found.axis
    match found.kind:
        case "forward":
            return f"{found.op}{place} made it in forward"
        case "backward" if found.op == "sum of gradients":
            return f"the sum of the gradients of what {found.path or 'the model'} made is not finite, in backward"
        case "backward":
            return f"{found.op}{place} made it in backward"
        case "gradient":
            return f"the gradient of {found.path} is not finite after a {found.op}, in backward"
        case "norm":
            return f"the gradient of {found.path} is finite, the sum of its squares is not"
        case "sum":
            return f"the sum of {verb} over {axis} ({found.site}){inside} passed the range of {found.result.dtype}"
        case "message":
            return f"{verb} over {axis} ({found.site}){inside} brought it, though all that was given to it is finite"
        case "data":
            return f"the batch holds it, in {found.op}{f' at {list(found.at)}' if found.at else ''}"
        case "weight" if found.inputs:
            return f"the weight {found.path}, is not finite before the step, though it is in {found.inputs[0].dtype}"
        case "weight":
            return f"the weight {found.path} was not finite before the step"
        case "state":
            return f"the optimizer's {found.op} of {found.path} was not finite, or negative, before the step"
        case _:
            return f"{found.op}{place} was given it, though no op and no message made it"


def _where(found: Finding) -> str:
    micro = "" if found.micro is None else f", micro-batch {found.micro}"
    action = f" ({found.action})" if found.action else ""
    return f"on rank {found.rank} at step {found.step}{micro}{action}"


def _values(found: Finding) -> str:
    """The ranges, and the end of the dtype where it was passed."""
    limit = "" if found.passed is None else f"; {found.result.dtype} ends at {found.passed:.6g}"
    return f"In: {found.inputs[0]}.  Out: {found.result}{limit}" if found.inputs else f"{found.result}{limit}"


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3 4 5`, or of many how many."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) != 1)} {' '.join(map(str, ranks))}"
