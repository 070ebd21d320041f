"""ZeRO: ranks that would all hold the same weights, gradients and optimizer state keep each its rows of them.

    stage 1   masters and moments         gradients are reduce-scattered once a step, weights gathered after the update
    stage 2   gradients as well           reduce-scattered as they become final, in every micro-batch
    stage 3   weights as well             gathered for each part of the model when it works, forwards and backwards

The numbers are those of data parallelism: a rank updates the same elements by the same gradients, only fewer of them.

    reducer.py   gradients to their owners, updated weights to everybody
    gather.py    weights of a part of the model, when it works

Paper: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from mpitrain.parallel.zero.gather import GatheredUnit, gather_units
from mpitrain.parallel.zero.reducer import RowReducer

__all__ = ["GatheredUnit", "RowReducer", "gather_units"]
