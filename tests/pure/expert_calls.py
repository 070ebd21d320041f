"""A layer of experts on one rank, and random ways through it."""

import numpy as np

from mpitrain.autograd import ops

RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.standard_normal(shape)


def routed(tokens, experts, choices, dropped=0.3):
    """(ids, rows, counts, places) of random choices, some of which come to nothing."""
    ids = np.argsort(RNG.random((*tokens, experts)), -1)[..., :choices]
    order = np.argsort(ids.reshape(-1), kind="stable")
    order = order[RNG.random(order.size) >= dropped]
    places = np.full(ids.size, -1)
    places[order] = np.arange(order.size)
    counts = np.bincount(ids.reshape(-1)[order], minlength=experts)
    return ids, order // choices, counts, places.reshape(ids.shape)


def layer(x, p, up, down, ids, rows, counts, places, renormalize):
    """A layer of experts on one rank."""
    hidden = ops.gelu_tanh(ops.grouped_matmul(ops.take_rows(x, rows), up, counts))
    return ops.combine(ops.grouped_matmul(hidden, down, counts), ops.gates(p, ids, renormalize), places)


def numbers(tokens, experts, h):
    p = RNG.uniform(0.1, 1, (*tokens, experts))
    return normal(*tokens, h), p, normal(experts, h, 4 * h), normal(experts, 4 * h, h)
