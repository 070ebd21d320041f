"""What the nodes of a micro-batch keep for backward, array by array: the formula that the memory ledger meets exactly.

Letters as in `plan.traffic`, and a heads and h their width together on this rank of tp; beta bytes of an element, beta'
of a number in which sums are taken.  With t = 1, no dropout and one head of keys to each of queries a block keeps

    16 beta b s h  +  (4 + a) beta' b s            kernels make scores, masks and the slope's input again or not at all

where the paper has 34 b s h + 5 a s^2 b for beta = 2 (paper.py says which tensors differ, and why).  With root-mean-
square norms, keys of a width h_kv together, and an MLP whose H hidden units are gated, it keeps

    beta b s (6 h + 2 h_kv + 3 H)  +  (2 + a) beta' b s

and the cosines and sines of rotary positions are no activations: a rank has them once (state.py).

A layer of experts keeps what its experts keep of the n' rows that have arrived, and of the n that have left what came
back; the rest are small numbers of each token and choice (experts.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd.ops.attention import first_seen
from mpitrain.backend import wide
from mpitrain.kernels.blocks import kept_scores
from mpitrain.nn.freezing import is_frozen
from mpitrain.plan.memory.experts import entry_of_mlp, layer_of_experts
from mpitrain.plan.memory.saved import B_BEFORE, HASH, NUMBER, B, Saved, Sizes, W
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.way_back import OfBlock, way_back
from mpitrain.spec import cut


def embedding(step: Step, part: int) -> Iterator[Saved]:
    """Of the first stage, before the blocks; the ids are the batch's own."""
    if step.packed and not step.sizes.is_rotary and not is_frozen("positions.weight", step.freeze):
        places = step.b, step.lengths[part]
        yield Saved("positions", "places in documents", places, NUMBER, "take: where gradients of positions belong")
    if way_back(step).embedding:
        yield from Sizes(step, part).dropout("drop", "drop")


def block(step: Step, number: int, part: int, micro: int = 0) -> Iterator[Saved]:
    """Of one block, as its nodes keep it; where it is made again as a whole, its inputs alone.

    Of what comes before the first weight that is trained nothing is kept (way_back.py), nor are inputs of products that
    only the gradients of frozen matrices need.
    """
    yield from inputs(step, number, part) if step.is_recomputed(number) else inside(step, number, part, micro)


def inputs(step: Step, number: int, part: int) -> Iterator[Saved]:
    """What a block that runs twice keeps: the stream, and what it takes of the slice before."""
    of, path = Sizes(step, part), f"blocks.{number}"
    if not way_back(step).blocks[number].leaves:
        return
    yield of.again(path, "norm1", of.of_stream)
    yield from _of_slice_before(step, of, path, part)


def _of_slice_before(step: Step, of: Sizes, path: str, part: int) -> Iterator[Saved]:
    if part:
        packed = (step.b, step.lengths[part - 1], step.h + 2 * step.h_kv)
        yield Saved(path, "keys and values of the slice before", packed, of.dtype, "attention of this slice", B_BEFORE)


def inside(step: Step, number: int, part: int, micro: int = 0) -> Iterator[Saved]:
    """What the nodes of a block keep, on their tape or on that of the second forward."""
    of, name = Sizes(step, part), f"blocks.{number}"
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    back = way_back(step).blocks[number]
    if back.norm1:
        yield from of.norm(f"{name}.norm1", "norm1")
    if step.is_recomputed(number, "attention") and not step.is_recomputed(number):
        if back.proj:
            yield of.again(attention, "qkv", of.dtype)
            yield from _of_slice_before(step, of, attention, part)
    else:
        if "qkv" in back.trained:
            yield of.product(attention if _is_grouped(step) else f"{attention}.qkv", "qkv", of.width)
        yield from _attention(step, of, attention, part, back)
        if not back.qkv:
            pass
        elif part == 1 and of.rounds(of.dtype) and not step.is_recomputed(number):  # that one's own was rounded
            yield from _of_slice_before(step, of, attention, part)
    if back.norm2:
        yield from of.dropout(name, "drop1")
        yield from of.norm(name, "norm2")
    if step.is_recomputed(number, "mlp") and not step.is_recomputed(number):
        if back.down or back.router:
            yield of.again(mlp, entry_of_mlp(step, number), of.dtype)
    elif step.sizes.has_experts(number):
        yield from layer_of_experts(step, of, mlp, step.rows_of(number, micro * len(step.lengths) + part), back)
    else:
        yield from _mlp(step, of, mlp, back)
    if back.leaves:
        yield from of.dropout(f"{name}.drop2", "drop2")


def _mlp(step: Step, of: Sizes, path: str, back: OfBlock) -> Iterator[Saved]:
    """Two products and what is between them; with a gate three, of which two have the same input."""
    hidden = step.sizes.units // step.tp
    if step.sizes.is_gated:
        if back.trained & {"gate", "up"}:
            yield of.product(f"{path}.{'gate' if 'gate' in back.trained else 'up'}", "gate", of.width)
        for which in ("gate", "up") if back.up else ():
            made = Saved(path, f"output of {which}", (*of.tokens, hidden), of.dtype, "swiglu: gradient of the other")
            yield of.near(made)
    else:
        if "up" in back.trained:
            yield of.product(f"{path}.up", "up", of.width)
        if back.act:
            slope = Saved(path, "gelu", (*of.tokens, hidden), of.dtype, "gelu: its slope, in the place of its input")
            yield of.near(slope)
    if "down" in back.trained:
        yield of.product(f"{path}.down", "down", hidden)


def _attention(step: Step, of: Sizes, path: str, part: int, back: OfBlock) -> Iterator[Saved]:
    """What attention keeps, and the input of the product after it, which may be one array."""
    *kept, made = _all_of_attention(step, of, path, part)
    trains = "proj" in back.trained
    if back.qkv:
        yield from kept
    if trains and back.qkv:
        yield made
    elif trains:
        yield made._replace(path=f"{path}.proj")
    elif back.qkv and made.path == path:
        yield made._replace(until=B)


def _all_of_attention(step: Step, of: Sizes, path: str, part: int) -> Iterator[Saved]:
    """Queries, keys and values, the result, a number a query; rsa and `none` the weights themselves."""
    (b, length), d = of.tokens, step.sizes.head_width
    c, kind = step.cp, step.cp_attention if step.cp > 1 else ""
    whole = c * length
    heads, kv, queries = step.sizes.heads // step.tp, max(1, step.sizes.groups // step.tp), length
    if kind == "ulysses":
        heads, kv, queries = heads // c, kv // c, whole
    packed = (b, queries, (heads + 2 * kv) * d)
    qkv = Saved(path, "queries, keys, values", packed, of.dtype, "attention: makes the scores again")
    yield of.near(qkv) if part == 0 else qkv  # a later slice's waits with those before it, which it needs exactly
    if step.packed and step.slices is not None:
        shape = b, queries, sum(step.lengths[: part + 1])
        yield Saved(path, "mask of documents", shape, np.dtype(bool), "attention: which keys are of a query's document")
    elif step.packed and kind not in ("ring", "rsa"):  # they have the batch's own numbers, or the weights
        yield Saved(path, "first keys of queries", (b, queries), NUMBER, "attention: where a query's document begins")
    if of.drops:
        yield Saved(path, "mask of attention", (b, heads, queries), HASH, "dropout: made again of a hash a query")
    of_heads = (b, kv, heads // kv)
    if kind == "rsa":
        yield of.near(Saved(path, "softmax", (*of_heads, queries, whole), of.wide, "rsa: whole rows of probabilities"))
    else:
        yield Saved(path, "lse of attention", (*of_heads, queries), of.wide, "attention: a query's sum of exponentials")
    if step.keeps_scores:
        scores = (*of_heads, kept_scores(queries, queries, True, first_seen(step.sizes.window)))
        yield Saved(path, "softmax", scores, of.wide, "attention: the scores of keys that are seen")
    if kind == "ulysses":
        result = (b, queries, heads * d)
        why = "attention: with its gradient, a number a query"
        yield of.near(Saved(path, "output of attention", result, of.dtype, why))
    yield of.product(f"{path}.proj" if kind in ("ulysses", "rsa") else path, "proj", step.h)


def _is_grouped(step: Step) -> bool:
    """Whether queries have a projection of their own, without a module of its own."""
    return step.sizes.groups != step.sizes.heads


def head(step: Step, part: int) -> Iterator[Saved]:
    """Of the last stage, after the blocks: the last norm, the head, the loss; targets are the batch's own."""
    of = Sizes(step, part)
    first, stop = cut(step.sizes.vocab, step.tp, step.tp_rank)
    tokens = math.prod(of.tokens)
    if way_back(step).norm:
        yield from of.norm("norm", "norm")
    if way_back(step).head:
        yield of.near(of.product("head", "head", of.width)._replace(dtype=of.of_stream, bits=None))
    model, kept = step.sizes.family, (*of.tokens, stop - first)
    yield Saved(model, "logits", kept, logits_dtype(step), "loss: their softmax is its gradient")
    if step.tp > 1:
        yield Saved(model, "places of targets", (tokens,), NUMBER, "loss: which targets are among this rank's words")
    yield Saved(model, "lse of the loss", (tokens,), of.wide, "loss: the sum of a row's exponentials")


def logits_dtype(step: Step) -> Any:
    """Scores are made in at least float32."""
    return np.dtype(wide(step.dtype))


def of_stage(step: Step, stage: int, part: int = 0, micro: int = 0) -> list[Saved]:
    """All that a stage keeps of one micro-batch.

    Args:
        step: the sizes and the layout.
        stage: one of `step.stages`.
        part: number of the slice, where sequences are cut into slices.
        micro: of the micro-batch; they differ by the rows that go to experts, where a step says which do.
    """
    parts: list[Iterator[Saved]] = [block(step, number, part, micro) for number in step.blocks_of(stage)]
    if stage == 0:
        parts.insert(0, embedding(step, part))
    if stage == step.last_stage:
        parts.append(head(step, part))
    return [saved for of_part in parts for saved in of_part]


def by_path(saved: Sequence[Saved]) -> dict[str, int]:
    """Bytes of each module."""
    found: dict[str, int] = {}
    for each in saved:
        found[each.path] = found.get(each.path, 0) + each.nbytes
    return {path: nbytes for path, nbytes in found.items() if nbytes}


def total(saved: Iterable[Saved], until: str | None = None) -> int:
    """Bytes of all, or of those that are freed by the same thing."""
    return sum(each.nbytes for each in saved if until in (None, each.until))


def freed(action: str, saved: Sequence[Saved], after: Sequence[Saved], split: bool) -> list[Saved]:
    """What the end of a B or a W frees.

    Args:
        action: B or W.
        saved: what the slice kept.
        after: what the next slice of the micro-batch kept; empty for the last one.
        split: whether a schedule parts the two.
    """
    gone = [each for each in saved if each.until == action or (not split and each.until in (B, W))]
    return gone + [each for each in after if each.until == B_BEFORE]
