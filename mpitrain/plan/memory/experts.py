"""What a layer of experts keeps of a micro-batch: of n rows that left this rank, of n' that came to its experts.

    experts    beta (1 + 8/t) h n' of what goes in, of the slope of gelu and of what it gives; beta h n of what comes
               back
    router     beta b s h of its input (with noise beta'), beta' b s E of the probabilities; as much of logits where
               they have a loss
    numbers    8 bytes: of each choice its expert and its place; of each row its token, and twice its order among those
               of other ranks

Letters as in `plan.traffic`.  Source of the layer: Lepikhin et al. 2020, arXiv:2006.16668, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpitrain.plan.memory.saved import HASH, NUMBER, B, Saved, Sizes, W
from mpitrain.plan.traffic.step import Rows, Step
from mpitrain.plan.traffic.way_back import OfBlock


def entry_of_mlp(step: Step, number: int) -> str:
    """Whose input is that of a block's second branch: its only array that is there when the branch is made again."""
    return "router" if step.sizes.has_experts(number) else "gate" if step.sizes.is_gated else "up"


def layer_of_experts(step: Step, of: Sizes, path: str, rows: Rows, back: OfBlock) -> Iterator[Saved]:
    """Of one pass, in the order in which nodes keep it, as far as something goes back through them."""
    assert step.sizes.routing is not None
    if back.router:
        yield from _router(step, of, path, back)
    experts, hidden = f"{path}.experts", step.sizes.units // step.tp
    sent, arrived = rows
    # Where none is dropped, the numbers of one choice a token are the order in which all tokens were sorted.
    is_order = step.choices == 1 and step.sizes.routing.capacity_factor is None and len(step.halves) == 1
    numbers = math.prod(of.tokens) if is_order else sent
    if back.norm2:
        yield Saved(experts, "tokens of rows", (numbers,), NUMBER, "take_rows: where gradients of rows belong")
    if step.ep > 1 and max(step.halves) > 1:  # for three experts by halves a bound: the first needs no order
        for which in ("by expert",) * back.norm2 + ("by rank",) * back.down:
            yield Saved(experts, f"order {which}", (arrived,), NUMBER, "permute_rows: gradients go back that way")
    of_up, of_down = (W if name in back.trained else B for name in ("up", "down"))
    for saved, keeps in (
        (Saved(experts, "input of up", (arrived, of.width), of.dtype, "up: gradient of its weights", of_up), back.up),
        (Saved(experts, "gelu", (arrived, hidden), of.dtype, "gelu: its slope, in the place of its input"), back.up),
        (Saved(experts, "input of down", (arrived, hidden), of.dtype, "down: of its weights", of_down), back.down),
    ):
        if keeps:
            yield of.near(saved)
    if not (back.down or back.router):
        return
    choices = (*of.tokens, step.choices)
    yield Saved(experts, "output of experts", (sent, of.width), of.dtype, "combine: gradient of the weights")
    yield Saved(experts, "places of choices", choices, NUMBER, "combine: which row is whose")
    if step.is_cut or not step.sizes.routing.normalizes:
        yield Saved(experts, "weights of choices", choices, of.wide, "combine: gradient of the output")


def _router(step: Step, of: Sizes, path: str, back: OfBlock) -> Iterator[Saved]:
    """Of each token of the stream, and of the losses."""
    routing = step.sizes.routing
    assert routing is not None
    if routing.jitter and back.norm2:
        yield Saved(f"{path}.router", "noise of router", of.stream, HASH, "jitter: made again of a hash a row")
    entry = (*of.stream, of.width), of.wide if routing.jitter else of.dtype
    if "router" in back.trained:
        yield of.near(Saved(f"{path}.router", "input of router", *entry, "router: gradient of its weight", W))
    experts, choices = (*of.stream, routing.experts), (*of.stream, routing.top_k)
    yield of.near(Saved(path, "probabilities", experts, of.wide, "softmax, and the balance of experts"))
    yield Saved(path, "choices", choices, NUMBER, "gates: which probabilities are meant")
    if routing.normalizes:
        yield Saved(path, "weights of choices", choices, of.wide, "gates: the probabilities over their sum")
        yield Saved(path, "sum of chosen", (*of.stream, 1), of.wide, "gates: that sum")
    rows, tokens = of.stream if step.padded else (step.b, 1)
    if routing.balance_loss:
        yield Saved(path, "shares of experts", (rows, tokens, routing.experts), of.wide, "balance loss: a constant")
    if routing.z_loss:
        yield Saved(path, "logits", experts, of.wide, "z-loss: gradient of their logsumexp")
        logsumexp = Saved(path, "logsumexp", of.stream, of.wide, "z-loss")
        yield logsumexp
        if of.rounds(of.wide):  # else both are one array
            yield of.near(logsumexp._replace(name="factors of squares"))
        yield of.near(Saved(path, "squares of logsumexp", of.stream, of.wide, "z-loss: the mean over tokens"))
        yield Saved(path, "shares of tokens", (rows, tokens), of.wide, "z-loss: a constant")
