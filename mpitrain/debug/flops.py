"""The count of operations: floating-point operations of matrix products, by module and by the reason they are made for.

    counted = Flops()
    with listen(counted):
        executor.step(batch)
    print(counted.table())

    step        forward    again   backward
    all      40,894,464        0  85,983,232

A listener.  A product of (n, k) and (k, m) counts 2 n k m; nothing else counts, as in the formulas of the papers.
Attention counts as if no key were masked: twice what is done where it is causal, since whole blocks of masked keys are
left out.  With a sliding window every query counts the keys of a whole one.

    forward     the first time
    again       second forwards of what is recomputed; and the scores, where backward of attention makes them anew
    backward    two products for each of forward's

Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.autograd.lazy import GroupedProduct, Product
from mpitrain.autograd.recompute import recomputing
from mpitrain.debug.columns import aligned
from mpitrain.events import Event

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"

_PRODUCTS = ("linear", "matmul", "contract", "grouped_matmul", "conv2d")
_ATTENTIONS = ("attention", "ring_attention", "rsa_attention", "slice_attention")


class Flops:
    """A listener that adds up operations of this rank.

    Attributes:
        sums: (module path, forward | again | backward) -> operations.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], int] = {}

    def __call__(self, event: Event) -> None:
        kind, phase, name, info = event
        if kind != "op" or phase != "end":
            return
        op = name.removesuffix(".backward")
        if op in _PRODUCTS:
            if op is name:
                self._add(info, _again_or(FORWARD), _of_product(info))
            else:
                self._add(info, BACKWARD, _of_product_backward(info))
        elif op in _ATTENTIONS:
            if op is name:
                self._add(info, _again_or(FORWARD), 2 * _of_scores(info, info["inputs"][0].shape))
            else:
                scores = _of_scores(info, info["grads"][0].shape)
                self._add(info, BACKWARD, 4 * scores)
                if not _keeps_scores(op, info):
                    self._add(info, AGAIN, scores)

    def _add(self, info: Mapping[str, Any], why: str, flops: int) -> None:
        key = info["path"], why
        self.sums[key] = self.sums.get(key, 0) + flops

    def total(self, why: str | None = None, where: Callable[[str], bool] | None = None) -> int:
        """Operations of one kind or all, of modules whose path is wanted or all."""
        return sum(
            flops for (path, kind), flops in self.sums.items() if why in (None, kind) and (where is None or where(path))
        )

    def table(self) -> str:
        """By module, layers taken together."""
        paths: dict[str, dict[str, int]] = {}
        for (path, why), flops in self.sums.items():
            row = paths.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), {})
            row[why] = row.get(why, 0) + flops
        lines = [["", FORWARD, AGAIN, BACKWARD]]
        kinds = (FORWARD, AGAIN, BACKWARD)
        lines += [[path, *(f"{row.get(why, 0):,}" for why in kinds)] for path, row in paths.items()]
        lines.append(["all", *(f"{self.total(why):,}" for why in kinds)])
        return aligned(lines)


def _again_or(first: str) -> str:
    return AGAIN if recomputing() else first


def _of_product(info: Mapping[str, Any]) -> int:
    x, w = info["inputs"][:2]
    # A filter is multiplied with all that it sees from a place.
    op = info["function"].title()
    length = math.prod(w.shape[1:]) if op == "conv2d" else x.shape[-1] if op != "contract" else _summed(info, x, w)
    return 2 * int(info["output"].size) * int(length)


def _of_product_backward(info: Mapping[str, Any]) -> int:
    """One product for each gradient that is made: 2 n k m, where grad is (n, m)."""
    grad, of_inputs = info["grad"], info["grads"][:2]
    size, flops = int(grad.size), 0
    for side, made in enumerate(of_inputs):
        if made is None:
            continue
        if info["function"].title() == "conv2d":
            length = math.prod(info["tape"].saved_of(info["node"])[1].shape[1:])
        elif info["function"].title() == "contract":
            length = _summed(info, *info["tape"].saved_of(info["node"])[:2])
        elif isinstance(made, Product):
            length = made.a.shape[0]
        elif isinstance(made, GroupedProduct):
            length = made.a.shape[1]
        elif side == 0 or made.ndim == 1:
            length = made.shape[-1]
        else:
            length = made.shape[-2]
        flops += 2 * size * int(length)
    return flops


def _summed(info: Mapping[str, Any], *factors: Any) -> int:
    """How many products a contraction adds up for each element: the lengths of the letters that its result has not."""
    static = info["static"] if "static" in info else info["node"].static
    *of, result = static["letters"]
    letters, factor = next((mine, x) for mine, x in zip(of, factors, strict=True) if x is not None)
    return math.prod([n for letter, n in zip(letters, factor.shape, strict=True) if letter not in result])


def _of_scores(info: Mapping[str, Any], packed: tuple[int, ...]) -> int:
    """One of the two products of attention, q k^T: 2 s t d for each head."""
    static = info["static"] if "static" in info else info["node"].static
    b, s, width = packed
    heads, kv_heads = static["heads"], static["kv_heads"]
    keys = s * (static["axis"].size if "axis" in static else 1)
    if "inputs" in info:
        past = info["inputs"][3:] if info["function"].title() == "slice_attention" else ()
    else:
        past = info["tape"].saved_of(info["node"])[5:] if info["function"].title() == "slice_attention" else ()
    keys += sum(each.shape[1] for each in past)
    keys = min(keys, static.get("window") or keys)
    return 2 * math.prod((b, heads, s, keys, width // (heads + 2 * kv_heads)))


def _keeps_scores(op: str, info: Mapping[str, Any]) -> bool:
    """Whether the probabilities waited, so that backward need not make scores."""
    return op == "rsa_attention" or bool(info["node"].static.get("keep_scores", False))
