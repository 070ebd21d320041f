"""The formulas of the paper, to lay beside our own: 16-bit numbers, masks of one byte, matrices of softmax kept.

    none                       s b h (34 + 5 a s / h)
    tensor parallel            s b h (10 + 24 / t + 5 a s / (h t))
    with sequence parallelism  s b h / t (34 + 5 a s / h)
    selective                  the same without 5 a s / h
    full                       2 s b h, with sequence parallelism / t

s tokens, b sequences of a micro-batch, h width, a heads, t ranks of tp.  Source: Korthikanti et al. 2022,
arXiv:2205.05198, sections 4 and 5, table 2; a ring over c ranks of cp holds s / c tokens, and no matrix of softmax.

The formulas are those of GPT's block.  Of another one `tensors` counts by the same rule: keys and values as wide as
they are, a gated MLP with both of its outputs of hidden units and their product.
"""

from __future__ import annotations

from fractions import Fraction

from mpitrain.plan.traffic.step import Step

MASK = 1  # byte of an element of a mask


def block_bytes(
    *, s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Fraction:
    """Bytes of one layer and micro-batch by the paper's formula.

    Args:
        s: tokens of a sequence.
        b: sequences of a micro-batch.
        h: width.
        a: heads.
        t: ranks of tp.
        sequence_parallel: the stream is cut over them too.
        recompute: none, selective or full.
    """
    sbh = s * b * h
    cut = t if sequence_parallel else 1
    if recompute == "full":
        return Fraction(2 * sbh, cut)
    scores = Fraction(5 * a * s, h * t) if recompute == "none" else Fraction(0)
    return sbh * (Fraction(10, cut) + Fraction(24, t) + scores)


def first_stage(layers: int, *, pp: int = 1, chunks: int = 1) -> Fraction:
    """How many layers' activations the first stage of a pipeline holds: L, interleaved L (1 + (p - 1) / (p v))."""
    return layers * (1 + Fraction(pp - 1, pp * chunks)) if chunks > 1 else Fraction(layers)


def tensors(step: Step, beta: int = 2, recompute: str | None = None) -> dict[str, int]:
    """The paper's table of a layer for this layout, by the names that our own has for the same tensors.

    Args:
        step: the sizes and the layout.
        beta: bytes of an element; the paper's is 2.
        recompute: none, selective or full; None: that of the step.
    """
    t, c = step.tp, step.cp
    tokens, whole = step.b * step.s, step.s * c
    between = tokens * step.sizes.width // (t if step.is_cut else 1)  # of the stream where it may be cut
    inside = tokens * step.h
    hidden = tokens * step.sizes.units // t
    scores = tokens * whole * (step.sizes.heads // t)
    recompute = step.recompute if recompute is None else recompute
    if recompute == "full":
        return {"input of norm1": beta * between}
    table = {
        "input of norm1": beta * between,
        "input of qkv": beta * between,
        "queries, keys, values": beta * tokens * (step.h + 2 * step.h_kv),
        "input of proj": beta * inside,
        "mask of drop1": MASK * between,
        "input of norm2": beta * between,
    }
    if step.sizes.is_gated:
        table |= {"input of gate": beta * between}
        table |= dict.fromkeys(("output of gate", "output of up", "input of down"), beta * hidden)
    else:
        table |= {"input of up": beta * between, "gelu": beta * hidden, "input of down": beta * hidden}
    table["mask of drop2"] = MASK * between
    if recompute == "none" and c == 1:
        table |= {
            "softmax": beta * scores,
            "mask of attention": MASK * scores,
            "output of attention's dropout": beta * scores,
        }
    return table


def flops(*, batch: int, s: int, h: int, layers: int, vocab: int, recompute: str = "none") -> Fraction:
    """Operations of matrix products in an iteration, as if attention were dense.

        none         72 B L s h^2 (1 + s / (6 h) + V / (12 h L))        forward once, backward twice as much
        full         96 B L s h^2 (1 + s / (6 h) + V / (16 h L))        the layers forward once more
        selective    72 B L s h^2 (1 + s / (3 h) + V / (12 h L))

    The last is the paper's: it counts attention twice as a whole.  Attention here makes q k^T again, 2 B s^2 h a layer.
    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; Korthikanti et al. 2022, appendix A, eq. 8 and 9.
    """
    factor = 96 if recompute == "full" else 72
    attention = Fraction(s, (3 if recompute == "selective" else 6) * h)
    logits = Fraction(vocab, (16 if recompute == "full" else 12) * h * layers)
    return factor * batch * layers * s * h * h * (1 + attention + logits)


def formula(step: Step) -> str:
    """The paper's formula of a layer for this layout, as it stands there."""
    ring = step.cp > 1
    s = "s/c" if ring else "s"
    if step.recompute == "full":
        return f"2{s}bh" + ("/t" if step.is_cut else "")
    scores = step.recompute == "none" and not ring
    if step.tp == 1:
        return f"{s}bh(34 + 5as/h)" if scores else f"34{s}bh"
    if step.is_cut:
        return f"{s}bh/t(34 + 5as/h)" if scores else f"34{s}bh/t"
    return f"{s}bh(10 + 24/t + 5as/(ht))" if scores else f"{s}bh(10 + 24/t)"
