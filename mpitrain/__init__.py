"""mpitrain: training of large neural networks with one process per MPI rank.

The public names, in the order in which one meets them.  They are imported when they are first used, so that
`import mpitrain` costs next to nothing: eight ranks import at once.

    from mpitrain import GPT, AdamW, Executor, GPTConfig, Mesh, Tokens, load, one_stage, with_update, world
"""

from importlib import import_module
from typing import Any

from mpitrain.blas import load_numpy

load_numpy()  # before any module here imports it

__version__ = "0.1.0"

_HOMES = {
    "world": "comm.world",  # the ranks, whoever started them
    "LocalWorld": "comm.local",
    "Mesh": "comm.mesh",  # named axes of ranks
    "device_of_rank": "comm.devices",  # the CPU, or its GPU
    "Communicator": "comm.communicator",
    "Tensor": "autograd",
    "Tape": "autograd",
    "Function": "autograd",
    "no_grad": "autograd",  # nothing inside is recorded
    "Shard": "spec",
    "Parameter": "nn.parameter",
    "Module": "nn.module",
    "Sequential": "nn.containers",
    "ModuleList": "nn.containers",
    "GPT": "models.gpt",
    "GPTConfig": "models.gpt",
    "Llama": "models.llama",
    "LlamaConfig": "models.llama",
    "Routing": "routing",  # of a mixture of experts
    "MLP": "models.mlp",
    "load": "data.corpus",
    "Tokens": "data.tokens",
    "AdamW": "optim",
    "Sgd": "optim",
    "Adafactor": "optim",
    "Group": "optim",  # of parameters, with another learning rate
    "one_stage": "pipeline.schedules",
    "with_update": "pipeline.passes",
    "complete": "pipeline.passes",  # the rows of a schedule by its name
    "Partition": "pipeline.partition",
    "Executor": "pipeline.executor",
    "FlatReducer": "parallel.data",
    "BucketedReducer": "parallel.data",
    "listen": "events",
    "tracing": "debug.trace.tracing",  # what every rank does, and when, in files
    "record": "debug.recorder",  # what a rank sends and receives, to run it again alone
    "digesting": "debug.digests",  # what two runs can be compared by
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
