"""Do the replicas agree?  Ranks that share a parameter must hold the same bits of it, at the start and ever after.

Ranks build their initial weights themselves from the same numbers; another NumPy, another processor or a broken memory
would let them drift apart without an error.  So they compare digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mpitrain.backend import Array, to_host
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import StateError
from mpitrain.nn.parameter import Flat


def check_replicas(flats: Sequence[Flat], mesh: Mesh, when: str) -> None:
    """Compare the weights of ranks that share them.  Collective over the world.

    Args:
        flats: this rank's flat buffers.
        mesh: the layout.
        when: for the message: "at the start", "after step 100".

    Raises:
        StateError: naming the first parameter that differs and the ranks, on every rank that shares it.

    Cost: one SHA-256 over the weights, one small message for each flat buffer.
    """
    for flat in flats:
        axis = mesh.merged(flat.axes)
        if len(set(axis.exchange(_digest(flat.weights)))) == 1:
            continue
        for p in flat.parameters:
            found = axis.exchange(_digest(p.data))
            odd = [rank for rank, digest in zip(axis.ranks, found, strict=True) if digest != found[0]]
            if odd:
                raise StateError(
                    f"{p.name} differs between ranks that share it, {when}: rank {odd[0]} against rank"
                    f" {axis.ranks[0]} ({len(odd)} of {axis.size} differ).\n"
                    "Do all hosts have the same processor type and the same NumPy?  `mpitrain doctor` on each tells."
                )


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(to_host(array)).view(np.uint8)).hexdigest()
