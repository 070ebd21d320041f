"""Bytes that a rank sends in a step of training a decoder: every message has a line and every line a formula.

    print(traffic(Step(GPTConfig(...), batch=8, dp=2, tp=2)).table())

The same lines can be measured: a `debug.ledger.Ledger` adds up what a rank sent by place in the model, and `cause_of`
says for which of these causes a place sends.  The two agree to the byte.

Letters are those of the papers: L layers of a rank, h width, s tokens of a sequence that a rank holds, b sequences of a
micro-batch, m micro-batches, v stages of a rank; d, c, t, p, e ranks on dp, cp, tp, pp, ep; beta bytes of an element;
E experts of a layer, k of a token, C places of each for a sequence.  By the algorithm that sends least, a call of
payload S sends

    all_reduce  2 (n-1)/n S      reduce_scatter, all_gather, all_to_all  (n-1)/n S      send, shift  S

where S is the larger side: the array to be scattered, the array that was gathered.

    step.py      the sizes, as one rank sees them          messages.py    the formulas, with the papers
    slabs.py     the parameters of a rank                  zero.py        gradients and weights of which ranks keep rows
    lines.py     lines, their sums, the text               adafactor.py   sums of an optimizer that sends
                                                           workers.py     what workers send that learn apart
                                                           causes.py      which line a measured message belongs to
"""

from __future__ import annotations

from mpitrain.plan.traffic.adafactor import optimizer
from mpitrain.plan.traffic.causes import cause_of
from mpitrain.plan.traffic.lines import FACTOR, Line, Traffic
from mpitrain.plan.traffic.messages import (
    agreement,
    context_parallel,
    count,
    experts,
    gradients,
    pipeline,
    tensor_parallel,
)
from mpitrain.plan.traffic.slabs import DATA, DATA_AND_TP, EXPERTS, Slab, parameters, slabs
from mpitrain.plan.traffic.step import Rows, Step, Workers
from mpitrain.plan.traffic.workers import between

__all__ = [
    "DATA",
    "DATA_AND_TP",
    "EXPERTS",
    "FACTOR",
    "Line",
    "Rows",
    "Slab",
    "Step",
    "Traffic",
    "Workers",
    "cause_of",
    "parameters",
    "slabs",
    "traffic",
]


def traffic(step: Step) -> Traffic:
    """Every message that one rank sends in one step, or in the steps of a row (`Step.row`), or up to the next average
    of workers that learn apart (`Step.period`).

    Gradients are taken to leave in one message for each set of axes; a reducer with buckets sends the same bytes in
    more calls.  With ZeRO they leave in buckets.

    How many rows go to experts is known when they have gone.  Without `step.expert_rows` it is as many as can: over the
    ranks of ep together a bound.
    """
    parts = (tensor_parallel, context_parallel, experts, pipeline, gradients, optimizer, count)
    lines = [line._replace(calls=step.row * step.period * line.calls) for part in parts for line in part(step)]
    once = [*agreement(step), *(between(step) if step.workers is not None else ())]
    at_most = step.ep > 1 and step.expert_rows is None
    sent = tuple(line for line in (*lines, *once) if line.n > 1 and line.calls)
    return Traffic(sent, step.row * step.period, at_most)
