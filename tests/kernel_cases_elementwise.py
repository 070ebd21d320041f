"""Cases of kernels that treat every element on its own: GELU, dropout, residual, SwiGLU, noise, halves, updates.

Nothing is launched for arrays without elements: such cases are marked as those that references serve.
"""

import numpy as np
from kernel_case import Case, Wide, normal

from mpitrain.rng import absorb

HALVES = ("float16", "bfloat16")


def hashes(rng, *shape):
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def by(shape):
    return "x".join(map(str, shape))


def wide_normal(rng, *shape):
    return Wide(normal(rng, *shape))


def gelus():
    def with_bias(rng, *shape, bias=normal):
        return {"x": 2 * normal(rng, *shape), "b": bias(rng, shape[-1])}

    made = {}
    for name in ("gelu_tanh", "gelu_erf"):

        def plain(k, a, name=name):
            return getattr(k, name)(a.x)

        def biased(k, a, name=name):
            return getattr(k, name)(a.x, a.b)

        def transposed(k, a, name=name):
            return getattr(k, name)(a.x.swapaxes(0, 1), a.b)

        def of_points(rng):
            return {"x": np.array([np.nan, 1e4, -1e4, 90.0, -90.0, 0.0, 1e-7, -11.5, -5.0])}

        for shape in ((1,), (11, 105), (0, 5)):
            made[f"{name} {by(shape)}"] = Case(
                name, lambda rng, shape=shape: {"x": 3 * normal(rng, *shape)}, plain, by_reference=0 in shape
            )
        made[f"{name} at its ends"] = Case(name, of_points, plain)
        made[f"{name} bias 1x1"] = Case(name, lambda rng: with_bias(rng, 1, 1), biased)
        made[f"{name} bias 2x9x132"] = Case(name, lambda rng: with_bias(rng, 2, 9, 132), biased)
        made[f"{name} wide bias 3x131"] = Case(name, lambda rng: with_bias(rng, 3, 131, bias=wide_normal), biased)
        made[f"{name} bias, transposed"] = Case(
            name, lambda rng: {"x": normal(rng, 6, 3), "b": normal(rng, 6)}, transposed
        )
        made[f"{name} bias 4096x768"] = Case(name, lambda rng: with_bias(rng, 4096, 768), biased, cost="gpu")
    return made


def gelu_gradients():
    def make(rng, *shape):
        return {"g": normal(rng, *shape), "slope": normal(rng, *shape)}

    def plain(k, a):
        return k.gelu_backward(a.g, a.slope, False)

    def biased(k, a):
        return k.gelu_backward(a.g, a.slope, True)

    def broadcast(k, a):
        return k.gelu_backward(a.xp.broadcast_to(a.g[:1], a.slope.shape), a.slope, True)

    def case(call, *shape, **more):
        return Case("gelu_backward", lambda rng: make(rng, *shape), call, **more)

    return {
        "gelu_backward 1": case(plain, 1),
        "gelu_backward 5x3x71": case(plain, 5, 3, 71),
        "gelu_backward bias 1x1": case(biased, 1, 1),
        "gelu_backward bias 4x7x36": case(biased, 4, 7, 36),
        "gelu_backward bias 19x131": case(biased, 19, 131),
        "gelu_backward bias 0x131": case(biased, 0, 131),
        "gelu_backward bias, broadcast gradient": case(broadcast, 9, 8),
        "gelu_backward bias 500x200": case(biased, 500, 200, factor=4, cost="slow"),
        "gelu_backward bias 8192x3072": case(biased, 8192, 3072, factor=20, cost="gpu"),
    }


def droppers():
    def make(rng, *shape):
        return {"x": normal(rng, *shape), "y": normal(rng, *shape), "b": normal(rng, shape[-1]),
                "rows": hashes(rng, *shape[:-1]), "wide": Wide(normal(rng, shape[-1]))}  # fmt: skip

    def dropout(p, *shape, **more):
        return Case(
            "dropout", lambda rng: make(rng, *shape), lambda k, a: k.dropout(a.x, a.rows, p), masks=(0,), **more
        )

    def residual(call, *shape, **more):
        return Case("residual", lambda rng: make(rng, *shape), call, **more)

    def rows_of_a_step(rng):
        rows = absorb(absorb(np.uint64(7), np.arange(3)[:, None]), np.arange(5)[None, :])
        return {"x": normal(rng, 3, 5, 140), "rows": rows}

    def jitter(*shape, amount=0.1, **more):
        return Case(
            "jitter", lambda rng: make(rng, *shape), lambda k, a: k.jitter(a.x, a.rows, amount), masks=(0,), **more
        )

    def whole(k, a):
        return k.residual(a.x, a.y, a.b, a.rows, 0.3)

    return {
        "dropout 1": dropout(0.5, 1, 1),
        "dropout 3x5x140": Case("dropout", rows_of_a_step, lambda k, a: k.dropout(a.x, a.rows, 0.1), masks=(0,)),
        "dropout 9x131, a little": dropout(0.001, 9, 131),
        "dropout 9x131, nearly all": dropout(1 - 2.0**-32, 9, 131),
        "dropout 9x31, nothing": dropout(0.0, 9, 31),
        "dropout 9x31, all": dropout(1.0, 9, 31, by_reference=True),
        "dropout 0x31": dropout(0.1, 0, 31, by_reference=True),
        "dropout 31": dropout(0.25, 31),
        "dropout, every other row": Case(
            "dropout",
            lambda rng: make(rng, 8, 12),
            lambda k, a: k.dropout(a.x[::2], a.rows[::2], 0.4),
            masks=(0,),
        ),
        "dropout 8192x768": dropout(0.1, 8192, 768, cost="gpu"),
        "residual 1": residual(lambda k, a: k.residual(a.x, a.y, None, None, 0.0), 1),
        "residual 1031": residual(lambda k, a: k.residual(a.x, a.y, None, None, 0.1), 1031),
        "residual bias 7x66": residual(lambda k, a: k.residual(a.x, a.y, a.b, None, 0.1), 7, 66),
        "residual dropped 7x66": residual(lambda k, a: k.residual(a.x, a.y, None, a.rows, 0.1), 7, 66),
        "residual bias dropped 2x9x133": residual(whole, 2, 9, 133),
        "residual bias dropped 10x128": residual(whole, 10, 128),
        "residual wide bias dropped 3x20": residual(lambda k, a: k.residual(a.x, a.y, a.wide, a.rows, 0.3), 3, 20),
        "residual bias dropped 0x20": residual(whole, 0, 20, by_reference=True),
        "residual, every other column": residual(
            lambda k, a: k.residual(a.x[:, ::2], a.y[:, ::2], a.b[::2], a.rows, 0.3), 5, 40
        ),
        "residual of shapes that broadcast": residual(
            lambda k, a: k.residual(a.x, a.y[:1], a.b, a.rows, 0.3), 5, 40, by_reference=True
        ),
        "residual bias dropped 8192x768": residual(whole, 8192, 768, cost="gpu"),
        "jitter 1": jitter(1, 1),
        "jitter 2x5x131": jitter(2, 5, 131),
        "jitter 6x64, a lot": jitter(6, 64, amount=0.9),
        "jitter 0x64": jitter(0, 64, by_reference=True),
    }


def gates():
    def make(rng, *shape):
        return {"g": normal(rng, *shape), "gate": 4 * normal(rng, *shape), "up": normal(rng, *shape)}

    def ends(rng):
        gate = np.array([-1e4, 1e4, -100.0, 100.0, 0.0, np.nan, -20.0, 20.0])
        return {"g": normal(rng, 8), "gate": gate, "up": normal(rng, 8)}

    def forward(k, a):
        return k.swiglu(a.gate, a.up)

    def backward(k, a):
        return k.swiglu_backward(a.g, a.gate, a.up)

    made = {}
    for name, call in (("swiglu", forward), ("swiglu_backward", backward)):
        for shape in ((1,), (5, 7, 33), (0, 4)):
            made[f"{name} {by(shape)}"] = Case(
                name, lambda rng, shape=shape: make(rng, *shape), call, by_reference=0 in shape
            )
        made[f"{name} at its ends"] = Case(name, ends, call)
    made["swiglu of halves of one array"] = Case(
        "swiglu", lambda rng: {"both": normal(rng, 5, 34)}, lambda k, a: k.swiglu(a.both[:, :17], a.both[:, 17:])
    )
    return made


def erfs():
    def make(rng):
        return {"x": np.concatenate([np.linspace(-6.5, 6.5, 301), [np.nan, -np.inf, np.inf, 1e-6, 0.46875]])}

    return {
        "erf": Case("erf", make, lambda k, a: k.erf(a.x)),
        "erf, transposed": Case("erf", lambda rng: {"x": normal(rng, 3, 5)}, lambda k, a: k.erf(a.x.T)),
        "erf of nothing": Case("erf", lambda rng: {"x": normal(rng, 0)}, lambda k, a: k.erf(a.x), by_reference=True),
    }


def conversions():
    # Between two halves (ties, to the even one), below the smallest normal and the smallest at all, around the largest.
    points = [1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2**-14, 2**-14 - 2**-26, 2**-24, 2**-25,
              3 * 2**-26, 2**-133, 2**-134, 65504.0, 65519.99, 65520.0, 3.3895e38, 3.4e38, np.inf, 0.0]  # fmt: skip
    ends = np.array(points + [-x for x in points])

    def narrow(values, call, **more):
        return Case("narrow", lambda rng: {"x": Wide(values(rng))}, call, dtypes=HALVES, exact=(0,), **more)

    def widen(*shape, call=lambda k, a: k.widen(a.x), **more):
        return Case("widen", lambda rng: {"x": normal(rng, *shape)}, call, dtypes=HALVES, exact=(0,), **more)

    def into(k, a):
        out = a.xp.full(a.x.shape, np.nan, a.dtype)
        assert k.narrow(a.x, a.dtype, out=out) is out
        return out

    def wide_into(k, a):
        out = a.xp.full(a.x.shape, np.nan, np.float32)
        assert k.widen(a.x, out=out) is out
        return out

    def fresh(k, a):
        return k.narrow(a.x, a.dtype)

    def behind(k, a):
        out = a.xp.zeros(a.x.size + 1, a.dtype)
        k.narrow(a.x, a.dtype, out=out[1:])
        return out

    def wide_behind(k, a):
        out = a.xp.zeros(a.x.size + 1, np.float32)
        k.widen(a.x, out=out[1:])
        return out

    def part(k, a):
        out = a.xp.zeros(8, a.dtype)
        k.narrow(a.x, a.dtype, out=out[::2])
        return out

    return {
        "narrow ends": narrow(lambda rng: ends, fresh),
        "narrow 1031": narrow(lambda rng: normal(rng, 1031), fresh),
        "narrow 7x9 into": narrow(lambda rng: normal(rng, 7, 9), into),
        "narrow, transposed": narrow(lambda rng: normal(rng, 7, 9), lambda k, a: k.narrow(a.x.T, a.dtype)),
        "narrow into every other element": narrow(lambda rng: normal(rng, 4), part, by_reference=True),
        "narrow to an odd place": narrow(lambda rng: normal(rng, 40), behind),
        "narrow of nothing": narrow(lambda rng: normal(rng, 0), fresh, by_reference=True),
        "widen ends": Case(
            "widen",
            lambda rng: {"x": ends[~(abs(ends) > 65504) | np.isinf(ends)]},
            lambda k, a: k.widen(a.x),
            dtypes=HALVES,
            exact=(0,),
        ),
        "widen 1031": widen(1031),
        "widen 7x9 into": widen(7, 9, call=wide_into),
        "widen to an odd place": widen(40, call=wide_behind),
        "widen of nothing": widen(0, by_reference=True),
        "narrow NaN": Case(
            "narrow",
            lambda rng: {"x": Wide(np.array([np.nan, 1.0, -np.nan]))},
            fresh,
            dtypes=HALVES,
        ),
    }


def updates():
    def make(rng, *shape):
        return {"p": normal(rng, *shape), "g": normal(rng, *shape), "m": normal(rng, *shape),
                "v": normal(rng, *shape) ** 2}  # fmt: skip

    def adamw(k, a):
        k.adamw(a.p, a.g, a.m, a.v, update=3, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
        return a.p, a.m, a.v

    def cut(k, a):
        arrays = a.p[3:50], a.g[3:50], a.m[3:50], a.v[5:52]
        k.adamw(*arrays, update=1, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.0)
        return a.p, a.m, a.v

    def update(call, *shape, **more):
        return Case(
            "adamw",
            lambda rng: make(rng, *shape),
            call,
            writes=("p", "m", "v"),
            dtypes=("float64", "float32"),
            **more,
        )

    def squares(make, call=lambda k, a: k.sum_of_squares(a.x), **more):
        return Case("sum_of_squares", lambda rng: {"x": make(rng)}, call, **more)

    singles = ("float32", *HALVES)
    return {
        "adamw 1": update(adamw, 1),
        "adamw 1031": update(adamw, 1031),
        "adamw of nothing": update(adamw, 0, by_reference=True),
        "adamw of a part": update(cut, 60),
        "adamw 5 million": update(adamw, 5_000_003, cost="gpu"),
        "sum_of_squares 1": squares(lambda rng: normal(rng, 1), dtypes=("float64",)),
        "sum_of_squares 7x151": squares(lambda rng: normal(rng, 7, 151)),
        "sum_of_squares 1031, in double precision": squares(lambda rng: normal(rng, 1031), dtypes=singles, factor=1e-7),
        "sum_of_squares beyond single precision": squares(
            lambda rng: np.full(40, 3e38), dtypes=("float32", "bfloat16"), factor=1e-7
        ),
        "sum_of_squares, transposed": squares(lambda rng: normal(rng, 7, 9), lambda k, a: k.sum_of_squares(a.x.T)),
        "sum_of_squares of nothing": squares(
            lambda rng: normal(rng, 0), lambda k, a: a.xp.asarray(k.sum_of_squares(a.x), np.float64)
        ),
        "sum_of_squares of infinity": squares(lambda rng: np.where(np.arange(300) == 277, np.inf, 1.0)),
        "sum_of_squares of NaN": squares(lambda rng: np.where(np.arange(300) == 277, np.nan, np.inf)),
        "sum_of_squares 30 million": squares(
            lambda rng: normal(rng, 30_000_001), dtypes=singles, factor=1e-6, cost="gpu"
        ),
    }


CASES = {**gelus(), **gelu_gradients(), **droppers(), **gates(), **erfs(), **conversions(), **updates()}
