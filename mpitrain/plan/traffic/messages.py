"""The formulas: every message that a rank sends in a step has a line here, and every line a formula.

Sources: tensor parallelism: Shoeybi et al. 2019, arXiv:1909.08053, section 3; sequence parallelism: Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2; ring attention: Liu et al. 2023, arXiv:2310.01889; Ulysses: Jacobs et al. 2023,
arXiv:2309.14509; two rings: Li et al. 2021, arXiv:2105.13120, section 3.2; pipelines, several stages a rank and tied
tables: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2 and 3; slices: Li et al. 2021, arXiv:2102.07988; sums of
an optimizer: Shazeer and Stern 2018, arXiv:1804.04235.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.step import Step
from mpitrain.spec import cut

DATA, DATA_AND_TP = "dp+cp", "dp+cp+tp"
"""The axes over whose merge gradients are summed: of most parameters, and of those that are Replicate on tp as well."""


# ------------------------------------------------------------------------------------------------ inside of the model


def tensor_parallel(step: Step) -> Iterator[Line]:
    """The messages over tp; L is the number of layers on this rank.

    A layer has two regions, and each is entered and left: 2 all-reduces of the stream forward and 2 backward; with
    sequence parallelism each is an all-gather and a reduce-scatter instead, which send the same.  The embedding is left
    (forward), the head is entered (backward), and three numbers a token make the loss: the maximum first, then two sums
    in one message.  Slices of a sequence send the same bytes, in as many times more calls.  Of the R layers that run
    forward twice the forward messages are sent twice: 6 all-reduces a layer instead of 4 (half a layer counts half).

        layers          m (8 L + 4 R) (t-1)/t beta b s h
        embedding       m   2 (t-1)/t beta b s h            on the first stage
        head            m   2 (t-1)/t beta b s h            on the last stage
        cross-entropy   m 3 2 (t-1)/t beta_wide b s         on the last stage
    """
    t = step.tp
    verbs = ("all_gather", "reduce_scatter") if step.is_cut else ("all_reduce",)
    for length, times in Counter(step.lengths).items():
        m, tokens = step.microbatches * times, step.b * length
        layers = 4 * step.blocks + step.again("attention") + step.again("mlp")
        for cause, passages, beta in (
            ("layers", layers, step.beta),
            ("embedding", int(step.is_first), step.beta_stream),
            ("head", int(step.is_last), step.beta_stream),
        ):
            for verb in verbs:
                yield Line("tp", cause, verb, t, m * passages, beta * tokens * step.sizes.width)
        for numbers in (1, 2) if step.is_last else ():
            yield Line("tp", "cross-entropy", "all_reduce", t, m, step.beta_wide * tokens * numbers)


def context_parallel(step: Step) -> Iterator[Line]:
    """The messages of attention over cp; s is s/c of the whole sequence, h and h_kv those of this rank's heads.

    What goes forward does so once more in each of R layers that run forward twice.

    ring      keys and values go around forward and again backward, and their gradients in one hop more, which brings
              them home                     m [(4 L + 2 R) (c-1) beta + 2 L c beta_wide] b s h_kv
    ulysses   queries, keys and values change from tokens to heads, and the result back; both ways
                                            m (2 L + R) (c-1)/c beta b s (2 h + 2 h_kv)
    rsa       keys go around, values go around; both ways; the summands of the gradients are reduced and scattered
                                            m [(4 L + 2 R) (c-1) beta + 2 L (c-1) beta_wide] b s h_kv
    """
    c, times = step.cp, step.microbatches * step.blocks
    both_ways = 2 * times + step.microbatches * step.again("attention")  # forward, backward, and forward again
    tokens = step.b * step.s
    keys_and_values = tokens * 2 * step.h_kv
    match step.cp_attention:
        case "ring":
            yield Line("cp", "attention", "send", c, both_ways * (c - 1), step.beta * keys_and_values)
            yield Line("cp", "attention", "send", c, times * c, step.beta_wide * keys_and_values)
        case "ulysses":
            yield Line("cp", "attention", "all_to_all", c, both_ways, step.beta * (tokens * step.h + keys_and_values))
            yield Line("cp", "attention", "all_to_all", c, both_ways, step.beta * tokens * step.h)
        case "rsa":
            yield Line("cp", "attention", "shift", c, 2 * both_ways * (c - 1), step.beta * tokens * step.h_kv)
            yield Line("cp", "attention", "reduce_scatter", c, times * 2, step.beta_wide * c * tokens * step.h_kv)


def pipeline(step: Step) -> Iterator[Line]:
    """The messages between stages: the stream goes to the next one, its gradient to the one before.

    Of the v stages of a rank only the very first has none before it, and only the very last none after it; neighbours
    are on different ranks.  With sequence parallelism a rank of tp sends its part of the stream, to its like.

        in the middle             2 m v beta b s h          / t with sequence parallelism
        first and last rank   (2 v - 1) m beta b s h        so half of it for v = 1

    A receive sends nothing, so who only receives has no line.
    """
    t = step.tp if step.is_cut else 1
    forth, back = step.v - step.is_last, step.v - step.is_first
    for length, times in Counter(step.lengths).items():
        m, stream = step.microbatches * times, step.beta_stream * step.b * length // t * step.sizes.width
        yield Line("pp", "activations", "send", step.pp, m * forth, stream)
        yield Line("pp", "activation gradients", "send", step.pp, m * back, stream)


# ----------------------------------------------------------------------------------------------------------- at its end


def gradients(step: Step) -> Iterator[Line]:
    """The sums of gradients, once a step whatever m is: each over the merge of all axes where a parameter is Replicate.

    dp and cp            2 (d c - 1)/(d c)         beta x parameters that are not Replicate on tp
    dp and cp and tp     2 (d c t - 1)/(d c t)     beta x parameters that are
    ends                 beta x table: 2 (n-1)/n is 1 for the two ends of a pipeline, which both use a tied table

    Parameters are those of this rank's stages.  A rank whose stages hold none sends none; one that holds parameters of
    which tp leaves it no row does send, 0 bytes.  Gradients of halves travel as halves; where branches have scales, all
    that is not in a branch is in full precision, and its gradients go in messages of their own.
    """
    d, c, t = step.dp, step.cp, step.tp
    parts = parameters_by_width(step) if step.scaled else [(step.beta, *parameters(step))]
    for beta, here, shared in parts:
        some = step.blocks > 0 or (step.is_first or (step.is_last and beta == step.beta_stream))
        yield Line(DATA, "gradients", "all_reduce", d * c, int(some and (here > 0 or not step.scaled)), beta * here)
        yield Line(DATA_AND_TP, "gradients", "all_reduce", d * c * t, int(shared > 0), beta * shared)
    if step.sizes.tied and (step.is_first or step.is_last):
        nbytes = step.beta_stream * _words(step) * step.sizes.width
        yield Line("ends", "tied table", "all_reduce", min(step.pp, 2), 1, nbytes)


def parameters_by_width(step: Step) -> list[tuple[int, int, int]]:
    """(bytes of an element, elements as `parameters` counts them): in branches, and outside of them."""
    here, shared = parameters(step)
    outside_here = _vocabulary(step) + (0 if step.is_cut else _between(step))
    outside_shared = _between(step) if step.is_cut else 0
    return [
        (step.beta, here - outside_here, shared - outside_shared),
        (step.beta_wide, outside_here, outside_shared),
    ]


def _vocabulary(step: Step) -> int:
    """Elements of the tables and the head."""
    tables = 1 if step.sizes.tied and step.pp == 1 else step.is_first + step.is_last
    return tables * _words(step) * step.sizes.width


def _between(step: Step) -> int:
    """Elements of what lies between two regions: norms, biases, positions."""
    h = step.sizes.width
    return step.blocks * 6 * h + step.is_last * 2 * h + step.is_first * step.sizes.seq_len * h


def parameters(step: Step) -> tuple[int, int]:
    """Elements of the parameters that a rank holds: (of those that are not Replicate on tp, of those that are).

    The vocabulary is cut over tp, the matrices of a layer, and the biases of those that are cut by columns.  What lies
    between two regions is not: 6 h a layer of norms and biases, 2 h of the last norm, the positions; with sequence
    parallelism each rank uses it for its own tokens.  Nor are the projections of keys and values where there are fewer
    such heads than ranks of tp: each rank uses the columns of one head.

    Table and positions are on the first stage, the last norm and the head on the last; a tied table is on both.
    """
    sizes, t = step.sizes, step.tp
    h, layers = sizes.width, step.blocks
    matrices = layers * (10 * h * h + 5 * h) // t
    keys_and_values = layers * 2 * (h + 1) * sizes.groups * (h // sizes.heads)
    between = _between(step)
    here, shared = _vocabulary(step) + matrices, 0
    if t <= sizes.groups:
        here += keys_and_values // t
    else:
        shared += keys_and_values
    if step.is_cut:
        shared += between
    else:
        here += between
    return here, shared


def _words(step: Step) -> int:
    """Rows of the vocabulary on this rank of tp."""
    first, stop = cut(step.sizes.vocab, step.tp, step.tp_rank)
    return stop - first


def optimizer(step: Step) -> Iterator[Line]:
    """Adafactor's sums over a parameter that is cut over tp: each of two messages gathers the summands of all of them.

    A matrix that is cut by columns brings the sums of its rows, one that is cut by rows those of its columns; either is
    h long in every layer, the table and the head.  With them go two numbers a matrix and one a bias; the second message
    has one a matrix or bias.  With fewer heads of keys and values than queries their projection stands apart, and
    is cut only where each rank has heads of its own.

        first       (t-1) beta_wide [L (4 h + 10) + tables (h + 2)]      5 h + 13 with a projection of its own
        second      (t-1) beta_wide [L 6 + tables]                       8
    """
    sizes, t = step.sizes, step.tp
    apart = sizes.groups != sizes.heads and t <= sizes.groups
    tables = 1 if sizes.tied and step.pp == 1 else step.is_first + step.is_last
    in_layer = (5 * sizes.width + 13, 8) if apart else (4 * sizes.width + 10, 6)
    of_table = sizes.width + 2, 1
    for layer, table in zip(in_layer, of_table, strict=True):
        numbers = step.blocks * layer + tables * table
        calls = int(step.optimizer == "adafactor" and numbers > 0)
        yield Line("tp", "optimizer", "all_gather", t, calls, t * step.beta_wide * numbers)


def count(step: Step) -> Iterator[Line]:
    """The targets of the step are counted: one int64."""
    yield Line(DATA, "count of targets", "all_reduce", step.dp * step.cp, 1, 8)


def agreement(step: Step) -> Iterator[Line]:
    """Loss, squared norm of the gradient, and whether gradients and the optimizer's state are finite: four float64 a
    step, once a row; where branches have scales, whether gradients are is told of each.
    """
    ranks = step.dp * step.cp * step.tp * step.pp
    numbers = 4 + (2 * step.sizes.layers if step.scaled else 0)
    yield Line("world", "loss and norm", "all_reduce", ranks, 1, 8 * numbers * step.row)
