"""mpitrain: training of large neural networks with one process per MPI rank.

The parts, in the order in which one meets them, live in modules of their own and are imported from there:

    mpitrain.comm.world      world(): the ranks, whoever started them
    mpitrain.comm.mesh       Mesh: named axes of ranks
    mpitrain.autograd        Tensor, Tape, Function
    mpitrain.collectives     messages that have a gradient
    mpitrain.nn              parameters, modules, layers
    mpitrain.models          GPT, MLP
    mpitrain.optim           AdamW, Sgd, schedules, clipping
    mpitrain.pipeline        the step as a list of actions, and the executor that runs it
    mpitrain.checkpoint      save and resume
    mpitrain.train           all of it, from a command line
"""

__version__ = "0.1.0"
