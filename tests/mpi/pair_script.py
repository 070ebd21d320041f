"""Goes on from a checkpoint as examples/train_gpt.py does, and compares what each rank has loaded with what is stored.

CHECKPOINT is read by h5py, tensor by tensor, not by what is judged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kept_state import Watch, stored

from mpitrain.comm.world import world
from mpitrain.train import main

with Watch(parts=True) as watch:
    main(sys.argv[1:])
if "TEST_CHECKPOINT" in os.environ:
    count = watch.states[watch.first].check_against(stored(Path(os.environ["TEST_CHECKPOINT"])))
    print(f"rank {world().rank} has {count} tensors as they were stored")
