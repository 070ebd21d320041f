"""Random cases: a model, a layout and options that nobody has thought of together.

Case S is a pure function of the seed S, so `--sweep 1 --seed S` is that case alone.  Sizes are small and odd: a
vocabulary that does not divide, heads of three, one layer, more ranks than tokens of the vocabulary, stages without a
block, fewer micro-batches than stages, experts without a token.  Every case is one that the trainer must accept, so a
refusal is a failure too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitrain.config import LR_SCHEDULES, OPTIONS, Config
from mpitrain.verify.every import all_layouts
from mpitrain.verify.layouts import AXES, COUNTS, WAYS, Layout

ROWS = (1, 1)  # steps: the second sees what the first has left
STALE_ROWS = (4, 2)  # where they overlap: more than the pipeline is full, and fewer
MOST_RANKS = 8
LEAST_WIDTH = 6  # a norm over two or three numbers leaves nearly nothing of them, and the rest is rounding
WIDTH_TO_DROP = 24  # of a narrower stream, half dropped may be all; a norm of zeros makes gradients 300 times as large
LEAST_TOKENS = 2  # the softmax over one key is 1, so that nothing is left of the gradient of queries but rounding
PARTS = ("blocks.*.mlp", "blocks.*.attention", "blocks.0", "table,norm,head", "*.*,blocks.*.mlp.up")
"""Of the model, that may be made again in backward; `*.*` is every block."""
OF_EXPERTS = ("blocks.*.mlp", "blocks.*.mlp.router", "blocks.0", "*.*,blocks.*.mlp.experts")
"""The same where experts stand in the place of MLPs."""
FREEZES = ("blocks.0", "table", "blocks.*.attention,norm", "*,!norm")
"""What nobody trains."""
LR_GROUPS = ("table.*=0.5,*.bias=2", "blocks.0.*=0", "*.mlp.*=0.3,*.weight=1.7")


ZERO = {word: way for word, way in WAYS.items() if way.group == "ZeRO"}.keys()
"""Words for what ranks deal out."""


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        seed: makes it.
        layout: of its ranks.
        vocab: tokens of the text.
        options: settings of the trainer, besides those of the layout.
    """

    seed: int
    layout: Layout
    vocab: int
    options: dict[str, Any]

    def __str__(self) -> str:
        words = [str(self.layout) or "one rank", f"vocabulary {self.vocab}"]
        for name, value in self.options.items():
            if value is not None and value is not False:
                words.append(name.replace("_", "-") + ("" if value is True else f" {value}"))
        return ", ".join(words)

    def config(self, layout: Layout) -> Config:
        """The trainer's settings in a layout; the one rank without axes, which judges, makes nothing again."""
        settings = {axis: layout.sizes.get(axis, 1) for axis in AXES} | self.options
        kind = next((way for way in layout.ways if WAYS[way].group == "attention"), "ring")
        settings["schedule"] = layout.schedule or OPTIONS["schedule"].default
        for letter, number in layout.counts:
            settings[COUNTS[letter].option] = number
        if (layout.sizes.get("pp"), layout.counts) != (self.layout.sizes.get("pp"), self.layout.counts):
            settings["stage_layers"] = None  # an axis alone has other stages
        if not layout.axes:
            settings |= {"recompute": OPTIONS["recompute"].default, "recompute_modules": None}
        steps = sum(self.rows)
        settings |= {"sequence_parallel": "sp" in layout.ways, "expert_overlap": "overlap" in layout.ways}
        settings["zero"] = next((int(way[-1]) for way in layout.ways if way in ZERO), 0)
        if settings["zero"] < 3:  # where weights do not come and go
            settings.pop("prefetch", None)
        return Config(**settings, cp_attention=kind, steps=steps)

    @property
    def rows(self) -> tuple[int, ...]:
        """Steps of each row."""
        return STALE_ROWS if self.layout.is_stale else ROWS


def case_of(seed: int) -> Case:
    """The case that a seed stands for."""
    draw = np.random.default_rng([seed, 4])

    def one_of(*values: Any) -> Any:
        return values[int(draw.integers(len(values)))]

    routed = one_of(False, True)
    some = _layouts(one_of(*range(1, MOST_RANKS + 1)))
    if routed and some[0].ranks > 1 and one_of(False, True, True, True):  # experts are spread over replicas
        dp = one_of(*sorted({layout.sizes["dp"] for layout in some if "dp" in layout.sizes}))
        some = tuple(layout for layout in some if layout.sizes.get("dp") == dp)
    layout = one_of(*some)
    pp, dp, _, cp, tp = (layout.sizes.get(axis, 1) for axis in AXES)
    cut_heads = tp * (cp if "ulysses" in layout.ways else 1)
    heads = cut_heads * one_of(1, 1, 2, 3)
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and _fits(g, tp, cut_heads // tp)]
    tokens = math.lcm(2 * cp if "ring" in layout.ways else cp, cp * tp if "sp" in layout.ways else cp)
    seq_len = tokens * one_of(*range(1 if tokens >= LEAST_TOKENS else LEAST_TOKENS, max(2, 24 // tokens)))
    micro = one_of(1, 1, 2, 3) if pp == 1 else one_of(*range(1, 2 * pp + 2))
    chunks = slices = 1
    if layout.schedule == "interleaved":
        chunks = one_of(1, 2, 2, 3)
        micro = micro if chunks == 1 else pp * one_of(1, 2)
        layout = replace(layout, counts=(("v", chunks),))
    elif layout.schedule == "terapipe":
        slices = min(seq_len, one_of(1, 2, 3, 4, 7))
        layout = replace(layout, counts=(("s", slices),))
    if {"gpipe", "1f1b"}.intersection(layout.ways) and cp == 1 and "sp" not in layout.ways and one_of(False, True):
        layout = replace(layout, ways=(one_of("pipedream", "pipedream-2bw"), *layout.ways[1:]))
        micro = 1 if layout.schedule == "pipedream" else max(pp, micro)
    agree = layout.schedule != "pipedream"  # there each stage updates by itself
    layers = one_of(1, 1, 2, 3) if pp == 1 else one_of(1, 2, pp * chunks, pp * chunks + 1)
    cuts = np.sort(draw.integers(layers + 1, size=pp * chunks - 1))  # stages without a block among them
    by_stage = ",".join(map(str, np.diff([0, *cuts, layers])))
    vocab = one_of(2, 3, 5, 17, 64, 97, 257)
    options = {
        "layers": layers,
        "stage_layers": one_of(None, by_stage) if pp > 1 else None,
        "balance": one_of("layers", "parameters", "flops"),
        "width": heads * one_of(*(size for size in (1, 2, 3, 4, 5, 8) if size * heads >= LEAST_WIDTH)),
        "heads": heads,
        "kv_heads": one_of(None, *groups),
        "seq_len": seq_len,
        "tied": one_of(False, agree),
        "gelu": one_of("tanh", "erf"),
        "dropout": one_of(0.0, 0.1, 0.5),
        "seed": int(draw.integers(1000)),
        "batch": dp * micro * one_of(1, 2, 3),
        "microbatches": micro,
        "optimizer": one_of("adamw", "adamw", "sgd", "adafactor"),
        "lr": one_of(1e-4, 1e-3),
        "weight_decay": one_of(0.0, 0.1),
        "clip": one_of(0.0, 0.01, 0.5, 10.0) if agree else 0.0,
        "reducer": one_of("flat", "bucketed"),
        "bucket_mib": one_of(0.0005, 0.005, 1.0),
    }
    options |= {
        "recompute": one_of("none", "selective", "full", "full"),
        "recompute_modules": one_of(None, None, *PARTS),
        "dtype": one_of(
            "float32", "bfloat16", *(["float16"] if agree else [])
        ),  # a proof runs in float64 whatever is said
        "loss_scaling": one_of(None, "dynamic", "static", "blocks", "blocks") if agree else None,
        "loss_scale": one_of(0.125, 1.0, 1024.0, 65536.0),
        "loss_scale_window": one_of(1, 1000),
        "lr_groups": one_of(None, None, *LR_GROUPS),
        "lr_schedule": one_of(*LR_SCHEDULES),
        "warmup": one_of(0.03, 1.0),
    }
    scaling = options["loss_scaling"] or ("dynamic" if options["dtype"] == "float16" else "none")
    if scaling not in ("dynamic", "static"):
        options["loss_scale"] = None
    if scaling != "dynamic":
        options["loss_scale_window"] = None
    if options["width"] < WIDTH_TO_DROP:
        options["dropout"] = min(options["dropout"], 0.1)
    if routed and layout.schedule not in ("pipedream", "pipedream-2bw"):
        ep = one_of(*(size for size in range(1, dp + 1) if dp % size == 0), dp)
        if ep > 1:
            layout = replace(layout, axes=tuple(_with_part(layout.axes, "dp", "ep", ep)))
        options |= _experts(one_of, ep, layers, layout.schedule == "terapipe")
        if ep > 1 and options["experts"] > ep and one_of(False, True):
            layout = replace(layout, ways=tuple(way for way in WAYS if way in (*layout.ways, "overlap")))
        if options["recompute_modules"] is not None:
            options["recompute_modules"] = one_of(*OF_EXPERTS)
    if not layout.is_stale:
        zero, options["prefetch"] = one_of(None, *ZERO, "zero3"), one_of(0, 1, 1, 3)
        if zero is not None and layout.sizes.keys() & {*WAYS[zero].over}:
            layout = replace(layout, ways=(*layout.ways, zero))
    options["gist"] = one_of(None, None, "lossless", "16", "10", "8")
    if options["recompute"] == "none" or slices > 1 or "rsa" in layout.ways:  # where rounding would be another run
        options["gist"] = one_of(None, "lossless")
    options["hidden"] = one_of(None, None, tp * one_of(1, 2, 3, 7))
    options["window"] = one_of(None, None, LEAST_TOKENS, 3, 7)
    if options["loss_scaling"] != "blocks" and not layout.is_stale:
        options["freeze"] = one_of(None, None, None, *FREEZES)
    if "experts" not in options and one_of(False, True):
        options |= _llama(one_of, options)
    return Case(seed, layout, vocab, options)


def _llama(one_of: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """What makes a Llama of a GPT of these options."""
    width, heads = options["width"], options["heads"]
    return {
        "model": "llama-tiny",
        "width": width * (1 + width // heads % 2),  # pairs of elements are turned
        "kv_heads": options["kv_heads"] or heads,
        "hidden": options["hidden"] or 8 * width,
        "gelu": "tanh",
        "lr_groups": options["lr_groups"] and options["lr_groups"].replace("*.bias", "*.proj.*"),
        "norm_eps": one_of(None, 1e-6, 1e-2),
        "rope_theta": one_of(None, 10.0, 1e6),
        "rope_scaling": one_of(None, "linear:2", "llama3:8,1,4,4"),
    }


def _with_part(axes: tuple[tuple[str, int], ...], whole: str, part: str, size: int) -> Iterator[tuple[str, int]]:
    """The axes with a part behind its whole."""
    for pair in axes:
        yield pair
        if pair[0] == whole:
            yield part, size


def _experts(one_of: Callable[..., Any], ep: int, layers: int, sliced: bool) -> dict[str, Any]:
    """Options of a mixture of experts.

    Args:
        one_of: draws one of several values.
        ep: ranks over which they are spread.
        layers: of the model.
        sliced: whether sequences come in slices, none of which knows how many tokens the whole has.
    """
    experts = ep * one_of(1, 2, 3, 4)
    router = one_of("switch", "topk", "topk", *(["gshard", "gshard"] if experts > 1 else []))
    top_k = {"switch": 1, "gshard": 2}.get(router) or one_of(*range(1, min(experts, 4) + 1))
    capacity = one_of(0.5, 1.0, 1.25, 8.0, None)
    balance = one_of(0.0, 0.01, 1.0, None)
    return {
        "experts": experts,
        "top_k": top_k,
        "router": router,
        "capacity_factor": None if sliced else capacity,
        "dropless": sliced or capacity is None,
        "renormalize": one_of(False, True) and router == "topk" and top_k > 1,
        "moe_every": one_of(*range(1, min(layers, 2) + 1)),
        "balance_loss": 0.0 if sliced else balance,
        "z_loss": one_of(0.0, 1e-3, 0.1),
        "jitter": one_of(0.0, 0.01, 0.5),
    }


def _fits(groups: int, tp: int, cp: int) -> bool:
    """Whether so many heads of keys and values can be laid over the ranks; cp counts where it cuts heads."""
    return (groups % tp == 0 or tp % groups == 0) and max(1, groups // tp) % cp == 0


@functools.cache
def _layouts(ranks: int) -> tuple[Layout, ...]:
    """Of axes and their ways; experts, and what the model does on any ranks, are drawn with its options."""
    every = (layout for layout in all_layouts(ranks) if not layout.spreads_experts)
    return tuple(layout for layout in every if all(WAYS[way].axis for way in layout.ways))
