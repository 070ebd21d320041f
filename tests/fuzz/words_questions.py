"""Words that ask, and take one of two values by the answer: those are equal where the answer changes."""

from __future__ import annotations

import numpy as np
from fuzz.vocabulary import Op
from fuzz.words_elementwise import difference, draw_pair, tensors
from fuzz.words_reduce import extreme, lowest

QUESTIONS = {
    "less": ("<", np.less),
    "less_equal": ("<=", np.less_equal),
    "greater": (">", np.greater),
    "greater_equal": (">=", np.greater_equal),
    "equal": ("", np.equal),
    "not_equal": ("", np.not_equal),
}


def question(name):
    sign, ask = QUESTIONS[name]
    calls = [f"ops.where(ops.{name}({{0}}, {{1}}), {{0}}, {{1}})"]
    if sign:
        calls.append(f"ops.where({{0}} {sign} {{1}}, {{0}}, {{1}})")

    def torch(t, a, b):
        a, b = tensors(t, a, b)
        return t.where(t.from_numpy(np.asarray(ask(a.detach().numpy(), b.detach().numpy()))), a, b)

    return Op(
        name, draw_pair, tuple(calls), lambda a, b: np.where(ask(a, b), a, b), torch, choices=difference, weight=0.4
    )


def draw_place(g):
    x = g.value(lambda a: a.ndim > 0)
    if x is None:
        return None
    dim = g.dim(x)
    return ([x], {"dim": dim}) if g.env[x].shape[dim] else None


def place(name, ask, choices):
    def torch(t, x, dim):
        return t.gather(x, dim, t.from_numpy(ask(x.detach().numpy(), axis=dim, keepdims=True)))

    calls = (
        f"ops.gather_along({{0}}, ops.{name}({{0}}, {{dim}}, True), {{dim}})",
        f"ops.gather_along({{0}}, {{0}}.{name}({{dim}}, keepdims=True), {{dim}})",
    )
    return Op(
        name, draw_place, calls, lambda x, dim: np.take_along_axis(x, ask(x, axis=dim, keepdims=True), dim), torch,
        choices=lambda x, dim: choices(x, dim, True), weight=0.5,
    )  # fmt: skip


WORDS = [*map(question, QUESTIONS), place("argmax", np.argmax, extreme), place("argmin", np.argmin, lowest)]
