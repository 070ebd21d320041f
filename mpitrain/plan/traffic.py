"""Bytes that a rank sends in a step of training a GPT, predicted: every message has a line and every line a formula.

    print(traffic(Step(GPTConfig(...), batch=8, dp=2, tp=2)).table())

The same lines can be measured: a `debug.ledger.Ledger` adds up what a rank sent by place in the model, and `cause_of`
says for which of these causes a place sends.  The two agree to the byte.

Letters are those of the papers: L layers, h width, s tokens of a sequence that a rank holds, b sequences of a
micro-batch, m micro-batches; d, c, t ranks on dp, cp, tp; beta bytes of an element.  By the algorithm that sends least,
a call of payload S sends

    all_reduce  2 (n-1)/n S      reduce_scatter, all_gather, all_to_all  (n-1)/n S      send, shift  S

where S is the larger side: the array to be scattered, the array that was gathered.

Sources: tensor parallelism: Shoeybi et al. 2019, arXiv:1909.08053, section 3; sequence parallelism: Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2; ring attention: Liu et al. 2023, arXiv:2310.01889; Ulysses: Jacobs et al. 2023,
arXiv:2309.14509; two rings: Li et al. 2021, arXiv:2105.13120, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.blocks import wide
from mpitrain.models.gpt import GPTConfig
from mpitrain.parallel.context import KINDS
from mpitrain.spec import cut

FACTOR: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
    "shift": lambda n: Fraction(1),
}
"""Bytes that a rank of n sends for each byte of the payload."""

DATA, DATA_AND_TP = "dp+cp", "dp+cp+tp"
"""The axes over whose merge gradients are summed: of most parameters, and of those that are Replicate on tp as well."""


@dataclass(frozen=True)
class Step:
    """A step of training, seen from one rank.

    Attributes:
        sizes: of the model; sequences are as long as it allows.
        batch: sequences of the global batch.
        microbatches: parts in which a rank works on its share of them.
        dtype: of weights, activations and gradients.
        dp: ranks over which the batch is divided.
        tp: ranks over which layers and vocabulary are cut.
        cp: ranks over which each sequence is cut.
        sequence_parallel: the stream between tensor-parallel regions is cut over tp, along the sequence.
        cp_attention: ring, ulysses or rsa.
        tp_rank: which rank of tp; where the vocabulary does not divide, the last ones hold less of it.

    Raises:
        ConfigError: sizes do not divide, or there is no such attention.
    """

    sizes: GPTConfig
    batch: int
    microbatches: int = 1
    dtype: Any = np.float32
    dp: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    cp_attention: str = "ring"
    tp_rank: int = 0

    def __post_init__(self) -> None:
        sizes, groups = self.sizes, self.sizes.groups
        fewer, more = sorted((groups, self.tp))
        for what, amount, parts, why in (
            ("batch", self.batch, self.dp * self.microbatches, "dp x micro-batches"),
            ("seq_len", sizes.seq_len, self.cp * (self.tp if self.is_cut else 1), "parts of a sequence"),
            ("width", sizes.width, sizes.heads, "heads"),
            ("heads", sizes.heads, groups, "heads of keys and values"),
            ("heads", sizes.heads, self.tp, "ranks of tp"),
            ("tp and heads of keys and values: the larger,", more, fewer, "the smaller"),
        ):
            if parts < 1 or amount < 1 or amount % parts:
                raise ConfigError(f"{what} {amount} is not divisible by {parts} ({why})")
        if self.cp_attention not in KINDS:
            raise ConfigError(f"context attention {self.cp_attention!r} is not known; known: {', '.join(KINDS)}")

    # The letters of the formulas.

    @property
    def b(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // (self.dp * self.microbatches)

    @property
    def s(self) -> int:
        """Tokens of a sequence that a rank holds."""
        return self.sizes.seq_len // self.cp

    @property
    def beta(self) -> int:
        """Bytes of an element of the stream, a weight or a gradient."""
        return int(np.dtype(self.dtype).itemsize)

    @property
    def beta_wide(self) -> int:
        """Bytes of a number in which sums are taken: at least four."""
        return int(np.dtype(wide(np.dtype(self.dtype))).itemsize)

    @property
    def h(self) -> int:
        """Width of the queries of this rank's heads."""
        return self.sizes.width // self.tp

    @property
    def h_kv(self) -> int:
        """Width of the keys that this rank holds, at least one head; of the values, too."""
        return max(1, self.sizes.groups // self.tp) * (self.sizes.width // self.sizes.heads)

    @property
    def is_cut(self) -> bool:
        """Whether the stream is cut over tp, which it is not over one rank."""
        return self.sequence_parallel and self.tp > 1


class Line(NamedTuple):
    """Messages of one kind, of one rank and step.

    axis: over which; cause: why; verb: which; n: ranks on the axis; calls: how many; payload: bytes of each.
    """

    axis: str
    cause: str
    verb: str
    n: int
    calls: int
    payload: int

    @property
    def sent(self) -> Fraction:
        """Bytes that this rank sends."""
        return self.calls * self.payload * FACTOR[self.verb](self.n)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step.

    Attributes:
        lines: one for each kind of message, those that nobody sends left out.
    """

    lines: tuple[Line, ...]

    def total(self, axis: str | None = None, cause: str | None = None) -> int:
        """Bytes, over one axis or all, for one cause or all."""
        return round(sum(line.sent for line in self.lines if axis in (None, line.axis) and cause in (None, line.cause)))

    def sums(self) -> dict[tuple[str, str, str], tuple[int, Fraction]]:
        """(axis, cause, verb) -> (calls, bytes), the most bytes first."""
        found: dict[tuple[str, str, str], tuple[int, Fraction]] = {}
        for line in self.lines:
            calls, sent = found.get(line[:3], (0, Fraction(0)))
            found[line[:3]] = calls + line.calls, sent + line.sent
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def table(self) -> str:
        """The sums as text."""
        text = [f"{self.total():,} bytes a rank and step", ""]
        rows = [("bytes", "calls", "axis", "cause", "verb")]
        rows += [(f"{round(sent):,}", f"{calls:,}", *names) for names, (calls, sent) in self.sums().items()]
        w = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text += [
            f"  {x:>{w[0]}}  {n:>{w[1]}}  {axis:{w[2]}}  {cause:{w[3]}}  {verb}" for x, n, axis, cause, verb in rows
        ]
        return "\n".join(text if self.lines else text[:1])

    def __str__(self) -> str:
        """`2.3 MB a rank and step: tp 1.5 MB, dp+cp 0.8 MB`, for a start block."""
        axes = sorted({line.axis for line in self.lines}, key=lambda axis: -self.total(axis))
        large = [axis for axis in axes if self.total(axis) * 1000 >= self.total()]
        parts = ", ".join(f"{axis} {_short(self.total(axis))}" for axis in large)
        return f"{_short(self.total())} a rank and step" + (f": {parts}" if len(large) > 1 else "")


def _short(nbytes: int) -> str:
    """Three digits and a unit of 1000."""
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if amount >= 99.5 or units[0] == "bytes" else f"{amount:.3g} {units[0]}"


def traffic(step: Step) -> Traffic:
    """Every message that one rank sends in one step.

    Gradients are taken to leave in one message for each set of axes; a reducer with buckets sends the same bytes in
    more calls.
    """
    parts = (tensor_parallel, context_parallel, gradients, agreements)
    return Traffic(tuple(line for part in parts for line in part(step) if line.n > 1 and line.calls))


# ------------------------------------------------------------------------------------------------ inside of the model


def tensor_parallel(step: Step) -> Iterator[Line]:
    """The messages over tp.

    A layer has two regions, and each is entered and left: 2 all-reduces of the stream forward and 2 backward; with
    sequence parallelism each is an all-gather and a reduce-scatter instead, which send the same.  The embedding is left
    (forward), the head is entered (backward), and three numbers a token make the loss: the maximum first, then two sums
    in one message.

        layers          m L 8 (t-1)/t beta b s h
        embedding       m   2 (t-1)/t beta b s h
        head            m   2 (t-1)/t beta b s h
        cross-entropy   m 3 2 (t-1)/t beta_wide b s
    """
    t, m, tokens = step.tp, step.microbatches, step.b * step.s
    for cause, passages in (("layers", 4 * step.sizes.layers), ("embedding", 1), ("head", 1)):
        for verb in ("all_gather", "reduce_scatter") if step.is_cut else ("all_reduce",):
            yield Line("tp", cause, verb, t, m * passages, step.beta * tokens * step.sizes.width)
    yield Line("tp", "cross-entropy", "all_reduce", t, m, step.beta_wide * tokens)
    yield Line("tp", "cross-entropy", "all_reduce", t, m, step.beta_wide * tokens * 2)


def context_parallel(step: Step) -> Iterator[Line]:
    """The messages of attention over cp; s is s/c of the whole sequence, h and h_kv those of this rank's heads.

    ring      keys and values go around forward and again backward, and their gradients in one hop more, which brings
              them home                     m L [4 (c-1) beta + 2 c beta_wide] b s h_kv
    ulysses   queries, keys and values change from tokens to heads, and the result back; both ways
                                            m L 2 (c-1)/c beta b s (2 h + 2 h_kv)
    rsa       keys go around, values go around; both ways; the summands of the gradients are reduced and scattered
                                            m L [4 (c-1) beta + 2 (c-1) beta_wide] b s h_kv
    """
    c, times = step.cp, step.microbatches * step.sizes.layers
    tokens = step.b * step.s
    keys_and_values = tokens * 2 * step.h_kv
    match step.cp_attention:
        case "ring":
            yield Line("cp", "attention", "send", c, times * 2 * (c - 1), step.beta * keys_and_values)
            yield Line("cp", "attention", "send", c, times * c, step.beta_wide * keys_and_values)
        case "ulysses":
            yield Line("cp", "attention", "all_to_all", c, times * 2, step.beta * (tokens * step.h + keys_and_values))
            yield Line("cp", "attention", "all_to_all", c, times * 2, step.beta * tokens * step.h)
        case "rsa":
            yield Line("cp", "attention", "shift", c, times * 4 * (c - 1), step.beta * tokens * step.h_kv)
            yield Line("cp", "attention", "reduce_scatter", c, times * 2, step.beta_wide * c * tokens * step.h_kv)


# ----------------------------------------------------------------------------------------------------------- at its end


def gradients(step: Step) -> Iterator[Line]:
    """The sums of gradients, once a step whatever m is: each over the merge of all axes where a parameter is Replicate.

    dp and cp            2 (d c - 1)/(d c)         beta x parameters that are not Replicate on tp
    dp and cp and tp     2 (d c t - 1)/(d c t)     beta x parameters that are
    """
    d, c, t = step.dp, step.cp, step.tp
    here, shared = parameters(step)
    yield Line(DATA, "gradients", "all_reduce", d * c, 1, step.beta * here)
    yield Line(DATA_AND_TP, "gradients", "all_reduce", d * c * t, 1 if shared else 0, step.beta * shared)


def parameters(step: Step) -> tuple[int, int]:
    """Elements of the parameters that a rank holds: (of those that are not Replicate on tp, of those that are).

    The vocabulary is cut over tp, the matrices of a layer, and the biases of those that are cut by columns.  What lies
    between two regions is not: 6 h a layer of norms and biases, 2 h of the last norm, the positions; with sequence
    parallelism each rank uses it for its own tokens.  Nor are the projections of keys and values where there are fewer
    such heads than ranks of tp: each rank uses the columns of one head.
    """
    sizes, t = step.sizes, step.tp
    h, layers = sizes.width, sizes.layers
    first, stop = cut(sizes.vocab, t, step.tp_rank)
    vocabulary = (stop - first) * h * (1 if sizes.tied else 2)
    matrices = layers * (10 * h * h + 5 * h) // t
    keys_and_values = layers * 2 * (h + 1) * sizes.groups * (h // sizes.heads)
    between = layers * 6 * h + 2 * h + sizes.seq_len * h
    here, shared = vocabulary + matrices, 0
    if t <= sizes.groups:
        here += keys_and_values // t
    else:
        shared += keys_and_values
    if step.is_cut:
        shared += between
    else:
        here += between
    return here, shared


def agreements(step: Step) -> Iterator[Line]:
    """The targets of the step are counted, and the loss and the squared norm of the gradient summed: 8 and 16 bytes."""
    d, c, t = step.dp, step.cp, step.tp
    yield Line(DATA, "count of targets", "all_reduce", d * c, 1, 8)
    yield Line("world", "loss and norm", "all_reduce", d * c * t, 1, 16)


# ------------------------------------------------------------------------------------------------ measured, by the same


def cause_of(axis: str, action: str, path: str, op: str) -> str:
    """The cause for which a message is sent that was heard of at this place.

    Args:
        axis: its name.
        action: what the executor was doing: `F`, `B`, `COUNT`, `REDUCE`, `STEP`.
        path: of the module: `blocks.0.mlp.up`; empty outside of the model.
        op: the innermost; empty outside of ops, as the gradients' buckets that leave during backward.

    Returns:
        As in the lines of `traffic`; "other" for what is none of them.
    """
    if not op:
        return {"COUNT": "count of targets", "STEP": "loss and norm", "REDUCE": "gradients", "B": "gradients"}.get(
            action, "other"
        )
    if axis == "cp":
        return "attention"
    if op.startswith("vocabulary_cross_entropy"):
        return "cross-entropy"
    return {"table": "embedding", "head": "head", "blocks": "layers"}.get(path.partition(".")[0], "other")
