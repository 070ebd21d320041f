"""The formulas: every message that a rank sends in a step has a line here, and every line a formula.

Sources: tensor parallelism: Shoeybi et al. 2019, arXiv:1909.08053, section 3; sequence parallelism: Korthikanti et al.
2022, arXiv:2205.05198, section 4.2.2; ring attention: Liu et al. 2023, arXiv:2310.01889; Ulysses: Jacobs et al. 2023,
arXiv:2309.14509; two rings: Li et al. 2021, arXiv:2105.13120, section 3.2; pipelines, several stages a rank and tied
tables: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2 and 3; slices: Li et al. 2021, arXiv:2102.07988; experts:
Lepikhin et al. 2020, arXiv:2006.16668, section 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from mpitrain.parallel.expert import counted
from mpitrain.plan.traffic.lines import Line
from mpitrain.plan.traffic.powersgd import factors, over_ends
from mpitrain.plan.traffic.slabs import ATOMS, DATA, beta_of, buffers, merged, shares
from mpitrain.plan.traffic.step import Step
from mpitrain.plan.traffic.way_back import again, runs_twice, trains_from, way_back
from mpitrain.plan.traffic.workers import inside
from mpitrain.plan.traffic.zero import dealt_out

# ------------------------------------------------------------------------------------------------ inside of the model


def tensor_parallel(step: Step) -> Iterator[Line]:
    """The messages over tp; L is the number of layers on this rank.

    A layer has two regions, and each is entered and left: 2 all-reduces of the stream forward and 2 backward; with
    sequence parallelism each is an all-gather and a reduce-scatter instead, which send the same.  The embedding is left
    (forward), the head is entered (backward), and three numbers a token make the loss: the maximum first, then two sums
    in one message.  Slices of a sequence send the same bytes, in as many times more calls.  Of the R layers that run
    forward twice the forward messages are sent twice: 6 all-reduces a layer instead of 4 (half a layer counts half).
    What comes before the first weight that is trained sends forward only (way_back.py).

        layers          m (8 L + 4 R) (t-1)/t beta b s h
        embedding       m   2 (t-1)/t beta b s h            on the first stage
        head            m   2 (t-1)/t beta b s h            on the last stage
        cross-entropy   m 3 2 (t-1)/t beta_wide b s         on the last stage
    """
    t = step.tp
    for length, times in Counter(step.lengths).items():
        m, tokens = step.microbatches * times, step.b * length
        for cause, passages, beta in (
            ("layers", _of_layers(step), step.beta),
            ("embedding", _of_embedding(step), step.beta_stream),
            ("head", _of_head(step), step.beta_stream),
        ):
            for verb, calls in passages.items():
                yield Line("tp", cause, verb, t, m * calls, beta * tokens * step.sizes.width)
        for numbers in (1, 2) if step.is_last else ():
            yield Line("tp", "cross-entropy", "all_reduce", t, m, step.beta_wide * tokens * numbers)


def _of_layers(step: Step) -> dict[str, int]:
    """How often the stream passes from region to region, by verb, in the layers here and for one micro-batch.

    Forward a region is entered and left; backward the one is the gradient of what came in, the other of what goes out.
    """
    blocks = [way_back(step).blocks[number] for number in step.numbers]
    forward = 2 * step.blocks + again(step, "attention") + again(step, "mlp")
    entered = sum(of.norm1 + of.norm2 for of in blocks)
    left = sum(of.proj + (of.down or of.router) for of in blocks)
    if not step.is_cut:
        return {"all_reduce": forward + entered}
    return {"all_gather": forward + left, "reduce_scatter": forward + entered}


def _of_embedding(step: Step) -> dict[str, int]:
    """It is left."""
    if not step.is_cut:
        return {"all_reduce": int(step.is_first)}
    return {"all_gather": int(step.is_first and way_back(step).table), "reduce_scatter": int(step.is_first)}


def _of_head(step: Step) -> dict[str, int]:
    """It is entered."""
    back = int(step.is_last and way_back(step).norm)
    return {"all_gather": int(step.is_last), "reduce_scatter": back} if step.is_cut else {"all_reduce": back}


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
    c = step.cp
    times = step.microbatches * sum(way_back(step).blocks[number].qkv for number in step.numbers)  # backward
    both_ways = times + step.microbatches * (step.blocks + again(step, "attention"))  # and forward, and forward again
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

    A receive sends nothing, so who only receives has no line.  Nothing goes back into stages whose weights are all
    frozen, as are those of all before them.
    """
    t = step.tp if step.is_cut else 1
    forth, back = step.v - step.is_last, sum(stage > trains_from(step) for stage in step.stages)
    for length, times in Counter(step.lengths).items():
        m, stream = step.microbatches * times, step.beta_stream * step.b * length // t * step.sizes.width
        yield Line("pp", "activations", "send", step.pp, m * forth, stream)
        yield Line("pp", "activation gradients", "send", step.pp, m * back, stream)


def experts(step: Step) -> Iterator[Line]:
    """The messages of the layers of experts; a row is a token on its way to one, beta h bytes.

    Rows go to the ranks of their experts and come back, and so do their gradients.  Only rows travel that an expert has
    place for, so their number is a matter of the data (`Step.expert_rows`): n leave a rank and n' arrive, both b E C
    where every place is taken; by halves, they are as many in twice the messages.  How many are coming is told before.
    What goes forward does so once more where the layer runs forward twice, R of L layers.

        rows                m (2 L + R) (e-1)/e beta h (n + n')         4 (e-1)/e beta h b E C a layer, all places taken
        rows to come        m (L + R) (e-1)/e 8 E                       int64
        choices before      m (L + R) (c-1) 4 (2 + 2 k b E)             int32, over cp: the places that were taken there
        or where none is    m (L + R) 2 (c-1)/c 8 b E                   without a capacity: how many chose each expert
        weights             m L 2 (t-1)/t beta_wide b s k               over tp: their gradients
        with sequence parallelism the weights and the choices of all tokens are gathered, and the former's gradients
        scattered           m [(2 L + R) beta_wide + (L + R) 4] (t-1)/t b s k
    """
    if not step.experts:
        return
    e, c, t, E, k = step.ep, step.cp, step.tp, step.experts, step.choices
    messages = step.passes * len(step.halves)
    for number in step.expert_blocks:
        twice, back = int(runs_twice(step, number, "mlp")), way_back(step).blocks[number]
        passes = [step.rows_of(number, passed) for passed in range(step.passes)]
        # Rows that leave go out forward, and their like comes back as gradients of what experts gave; and the reverse.
        for rows, wanted in zip(zip(*passes, strict=True), (back.down, back.norm2), strict=True):
            mean = Fraction(step.beta * step.sizes.width * sum(rows), messages)
            yield Line("ep", "experts", "all_to_all", e, (1 + wanted + twice) * messages, mean)
        yield Line("ep", "routing", "all_to_all", e, (1 + twice) * step.passes, 8 * E)
        if step.sizes.routing is not None and step.sizes.routing.capacity_factor is not None:
            before = c * 4 * (2 + 2 * k * step.b * E)
            yield Line("cp", "routing", "all_gather", c, (1 + twice) * step.passes, before)
        else:
            yield Line("cp", "routing", "all_reduce", c, (1 + twice) * step.passes, 8 * step.b * E)
        for length, times in Counter(step.lengths).items():
            m, chosen = step.microbatches * times, step.b * length * k
            of_weights = m * back.router
            if step.is_cut:
                yield Line("tp", "layers", "all_gather", t, (1 + twice) * m, step.beta_wide * chosen)
                yield Line("tp", "layers", "reduce_scatter", t, of_weights, step.beta_wide * chosen)
                yield Line("tp", "routing", "all_gather", t, (1 + twice) * m, 4 * chosen)
            else:
                yield Line("tp", "layers", "all_reduce", t, of_weights, step.beta_wide * chosen)


# ----------------------------------------------------------------------------------------------------------- at its end


def gradients(step: Step) -> Iterator[Line]:
    """The sums of gradients, once a step whatever m is: each over the merge of all axes where a parameter is Replicate.

    dp and cp            2 (d c - 1)/(d c)         beta x parameters that are not Replicate on tp
    dp and cp and tp     2 (d c t - 1)/(d c t)     beta x parameters that are
    edp and cp           2 (d c/e - 1)/(d c/e)     beta x experts here
    ends                 beta x table: 2 (n-1)/n is 1 for the two ends of a pipeline, which both use a tied table;
                         where it is compressed, its factors

    With ZeRO other messages stand in the place of these sums (zero.py), and ends sum their own rows of the table; with
    PowerSGD the factors of gradients (powersgd.py), with workers that learn apart the sums of each (workers.py).

    Parameters are those of this rank's stages (slabs.py).  A rank whose stages hold none sends none; one that holds
    parameters of which tp leaves it no row does send, 0 bytes.  Gradients of halves travel as halves; those of what is
    in full precision all the same (routers; and all that is not in a branch, where branches have scales) go in messages
    of their own.
    """
    if step.zero:
        yield from dealt_out(step)
    elif step.compression is not None:
        yield from factors(step, step.compression)
    elif step.workers is not None:
        yield from inside(step)
    for buffer in () if step.zero or step.compression is not None or step.workers is not None else buffers(step):
        n, _ = merged(step, ATOMS[buffer[0].axes])
        nbytes = beta_of(step, buffer[0]) * sum(slab.size for slab in buffer)
        yield Line(buffer[0].axes, "gradients", "all_reduce", n, 1, nbytes)
    for slab in shares(step):
        if slab.name == "table.weight" and step.sizes.tied:
            for nbytes in over_ends(step, slab):
                yield Line("ends", "tied table", "all_reduce", min(step.pp, 2), 1, nbytes)


def count(step: Step) -> Iterator[Line]:
    """The targets of the step are counted: one int64; where routers have losses of rows, the rows with them.  Where
    workers learn apart, those of each.
    """
    workers = 1 if step.workers is None else step.dp // step.ep
    yield Line(DATA, "count of targets", "all_reduce", step.dp * step.cp, 1, (16 if step.experts else 8) * workers)


def agreement(step: Step) -> Iterator[Line]:
    """Loss, squared norm of the gradient, and whether gradients and the optimizer's state are finite: four float64 a
    step, once a row; where branches have scales, whether gradients are is told of each.  With them goes what ranks are
    asked, and what all layers of experts have counted.
    """
    ranks, sizes = step.dp * step.cp * step.tp * step.pp, step.sizes
    numbers = 4 + (2 * sizes.layers if step.scaled else 0) + step.asks
    if sizes.routing is not None:
        numbers += len(sizes.routing.layers(sizes.layers)) * counted.length(step.experts)
    yield Line("world", "loss and norm", "all_reduce", ranks, step.period, 8 * numbers * step.row)
