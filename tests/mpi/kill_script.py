"""A training in which one rank comes to grief.   MPITRAIN_FAULTS="..." python kill_script.py RUN [FLAGS...]

The environment tells the faults, as to any script (docs/how-to/inject-faults.md), and they are noted in
RUN/.faults-done/ as they strike.  Two events are this script's own: `action:import`, while most of mpitrain is still to
be imported and MPI is not there yet, and `action:finalise`, when the training is over.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from mpitrain import faults
from mpitrain.events import LISTENERS, Event, alone, tell

FLAGS = ["--data", __file__, *"--model gpt-tiny --batch 8 --steps 3 --save-every 1 --eval-every 0".split()]
FLAGS += ["--sample-length", "0"]
ARRIVED = "arrived"
"""Name of a file beside the run's folder: when the last rank came to where MPI starts."""


def reach(name: str) -> None:
    tell(LISTENERS.get(), Event("action", "begin", name, {}))


if __name__ == "__main__":
    run = sys.argv[1]
    text = os.environ.get(faults.VARIABLE)
    if text:
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
        with alone():  # world() reads them, too
            faults.begin(text, SimpleNamespace(rank=rank, size=sys.maxsize))
            faults.remember(run)
            reach("import")

    from mpitrain.comm.world import world
    from mpitrain.train import main

    Path(run).with_name(ARRIVED).touch()
    world()
    faults.remember(run)
    code = main([*FLAGS, "--run", run, *sys.argv[2:]])
    reach("finalise")
    sys.exit(code)
