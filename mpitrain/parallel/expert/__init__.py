"""Mixture of experts: who does what with which token, and the messages that take it there and back.

    router    a probability for each expert, and the losses that keep the router useful
    assign    which tokens go where, when an expert has room for so many of a row
    experts   tokens to their experts, through them, and back
    overlap   messages to experts that travel while this rank computes
    moe       router, assignment and experts as the layer that stands in the place of an MLP
    counted   what a step says of its routing

The numbers of a mixture are a `mpitrain.routing.Routing`.
"""

from mpitrain.parallel.expert.moe import Moe, RoutedTokens

__all__ = ["Moe", "RoutedTokens"]
