"""The device of every rank: GPUs of a host are dealt out to its ranks in turn.

    device = device_of_rank(world(), "cuda")
    model = GPT(config, mesh, xp=device.xp)

A scheduler may have dealt them out before, so that every rank sees one only (Slurm's `--gpus-per-task`); then that is
the one it takes.  More ranks than GPUs share them, which is for tries: it works, and no rank is faster for it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from mpitrain.comm.together import together
from mpitrain.comm.world import World
from mpitrain.device import CPU, Device, open_device
from mpitrain.recording.outside import heard


class Memory(NamedTuple):
    """Memory that ranks share.

    nbytes: all of it; ranks: of the job, that share it; of_device: a GPU's, not the host's.
    """

    nbytes: int
    ranks: int
    of_device: bool = False


def device_of_rank(world: World, kind: str) -> Device:
    """This rank's device, opened on every rank or on none.  Collective over the world unless `kind` is `cpu`.

    Args:
        world: all ranks.
        kind: one of `device.DEVICES`.

    Returns:
        The device; its `ranks` says how many ranks of this job share the most crowded device, and its `others` names
        the chips of other ranks that are not of this one's kind.

    Raises:
        DeviceError: of the lowest rank that has none; on every rank.

    Cost: three small messages besides what opening one costs.
    """
    if kind == "cpu":
        return CPU
    hosts = world.exchange(world.host)
    local_rank = hosts[: world.rank].count(world.host)
    device = together(world, lambda: open_device(kind, local_rank))
    assert device is not None
    found = world.exchange(heard("its device", lambda: [device.identity, device.name]))
    crowds = Counter((host, identity) for host, (identity, _) in zip(hosts, found, strict=True))
    others = sorted({name for _, name in found} - {device.name})
    return replace(device, ranks=max(crowds.values()), others=tuple(others))


def memory_of(world: World, device: Device) -> Memory:
    """The memory in which this rank's arrays live.  Collective over the world."""
    here = world.exchange(world.host).count(world.host)
    if device.kind != "cpu":
        return Memory(device.memory, device.ranks, of_device=True)
    return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), here)
