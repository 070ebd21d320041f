"""Optimizers: one paper, one function; clipping by the global norm; learning rates as functions of the update."""

from mpitrain.optim.adafactor import Adafactor
from mpitrain.optim.adam import AdamW
from mpitrain.optim.groups import Group
from mpitrain.optim.optimizer import Optimizer
from mpitrain.optim.sgd import Sgd

__all__ = ["Adafactor", "AdamW", "Group", "Optimizer", "Sgd"]
