"""The rows of the table: what each asks for, and how its figure is read from a measurement.

A figure is the median over the rounds with the least and the greatest beside it.  Ratios are formed within a round, so
that both sides had the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from growth import LINEAR

Data = dict[str, Any]


class Figure(NamedTuple):
    """value: the median; low, high: of the rounds; mine, peer: both sides' own figures, as text; note: what else."""

    value: float
    low: float
    high: float
    mine: str = ""
    peer: str = ""
    note: str = ""


class Row(NamedTuple):
    """A row.

    Attributes:
        name: how it is called on the command line.
        title: what it says.
        measurement: where its figure comes from, by its name in `measurements.MEASUREMENTS`.
        figure: reads it.
        bar, ambition: what must and what should be reached; None: nothing is asked for.
        more: whether more is better.
        unit: "": a ratio; "%": a share; else as it is.
    """

    name: str
    title: str
    measurement: str
    figure: Callable[[Data], Figure]
    bar: float | None
    ambition: float | None
    more: bool = True
    unit: str = ""

    def verdict(self, value: float) -> str:
        """`ambition`, `bar` (it is reached), or `no`; "" where nothing is asked for."""
        for name, asked in (("ambition", self.ambition), ("bar", self.bar)):
            if asked is not None and (value >= asked if self.more else value <= asked):
                return name
        return "" if self.bar is None else "no"

    def text(self, value: float | None) -> str:
        """A value in the row's unit; "-" for None."""
        if value is None:
            return "-"
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        return f"{value:.0f}" if self.unit == "faults" else f"{value:.2f} {self.unit}".rstrip()

    def asked(self, value: float | None) -> str:
        """A bar or an ambition with its direction; "-" for None."""
        return "-" if value is None else f"{'≥' if self.more else '≤'} {self.text(value)}"

    def between(self, low: float, high: float) -> str:
        """Least and greatest, the unit once."""
        least, _, _ = self.text(low).partition(" ")
        return f"{least}-{self.text(high)}"


# ------------------------------------------------------------------------------------------------- reading a figure


def spread(values: Sequence[float], **texts: str) -> Figure:
    """Median, least and greatest."""
    return Figure(statistics.median(values), min(values), max(values), **texts)


def column(data: Data, side: str, key: str) -> list[float]:
    """One value of a side a round."""
    return [run[key] for run in data["rounds"][side]]


def speed(mine: str, peer: str) -> Callable[[Data], Figure]:
    """Tokens/s of one turn over another's; beside it the ratio of CPU times, which foreign load disturbs less."""

    def figure(data: Data) -> Figure:
        own, other = (column(data, side, "tokens_per_s") for side in (mine, peer))
        cpu = divided(column(data, peer, "cpu_ms_per_step"), column(data, mine, "cpu_ms_per_step"))
        texts = [f"{statistics.median(side):,.0f} tokens/s" for side in (own, other)]
        note = f"by CPU time {statistics.median(cpu):.2f}"
        if mine == "numpy" and data["kernels"]["mpitrain"] == "numpy":
            note += "; there are no compiled kernels in this installation"
        return spread(divided(own, other), mine=texts[0], peer=texts[1], note=note)

    return figure


def divided(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(own, other, strict=True)]


def share_of_peak(data: Data) -> Figure:
    peak = max(data["peaks"])
    mine, peer = (
        [data["flops_per_token"] * speed / peak for speed in column(data, side, "tokens_per_s")]
        for side in ("mpitrain", "torch")
    )
    note = f"peak {peak / 1e9:.1f} GFLOP/s, vectors of {data['vector_bits']} bits"
    texts = [f"{100 * statistics.median(side):.1f} %" for side in (mine, peer)]
    return spread(mine, mine=texts[0], peer=texts[1], note=note)


def page_faults(data: Data) -> Figure:
    mine, peer = (column(data, side, "faults_per_step") for side in ("mpitrain", "torch"))
    return spread(mine, mine=f"{statistics.median(mine):.0f}", peer=f"{statistics.median(peer):.0f}")


def outside_products(data: Data) -> Figure:
    rounds = data["rounds"]
    strict = statistics.median(run["outside_with_attention"] for run in rounds)
    watching = statistics.median(sum(run["ms"].values()) / run["plain_ms"] - 1 for run in rounds)
    note = f"{100 * strict:.1f} % with all of attention; watching costs {100 * watching:.0f} % of a step"
    return spread([run["outside"] for run in rounds], note=note)


def against_ddp(data: Data) -> Figure:
    shared, each = speed("mpitrain 2", "torch 2")(data), speed("mpitrain 2, each", "torch 2, each")(data)
    worse = min(shared, each)
    note = f"8 sequences shared out {shared.value:.2f}, 8 each {each.value:.2f}; {worse.note}"
    return worse._replace(note=note)


def scaling(data: Data) -> Figure:
    def of(side: str) -> list[float]:
        return divided(column(data, f"{side} 2, each", "tokens_per_s"), column(data, f"{side} 1", "tokens_per_s"))

    mine, peer = of("mpitrain"), of("torch")
    return spread(mine, mine=f"{statistics.median(mine):.2f}", peer=f"{statistics.median(peer):.2f}")


def eight_on_two(data: Data) -> Figure:
    eight, two = (column(data, ranks, "tokens_per_s") for ranks in ("8", "2"))
    texts = [f"{statistics.median(side):,.0f} tokens/s" for side in (eight, two)]
    return spread(divided(eight, two), mine=texts[0], note=f"two ranks {texts[1]}")


def against_replicas(*sides: str) -> Callable[[Data], Figure]:
    """Tokens/s of the first layout over two replicas', and of others in the note."""

    def figure(data: Data) -> Figure:
        other = column(data, "dp 2", "tokens_per_s")
        ratios = {side: divided(column(data, side, "tokens_per_s"), other) for side in sides}
        stood = {side: statistics.median(column(data, side, "in_messages")) for side in (*sides, "dp 2")}
        words = [f"{side} {statistics.median(ratios[side]):.2f}" for side in sides[1:]]
        words += [f"in messages: {', '.join(f'{side} {100 * share:.0f} %' for side, share in stood.items())}"]
        texts = [f"{statistics.median(of):,.0f} tokens/s" for of in (column(data, sides[0], "tokens_per_s"), other)]
        return spread(ratios[sides[0]], mine=texts[0], note=f"dp 2 {texts[1]}; {'; '.join(words)}")

    return figure


def against_faster_replicas(*sides: str, time: bool = False) -> Callable[[Data], Figure]:
    """Tokens/s of the best of some pipelines over those of two replicas, or the time of a step over theirs.

    Of the two ways to train the replicas the one counts that is faster in the median.  The others stand in the note.
    """

    def figure(data: Data) -> Figure:
        ms = {name: column(data, name, "ms_per_step") for name in data["rounds"]}
        replicas = min((name for name in ms if name.startswith("dp 2")), key=lambda name: statistics.median(ms[name]))

        def ratios(name: str) -> list[float]:
            return divided(ms[name], ms[replicas]) if time else divided(ms[replicas], ms[name])

        best = min(sides, key=lambda name: statistics.median(ms[name]))
        micros = best.partition(", ")[2]
        others = [name for name in ms if name != best and name.endswith(f", {micros}")]
        words = [best, *(f"{name} {statistics.median(ratios(name)):.3f}" for name in others)]
        stood = {name: statistics.median(column(data, name, "in_messages")) for name in (best, replicas)}
        words.append(f"in messages, waiting included: {', '.join(f'{k} {100 * s:.0f} %' for k, s in stood.items())}")
        texts = [f"{statistics.median(ms[name]):.0f} ms a step" for name in (best, replicas)]
        return spread(ratios(best), mine=texts[0], note=f"{replicas}: {texts[1]}; {'; '.join(words)}")

    return figure


def beside(mine: str, other: str) -> Callable[[Data], Figure]:
    """Tokens/s of one of our own turns over another's."""

    def figure(data: Data) -> Figure:
        own, theirs = (column(data, side, "tokens_per_s") for side in (mine, other))
        cpu = divided(column(data, other, "cpu_ms_per_step"), column(data, mine, "cpu_ms_per_step"))
        note = f"{other} {statistics.median(theirs):,.0f} tokens/s; by CPU time {statistics.median(cpu):.2f}"
        if data["kernels"] == "numpy":
            note += "; there are no compiled kernels in this installation"
        return spread(divided(own, theirs), mine=f"{statistics.median(own):,.0f} tokens/s", note=note)

    return figure


def of_experts(mine: str, other: str, third: str) -> Callable[[Data], Figure]:
    """Tokens/s of one of our own turns over another's, as `beside`; a third one and dropped tokens in the note."""

    def figure(data: Data) -> Figure:
        found = beside(mine, other)(data)
        ratios = divided(column(data, third, "tokens_per_s"), column(data, other, "tokens_per_s"))
        words = [found.note, f"{third} {statistics.median(ratios):.2f}"]
        words.append(f"{100 * data['dropped'][mine]:.0f} % of the tokens dropped")
        if "in_messages" in data["rounds"][mine][0]:
            stood = {side: statistics.median(column(data, side, "in_messages")) for side in (mine, other)}
            words.append(f"in messages: {', '.join(f'{side} {100 * share:.0f} %' for side, share in stood.items())}")
        return found._replace(note="; ".join(words))

    return figure


def recomputed(recompute: str) -> Callable[[Data], Figure]:
    """Time of a step that makes something again over one that makes nothing again, float32 and AdamW."""
    mine, other = (f"float32, {word}, adamw" for word in (recompute, "none"))

    def figure(data: Data) -> Figure:
        own, theirs = (column(data, side, "ms_per_step") for side in (mine, other))
        cpu = divided(*(column(data, side, "cpu_ms_per_step") for side in (mine, other)))
        flops = flops_of(data, mine) / flops_of(data, other)
        held = data["looks"][mine]["peak"] / data["looks"][other]["peak"]
        note = (
            f"none {statistics.median(theirs):.0f} ms; by CPU time {statistics.median(cpu):.2f}; operations"
            f" {flops:.3f}, bytes alive at the peak {held:.2f}"
        )
        return spread(divided(own, theirs), mine=f"{statistics.median(own):.0f} ms a step", note=note)

    return figure


def flops_of(data: Data, name: str) -> int:
    """All operations of a step."""
    return sum(data["looks"][name]["flops"].values())


def flops_of_full(data: Data) -> Figure:
    """Counted operations of a step that makes blocks again over one that makes only attention scores again.

    Blocks that are made again make their scores again in backward, too, as all others do: what is more is one forward.
    """
    full, selective, none = (flops_of(data, f"float32, {word}, adamw") for word in ("full", "selective", "none"))
    forward = data["looks"]["float32, selective, adamw"]["flops"]["forward"]
    note = f"{full:,} and {selective:,}; one more forward would be {1 + forward / selective:.3f}"
    note += f"; of none {full / none:.3f}"
    return Figure(full / selective, full / selective, full / selective, note=note)


def saved_memory(data: Data) -> Figure:
    """Bytes at the peak of the leanest way over those of float32 that keeps everything, with AdamW."""
    peaks = {name: look["peak"] for name, look in data["looks"].items()}
    leanest, plain = min(peaks, key=lambda name: peaks[name]), "float32, none, adamw"
    value = peaks[leanest] / peaks[plain]
    note = f"{leanest}; {plain} {peaks[plain] / 1e6:,.1f} MB"
    return Figure(value, value, value, mine=f"{peaks[leanest] / 1e6:,.1f} MB", note=note)


def bubbles(data: Data) -> Figure:
    """The largest distance of a schedule's bubble to its formula, of the medians over all steps."""
    medians = {
        name: {key: statistics.median(step[key] for step in steps) for key in ("measured", "formula", "simulated")}
        for name, steps in data["schedules"].items()
    }
    far = {name: abs(found["measured"] - found["formula"]) for name, found in medians.items()}
    words = [
        f"{name} {100 * found['measured']:.1f} % (formula {100 * found['formula']:.1f}, simulated"
        f" {100 * found['simulated']:.1f})"
        for name, found in medians.items()
    ]
    least, *_, greatest = sorted(far.values())
    return Figure(greatest, least, greatest, note=f"least and greatest are those of the schedules; {', '.join(words)}")


def bubble_over_1f1b(data: Data) -> Figure:
    """Of zb-h1, round by round."""
    mine, other = ([step["measured"] for step in data["schedules"][name]] for name in ("zb-h1", "1f1b"))
    texts = [f"{100 * statistics.median(side):.1f} %" for side in (mine, other)]
    return spread(divided(mine, other), mine=texts[0], note=f"1f1b {texts[1]}")


def memory(data: Data) -> Figure:
    def of(side: str, kind: str) -> list[float]:
        return [run[kind] for run in data["rounds"][side]]

    peaks = {side: statistics.median(of(side, "peak")) for side in ("mpitrain", "torch")}
    texts = {side: f"{statistics.median(of(side, 'growth')) / 1e6:,.0f} MB" for side in peaks}
    note = (
        f"whole process {peaks['mpitrain'] / peaks['torch']:.2f}: "
        f"{peaks['mpitrain'] / 1e6:,.0f} MB against {peaks['torch'] / 1e6:,.0f} MB"
    )
    growth = divided(of("mpitrain", "growth"), of("torch", "growth"))
    return spread(growth, mine=texts["mpitrain"], peer=texts["torch"], note=note)


def first_line(data: Data) -> Figure:
    mine, peer = data["seconds"]["mpitrain"], data["seconds"]["torch"]
    texts = [f"{statistics.median(side):.1f} s" for side in (mine, peer)]
    return spread(divided(mine, peer), mine=texts[0], peer=texts[1])


def adamw(data: Data) -> Figure:
    figures = {}
    for name, model in data["models"].items():
        mine, peer = model["ns"]["mpitrain"], model["ns"]["torch"]
        texts = [f"{statistics.median(side):.2f} ns" for side in (mine, peer)]
        figures[name] = spread(divided(mine, peer), mine=texts[0], peer=texts[1])
    worst = max(figures.values())
    return worst._replace(note=", ".join(f"{name} {figure.value:.2f}" for name, figure in figures.items()))


def digits_cnn(data: Data) -> Figure:
    figures = {}
    for batch, sides in data["ms"].items():
        peers = {side: statistics.median(ms) for side, ms in sides.items() if side != "mpitrain"}
        peer = min(peers, key=lambda side: peers[side])
        texts = [f"{1e3 * int(batch) / statistics.median(sides[side]):,.0f}" for side in ("mpitrain", peer)]
        figures[batch] = spread(divided(sides[peer], sides["mpitrain"]), mine=texts[0], peer=texts[1])
    others = ", ".join(f"batch {batch} {figure.value:.2f}" for batch, figure in figures.items())
    return figures["64"]._replace(note=others)


def generation(data: Data) -> Figure:
    """Tokens a second of CPU time, which foreign load disturbs less, over those of PyTorch's faster cache."""
    sides = {side: [1e3 / run["cpu_ms_per_token"] for run in runs] for side, runs in data["rounds"].items()}
    peer = max((side for side in sides if side != "mpitrain"), key=lambda side: statistics.median(sides[side]))
    texts = [f"{statistics.median(sides[side]):,.0f} tokens/s" for side in ("mpitrain", peer)]
    clock = divided(column(data, "mpitrain", "tokens_per_s"), column(data, peer, "tokens_per_s"))
    note = f"{peer}; by the clock {statistics.median(clock):.2f}"
    return spread(divided(sides["mpitrain"], sides[peer]), mine=texts[0], peer=texts[1], note=note)


def message_cost(data: Data) -> Figure:
    figures = {}
    for name, sides in data["microseconds"].items():
        own = [mine - raw for mine, raw in zip(sides["mpitrain"], sides["raw"], strict=True)]
        texts = [f"{statistics.median(sides[side]):.1f} us" for side in ("mpitrain", "raw")]
        figures[name] = spread(own, mine=texts[0], peer=texts[1])
    worst = max(figures.values())
    return worst._replace(note="; ".join(f"{name} {figure.value:.1f}" for name, figure in figures.items()))


def op_overhead(data: Data) -> Figure:
    ratios = {op: divided(sides["mpitrain"], sides["torch"]) for op, sides in data["ops"].items()}
    rounds = [statistics.median(of_round) for of_round in zip(*ratios.values(), strict=True)]
    sides = [
        f"{statistics.median(statistics.median(op[side]) for op in data['ops'].values()):.1f} us"
        for side in ("mpitrain", "torch")
    ]
    note = ", ".join(f"{op} {statistics.median(values):.2f}" for op, values in ratios.items())
    return spread(rounds, mine=sides[0], peer=sides[1], note=note)


def ordered_sums(data: Data) -> Figure:
    ratios = {
        (ranks, mib): statistics.median(divided(modes["ordered"], modes["mpi"]))
        for ranks, sizes in data["by_ranks"].items()
        for mib, modes in sizes.items()
    }
    worst = max(ratios, key=lambda place: ratios[place])
    note = f"least and greatest are those of the nine; worst: {worst[0]} ranks, {worst[1]} MiB"
    return spread(list(ratios.values()), note=note)


def exponent(name: str) -> Callable[[Data], Figure]:
    """The largest of a sweep's parts."""

    def figure(data: Data) -> Figure:
        parts = {part: found["exponent"] for part, found in data["sweeps"][name].items()}
        worst = max(parts.values())
        note = ", ".join(f"{part} {value:.2f}" for part, value in parts.items()) if len(parts) > 1 else ""
        return Figure(worst, min(parts.values()), worst, note=note)

    return figure


# ------------------------------------------------------------------------------------------------------------ the rows

ROWS = (
    Row("tokens-S", "tokens/s, S, 1 rank, 1 thread, dropout 0", "S", speed("mpitrain", "torch"), 1.12, 1.25),
    Row("tokens-M", "tokens/s, M, 1 rank, 1 thread, dropout 0", "M", speed("mpitrain", "torch"), 1.10, 1.2),
    Row("dropout-S", "tokens/s, S, dropout 0.1", "S with dropout", speed("mpitrain", "torch"), 1.0, 1.15),
    Row("tokens-T1024", "tokens/s, T = 1024 (d 384, B 2)", "T 1024", speed("mpitrain", "torch"), 1.1, 1.4),
    Row("llama-S", "tokens/s, Llama, S, 1 rank, 1 thread, dropout 0", "Llama S", speed("mpitrain", "torch"), 1.1, 1.2),
    Row("peak-share-S", "share of one core's FMA peak, S", "S", share_of_peak, 0.75, 0.82, unit="%"),
    Row("peak-share-M", "share of one core's FMA peak, M", "M", share_of_peak, 0.75, 0.82, unit="%"),
    Row("outside", "share of the step outside matrix products, S", "step", outside_products, 0.11, 0.07, False, "%"),
    Row("numpy-S", "tokens/s, NumPy path alone, S", "S", speed("numpy", "torch"), 0.92, 0.97),
    Row("ddp", "2 ranks x 1 thread against DDP with gloo, 2 processes", "two ranks", against_ddp, 1.12, 1.25),
    Row("scaling", "scaling 1 -> 2 ranks", "two ranks", scaling, 1.9, 1.97),
    Row("eight", "8 ranks on 2 cores against 2 ranks, same tokens", "many ranks", eight_on_two, 0.70, 0.85),
    Row(
        "tp",
        "tp 2 against dp 2, S, same global batch, 2 cores",
        "layouts",
        against_replicas("tp 2", "tp 2, sequence parallel"),
        0.80,
        None,
    ),
    Row("cp", "cp 2 against dp 2, S, same global batch, 2 cores", "layouts", against_replicas("cp 2"), 0.80, None),
    Row(
        "pp",
        "time of a step, pp 2 with 1f1b, m = 8, over dp 2, S, batch 32, 2 cores",
        "pipelines",
        against_faster_replicas("1f1b, m 8", time=True),
        1.18,
        1.125,
        False,
    ),
    Row(
        "pp-better",
        "time of a step, pp 2 with interleaved (v = 2) or zb-h1, m = 8, over dp 2",
        "pipelines",
        against_faster_replicas("interleaved, m 8", "zb-h1, m 8", time=True),
        1.11,
        1.0625,
        False,
    ),
    Row(
        "pp-16",
        "tokens/s, pp 2 with 1f1b, m = 16, over dp 2",
        "pipelines",
        against_faster_replicas("1f1b, m 16"),
        0.85,
        0.94,
    ),
    Row(
        "bubble",
        "distance of a bubble to its formula, worst schedule",
        "bubbles",
        bubbles,
        0.03,
        0.01,
        False,
        "%",
    ),
    Row("bubble-zb", "bubble of zb-h1 over that of 1f1b", "bubbles", bubble_over_1f1b, 1.0, 0.5, False),
    *(
        Row(
            f"{dtype}-{size}",
            f"tokens/s in {dtype} over float32, {'gpt-mini' if size == 'mini' else size}",
            f"halves {size}",
            beside(dtype, "float32"),
            0.75,
            None,
        )
        for size in ("mini", "S")
        for dtype in ("float16", "bfloat16")
    ),
    *(
        Row(
            f"experts-{size}",
            f"tokens/s with 8 experts, top 1, over the dense twin, {'gpt-mini' if size == 'mini' else size}",
            f"experts {size}",
            of_experts("switch", "dense", "dropless"),
            0.75,
            None,
        )
        for size in ("mini", "S")
    ),
    *(
        Row(
            f"experts-ep-{size}",
            f"tokens/s with 8 experts, ep 2 over dp 2, {'gpt-mini' if size == 'mini' else size}, 2 cores",
            f"experts on two ranks {size}",
            of_experts("ep 2", "dp 2", "dense"),
            0.75,
            None,
        )
        for size in ("mini", "S")
    ),
    Row(
        "recompute-selective",
        "time of a step, scores made again over kept, S",
        "memory and time",
        recomputed("selective"),
        None,
        None,
        False,
    ),
    Row(
        "recompute-full",
        "time of a step, blocks made again over nothing, S",
        "memory and time",
        recomputed("full"),
        None,
        None,
        False,
    ),
    Row(
        "recompute-flops",
        "operations of a step, blocks made again over scores alone, S",
        "memory and time",
        flops_of_full,
        4 / 3,
        None,
        False,
    ),
    Row(
        "memory-saved",
        "bytes alive at the peak, leanest way over float32 with AdamW, S",
        "memory and time",
        saved_memory,
        None,
        None,
        False,
    ),
    Row(
        "recompute-selective-T1024",
        "time of a step, scores made again over kept, T = 1024",
        "recompute T 1024",
        recomputed("selective"),
        None,
        None,
        False,
    ),
    Row(
        "recompute-full-T1024",
        "time of a step, blocks made again over nothing, T = 1024",
        "recompute T 1024",
        recomputed("full"),
        None,
        None,
        False,
    ),
    Row("faults", "page faults a step", "S", page_faults, 10, 0, False, "faults"),
    Row("memory-S", "peak memory, S, against PyTorch", "memory S", memory, 0.7, 0.5, False),
    Row("memory-M", "peak memory, M, against PyTorch", "memory M", memory, 0.85, 0.65, False),
    Row(
        "first-line", "first training line, 8 ranks against 8 DDP processes", "first line", first_line, 0.5, 0.3, False
    ),
    Row("adamw", "AdamW, ns per parameter, against PyTorch fused", "AdamW", adamw, 0.9, 0.7, False),
    Row("generation-S", "tokens/s of writing a text with a cache, S, 1 thread", "generation S", generation, 1.0, 1.25),
    Row("cnn-digits", "images/s of the digits CNN, batch 64, 1 thread", "digits CNN", digits_cnn, 0.9, 1.0),
    Row("messages", "Communicator's own cost per small message", "messages", message_cost, 5.0, 2.0, False, "us"),
    Row("ops", "op overhead against PyTorch eager", "ops", op_overhead, 3.0, 1.5, False),
    Row("ordered-sums", "deterministic all-reduce against Allreduce", "ordered sums", ordered_sums, 1.4, 1.15, False),
    *(
        Row(f"cost-{name}", f"exponent of cost over {name}", f"cost over {name}", exponent(name), 1.1, None, False)
        if name in LINEAR
        else Row(f"cost-{name}", f"exponent of cost over {name}", f"cost over {name}", exponent(name), None, None)
        for name in ("ranks", "layers", "tensors", "micro-batches", "T", "d")
    ),
)
