"""Words that broadcast, and words that look at one element at a time."""

from __future__ import annotations

import math

import numpy as np
from fuzz.vocabulary import Op

ERF = np.vectorize(math.erf, otypes=[float])


def draw_pair(g):
    a = g.value()
    b = g.operand(a)
    return ([a, b] if g.chance(0.5) else [b, a]), {}


def draw_quotient(g):
    a = g.value()
    b = g.operand(a)
    inputs = [a, b] if g.chance(0.5) else [b, a]
    if g.is_plain(inputs[1]) and np.abs(g.env[inputs[1]]).min(initial=1) < 0.2:
        inputs = inputs[::-1]
    if np.abs(g.env[inputs[1]]).min(initial=1) < 0.2:
        inputs[1] = g.positive(inputs[1])
    return inputs, {}


def draw_power(g):
    kind = g.choose(("number", "number", "number", "base", "tensor", "array"))
    if kind == "base":
        return [g.number(g.choose((2.0, 0.5, 3))), g.value()], {}
    x = g.value()
    if kind == "number":
        exponent = g.choose((0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, 2.0, 3.0))
        if exponent < 0 or exponent != int(exponent):
            x = g.positive(x)
        return [x, g.number(exponent)], {}
    if kind == "array":  # whole powers of anything that is not 0
        shape = g.fitting_shape(g.env[x].shape)
        return [x, g.leaf(shape, ("array", "constant"), g.integers(0, 4, shape).astype(float))], {}
    x = g.positive(x)
    return [x, g.operand(x, numbers=False)], {}


def power_choices(a, b):
    return np.sign(a) if (np.asarray(b) != np.round(b)).any() else np.zeros(())


def draw_where(g):
    a = g.value()
    b = g.operand(a)
    inputs = [a, b] if g.chance(0.5) else [b, a]
    shape = np.broadcast_shapes(np.shape(g.env[a]), np.shape(g.env[b]))
    return inputs, {"condition": g.mask(g.fitting_shape(shape))}


def draw_clip(g):
    low, high = sorted((g.choose((-1.5, -1, -0.5, 0.0, 0.25)), g.choose((0.5, 1, 1.5, 0.0))))
    x = g.value()
    if g.env[x].size and g.chance(0.4):  # on the border itself
        border = float(np.float16(g.choose(g.env[x].reshape(-1).tolist())))  # the same number in every dtype
        low, high = sorted((border, g.choose((low, high))))
    kind = g.choose(("both", "both", "low", "high", "numpy", "none"))
    if kind == "numpy":
        low, high = np.float64(low), np.float64(high)
    if kind in ("high", "none"):
        low = None
    if kind in ("low", "none"):
        high = None
    return [x], {"low": low, "high": high}


def clip(x, low, high):
    return np.array([min(max(v, -math.inf if low is None else low), math.inf if high is None else high) for v in x.flat]
                    ).reshape(x.shape)  # fmt: skip


def clip_choices(x, low, high):
    sides = np.zeros(x.shape)
    if low is not None:
        sides = sides + np.sign(x - low)
    if high is not None:
        sides = sides + 4 * np.sign(x - high)
    return sides


def torch_clip(t, x, low, high):
    return x * 1 if low is None and high is None else t.clamp(x, low, high)


def draw_one(g):
    return [g.value()], {}


def draw_positive(g):
    return [g.positive(g.value())], {}


def tensors(t, *values):
    return [v if isinstance(v, t.Tensor) else t.tensor(v, dtype=t.float64) for v in values]


def difference(a, b):
    return np.sign(np.asarray(a) - np.asarray(b))


def one(name, naive, torch=None, draw=draw_one, methods=(), **more):
    """A word of one tensor."""
    call = torch or (lambda t, x: getattr(t, name)(x))
    return Op(name, draw, (f"ops.{name}({{0}})", *methods), naive, call, **more)


WORDS = [
    Op("add", draw_pair, ("{0} + {1}", "ops.add({0}, {1})"), np.add, lambda t, a, b: a + b, weight=2),
    Op("sub", draw_pair, ("{0} - {1}", "ops.sub({0}, {1})"), np.subtract, lambda t, a, b: a - b, weight=2),
    Op("mul", draw_pair, ("{0} * {1}", "ops.mul({0}, {1})"), np.multiply, lambda t, a, b: a * b, weight=2),
    Op("div", draw_quotient, ("{0} / {1}", "ops.div({0}, {1})"), lambda a, b: a * (1 / np.asarray(b, float)),
       lambda t, a, b: a / b),
    Op("pow", draw_power, ("{0} ** {1}", "ops.pow({0}, {1})"), lambda a, b: np.asarray(a, float) ** b,
       lambda t, a, b: t.pow(a, b), choices=power_choices, shaken=("kinked", "exponent"),
       weight=1.5),
    Op("maximum", draw_pair, ("ops.maximum({0}, {1})",), lambda a, b: np.where(np.less(a, b), b, a),
       lambda t, a, b: t.maximum(*tensors(t, a, b)), choices=difference),
    Op("minimum", draw_pair, ("ops.minimum({0}, {1})",), lambda a, b: np.where(np.less(a, b), a, b),
       lambda t, a, b: t.minimum(*tensors(t, a, b)), choices=difference),
    Op("where", draw_where, ("ops.where({condition}, {0}, {1})",), lambda a, b, condition: np.where(condition, a, b),
       lambda t, a, b, condition: t.where(t.from_numpy(condition), *tensors(t, a, b))),
    one("neg", np.negative, methods=("-{0}",)),
    one("abs", np.abs, methods=("abs({0})", "{0}.abs()"), choices=np.sign),
    one("exp", np.exp, methods=("{0}.exp()",)),
    one("log", np.log, methods=("{0}.log()",), draw=draw_positive),
    one("sqrt", lambda x: x**0.5, methods=("{0}.sqrt()",), draw=draw_positive),
    one("tanh", np.tanh, methods=("{0}.tanh()",), blur="{0} * shake({0})"),
    one("sigmoid", lambda x: 0.5 + 0.5 * np.tanh(x / 2), blur="shake({0}) + {0} * shake({0})",
        roundings=3),
    one("silu", lambda x: x / (1 + np.exp(-x)), lambda t, x: t.nn.functional.silu(x),
        blur="shake({0}) + {0} * shake({0})"),
    one("softplus", lambda x: np.logaddexp(x, 0), lambda t, x: t.logaddexp(x, t.zeros_like(x))),
    one("relu", lambda x: np.where(x > 0, x, 0.0), choices=np.sign),
    one("sin", np.sin),
    one("cos", np.cos),
    one("erf", ERF),
    Op("clip", draw_clip, ("ops.clip({0}, {low}, {high})", "{0}.clip({low}, {high})"), clip, torch_clip,
       choices=clip_choices),
]  # fmt: skip
