"""Autograd: a tape that is a list, and pure pairs of functions."""

from mpitrain.autograd import ops
from mpitrain.autograd.function import Function, unbroadcast
from mpitrain.autograd.lazy import Lazy, Product, RowSum
from mpitrain.autograd.no_grad import no_grad
from mpitrain.autograd.tape import Tape
from mpitrain.autograd.tensor import Tensor

__all__ = ["Function", "Lazy", "Product", "RowSum", "Tape", "Tensor", "no_grad", "ops", "unbroadcast"]
