"""The owners of memory: their names, which name is the strongest, and the order in which a table shows them.

weights, masters, gradients, optimizer state   of the model, of one version
constants           that a model makes once of its sizes, as the turns of rotary positions
gathered weights    whole weights of parts that work, or on their way to one, of which ranks keep rows (ZeRO, stage 3)
whole gradients     of which ranks keep rows (ZeRO, from stage 2 on), until they were sent
pending gradients   on their way to the weights for some steps, with a reducer that is late or leaves out a part of them
weight versions     other versions, where a pipeline updates without draining
activations         what nodes saved for backward
recompute scratch   the same on the tapes of second forwards
values              results of ops that only the running code holds
value gradients     the same on the way back
between stages      arrived from a neighbour, or made for one, and not used yet
messages            sends that are not complete, receives that are posted
wire scratch        kept by the door for sums in rank order
batch               tokens of the step
"""

from __future__ import annotations

from collections.abc import Mapping

WEIGHTS, MASTERS, GRADIENTS, STATE = "weights", "masters", "gradients", "optimizer state"
GATHERED, WHOLE, PENDING = "gathered weights", "whole gradients", "pending gradients"
CONSTANTS = "constants"
VERSIONS, BATCH, ACTIVATIONS, SCRATCH = "weight versions", "batch", "activations", "recompute scratch"
ARRIVED, MESSAGES, WIRE, PASSING, BACKWARD = "between stages", "messages", "wire scratch", "values", "value gradients"

CLAIMS = (
    *(PASSING, BACKWARD, MESSAGES, ARRIVED, SCRATCH, ACTIVATIONS, BATCH),
    *(GATHERED, WHOLE, PENDING, VERSIONS, GRADIENTS, STATE, MASTERS, WEIGHTS, CONSTANTS),
)
"""The weakest first: a buffer is under the strongest name that was ever given to it."""
_STRENGTH: Mapping[str, int] = {owner: place for place, owner in enumerate(CLAIMS)}
OWNERS = (
    *(WEIGHTS, MASTERS, GRADIENTS, STATE, GATHERED, WHOLE, PENDING, VERSIONS, ACTIVATIONS, SCRATCH, PASSING),
    *(BACKWARD, ARRIVED, MESSAGES, WIRE, BATCH, CONSTANTS),
)
"""In the order of a table."""


def strength(owner: str) -> int:
    """How strong a claim is; the strongest are names that only the caller knows of."""
    return _STRENGTH.get(owner, len(CLAIMS))
