"""What a training run is, and what it was predicted to send and to hold: kept in its trace, to be compared with later.

The predictions are those of this rank, made from the settings before the first step; so a trace needs neither the
corpus nor the checkpoint of the run to be compared with theory.
"""

from __future__ import annotations

from typing import Any

from mpitrain.assemble import step_of
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config
from mpitrain.memory_table import predicted
from mpitrain.models.decoder import Decoder
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.plan.traffic import traffic


def facts_of(config: Config, mesh: Mesh, model: Decoder) -> dict[str, Any]:
    """Layout, schedule and predictions of this rank, as JSON holds them.

    Returns:
        `world`: mpi, local or alone; `layout`: axis -> ranks; `coords`: axis -> this rank's place; `schedule`;
        `traffic`: lines (axis, cause, verb, calls, bytes) of `steps` steps, `at_most` where experts may be sent less;
        `memory`: owner -> bytes; `checked`: whether ranks compare digests as they go, which `traffic` leaves out.
    """
    step = step_of(config, mesh, model)
    sent = traffic(step)
    elsewhere = model.elsewhere
    return {
        "world": mesh.world.kind,
        "layout": dict(mesh.sizes),
        "coords": dict(mesh.coords),
        "schedule": {
            "name": config.schedule_name,
            "microbatches": config.microbatches,
            "chunks": config.num_chunks,
            "slices": config.num_slices,
            "drains": SCHEDULES[config.schedule_name].versions is None,
        },
        "traffic": {
            "steps": sent.row,
            "at_most": sent.at_most,
            "lines": [[*names, calls, float(nbytes)] for names, (calls, nbytes) in sent.sums().items()],
        },
        "checked": config.check,
        "memory": predicted(step, config, elsewhere.plan.what if elsewhere is not None else ()),
    }
