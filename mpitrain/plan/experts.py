"""How many weights the experts of a model have, from the sizes that papers print.

    expert_weights(layers=30, experts=2048, width=2080, hidden=6144)        Switch-C: 1.57e12

An expert is an MLP of its own; a gated one has three matrices.  Tables: Lepikhin et al. 2020, arXiv:2006.16668, table 1
and section 2.2; Fedus et al. 2021, arXiv:2101.03961, table 9.
"""

from __future__ import annotations


def expert_weights(*, layers: int, experts: int, width: int, hidden: int, gated: bool = False) -> int:
    """Weights of all experts of a model, without biases.

    Args:
        layers: those that have experts, of encoder and decoder together.
        experts: of each.
        width: of the stream.
        hidden: units of an expert.
        gated: whether hidden units are the product of two matrices' outputs (Shazeer 2020, arXiv:2002.05202).
    """
    return layers * experts * (3 if gated else 2) * width * hidden
