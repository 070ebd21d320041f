"""Cases of kernels that take many arrays at once, and of hashes of rows."""

from itertools import pairwise

import numpy as np
from kernel_case import Case, Wide, normal

from mpitrain.kernels.several import AdamwRun, Several, SgdRun

CUTS = (0, 7, 7, 100, 101, 103, 700)
"""Where runs begin and end: one of nothing, one of a single element, and beginnings that are no multiples of four."""


def parts(x, cuts=CUTS):
    return [x[start:stop] for start, stop in pairwise(cuts)]


def sums():
    def make(rng, size=700):
        return {"x": normal(rng, size), "y": normal(rng, 3, 5), "z": np.where(np.arange(40) == 9, np.nan, 1.0)}

    def added(k, a, arrays):
        several = Several(arrays)
        for _ in range(2):  # the second time as it was prepared
            found = k.sums_of_squares(several)
        return a.xp.asarray(found, np.float64)

    def case(arrays, **more):
        return Case("sums_of_squares", make, lambda k, a: added(k, a, arrays(a)), **more)

    return {
        "sums_of_squares of one": case(lambda a: [a.y]),
        "sums_of_squares of parts of several": case(lambda a: [a.y, *parts(a.x), a.z, a.x[5:6]]),
        "sums_of_squares, some are empty buffers": case(
            lambda a: [a.xp.empty(0, a.dtype), a.x[:0], a.y, *parts(a.x), a.z[:0]]
        ),
        "sums_of_squares of nothing": case(lambda a: [a.xp.empty(0, a.dtype), a.y[:0]]),
        "sums_of_squares, in double precision": case(
            lambda a: [a.x], dtypes=("float32", "float16", "bfloat16"), factor=1e-7
        ),
        "sums_of_squares, one is transposed": case(lambda a: [a.y.T, *parts(a.x)]),
        "sums_of_squares of nothing and something": case(lambda a: [a.xp.empty(0, a.dtype), a.y, a.x[:0], *parts(a.x)]),
        "sums_of_squares of many chunks": Case(
            "sums_of_squares",
            lambda rng: make(rng, 50_003),
            lambda k, a: added(k, a, parts(a.x, (0, 3, 20_000, 20_000, 50_000, 50_003))),
            cost="slow",
        ),
    }


def updates():
    numbers = {"update": 3, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}

    def make(rng, size=700):
        arrays = {"p": normal(rng, size), "g": normal(rng, size), "m": normal(rng, size), "v": normal(rng, size) ** 2}
        return {**{name: Wide(x) for name, x in arrays.items()}, "halves": np.zeros(size)}

    def with_halves(k, a, cuts=CUTS):
        vectors = zip(*(parts(x, cuts) for x in (a.p, a.g, a.m, a.v, a.halves)), strict=True)
        runs = Several([AdamwRun(*of, 1.0 - 0.25 * i, 0.1 * (i % 2)) for i, of in enumerate(vectors)])
        k.adamw_runs(runs, **numbers)
        k.adamw_runs(runs, **{**numbers, "update": 4, "lr": 0.02})
        return a.p, a.m, a.v, a.halves

    def without(k, a):
        own = a.p[1:401], a.g[:400], a.m[2:402], a.v[3:403]  # wherever they lie
        runs = [AdamwRun(*(x[:30] for x in own), None, 1.0, 0.0), AdamwRun(*(x[30:] for x in own), None, 0.5, 0.1)]
        k.adamw_runs(Several(runs), **numbers)
        return a.p, a.m, a.v

    def mixed(k, a):
        whole = a.p[:300], a.g[:300], a.m[:300], a.v[:300]
        strided = a.p[300::2], a.g[300::2], a.m[300::2], a.v[300::2]
        runs = [AdamwRun(*whole, None, 1.0, 0.1), AdamwRun(*strided, None, 1.0, 0.1)]
        k.adamw_runs(Several(runs), **numbers)
        return a.p, a.m, a.v

    written = {"writes": ("p", "m", "v", "halves")}
    return {
        "adamw_runs with halves": Case("adamw_runs", make, with_halves, dtypes=("float16", "bfloat16"), **written),
        "adamw_runs": Case("adamw_runs", make, without, dtypes=("float64", "float32"), **written),
        "adamw_runs, with gaps": Case("adamw_runs", make, mixed, dtypes=("float64", "float32"), **written),
        "adamw_runs of many chunks": Case(
            "adamw_runs",
            lambda rng: make(rng, 40_000),
            lambda k, a: with_halves(k, a, (0, 11, 20_000, 39_990)),
            dtypes=("float16",),
            cost="slow",
            **written,
        ),
    }


def descents():
    def make(rng, size=700):
        arrays = {name: Wide(normal(rng, size)) for name in ("p", "g", "u")}
        return {**arrays, "halves": np.zeros(size)}

    def descend(momentum, nesterov, halves, decay=0.1):
        def call(k, a):
            none = [None] * (len(CUTS) - 1)
            us, hs = parts(a.u) if momentum else none, parts(a.halves) if halves else none
            vectors = zip(parts(a.p), parts(a.g), us, hs, strict=True)
            runs = Several([SgdRun(*of, 1.0 - 0.25 * i, decay * (i % 2)) for i, of in enumerate(vectors)])
            k.sgd_runs(runs, lr=0.1, momentum=momentum, nesterov=nesterov)
            k.sgd_runs(runs, lr=0.05, momentum=momentum, nesterov=nesterov)
            return a.p, a.u, a.halves if halves else None

        dtypes = ("float16", "bfloat16") if halves else ("float64", "float32")
        return Case("sgd_runs", make, call, dtypes=dtypes, writes=("p", "u", "halves"))

    def strided(k, a):
        k.sgd_runs(Several([SgdRun(a.p[::2], a.g[::2], a.u[::2], None, 1.0, 0.1)]), lr=0.1, momentum=0.5, nesterov=True)
        return a.p, a.u

    return {
        "sgd_runs": descend(0.0, False, False),
        "sgd_runs with momentum": descend(0.9, False, False),
        "sgd_runs with momentum and halves": descend(0.9, False, True),
        "sgd_runs of Nesterov": descend(0.9, True, False),
        "sgd_runs of halves": descend(0.0, False, True),
        "sgd_runs, with gaps": Case(
            "sgd_runs", make, strided, dtypes=("float64", "float32"), writes=("p", "u"), by_reference=True
        ),
    }


def hashes():
    key = np.uint64(0x0123456789ABCDEF)

    def make(rng, *sizes):
        return {f"n{i}": rng.integers(-(2**62), 2**62, n) for i, n in enumerate(sizes)}

    def pairs(k, a):
        return k.hash_rows(a.n0, key, a.n1)

    def triples(k, a):
        return k.hash_rows(a.n0, key, a.n1, a.n2)

    def case(call, *sizes, **more):
        more = {"exact": (0,), "dtypes": ("float32",), **more}
        return Case("hash_rows", lambda rng: make(rng, *sizes), call, **more)

    return {
        "hash_rows 1x1": case(pairs, 1, 1),
        "hash_rows 5x67": case(pairs, 5, 67),
        "hash_rows 3x2x71": case(triples, 3, 2, 71),
        "hash_rows 3x0": case(pairs, 3, 0, by_reference=True),
    }


CASES = {**sums(), **updates(), **descents(), **hashes()}
