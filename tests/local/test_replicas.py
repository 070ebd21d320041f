"""Replicas that do not hold the same bits are found, with rank and tensor."""

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import StateError
from mpitrain.models.mlp import MLP
from mpitrain.parallel.replicas import check_replicas


def build(spoil_rank, spoil_name):
    mesh = Mesh(world())
    model = MLP((5, 7, 3), mesh, seed=1)
    for p in model.parameters():
        if mesh.world.rank == spoil_rank and p.name == spoil_name:
            p.data.reshape(-1).view(np.uint32)[-1] ^= 1  # the lowest bit of one element
    check_replicas(model.parameters(), mesh, "at the start")


def test_equal_replicas_pass():
    LocalWorld(3).run(build, -1, "")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["blocks.0.up.weight", "head.bias"])
def test_one_flipped_bit_is_reported_with_its_tensor(rank, name):
    """T4.4: the message names the parameter and a rank that differs."""
    with pytest.raises(StateError, match=f"{name} differs between ranks that share it, at the start: rank [012]"):
        LocalWorld(3).run(build, rank, name)
