"""Train a GPT on the source text of Python's standard library, or on any text of yours.

    ./run_mpi.sh -n 8 examples/train_gpt.py            8 MPI ranks; sets everything up first
    mpirun -n 8 python examples/train_gpt.py           the same where mpitrain is installed
    python examples/train_gpt.py --steps 200           one rank, no MPI
    mpitrain local -n 4 examples/train_gpt.py          4 ranks as threads of one process, no MPI

`--help` lists the options.  The same options give the same training run on any number of ranks.
"""

import sys

from mpitrain.cli import guarded
from mpitrain.train import main

if __name__ == "__main__":
    sys.exit(guarded(main))
