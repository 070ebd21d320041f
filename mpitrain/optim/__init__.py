"""Optimizers: one paper, one function; clipping by the global norm; learning rates as functions of the update."""

from mpitrain.optim.adam import AdamW
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sgd import Sgd

__all__ = ["AdamW", "Optimizer", "Sgd"]
