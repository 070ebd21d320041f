"""Cases of layer norm and RMS norm, alone and after a residual branch, and of their gradients.

A row of up to 8,192 elements stays in registers, a longer one is read again; a block has as many warps as the row needs
for 256 elements each.  Column sums go by groups of rows, eight warps of a block to a group.
"""

import numpy as np
from kernel_case import Case, Wide, normal

EPS = 1e-5
quiet = np.errstate(all="ignore")  # around calls on what is not finite, of which NumPy warns


def hashes(rng, *shape):
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def forward(rng, *shape, vector=normal):
    return {"x": 2 * normal(rng, *shape) + 3, "w": vector(rng, shape[-1]), "b": vector(rng, shape[-1])}


def wide_normal(rng, *shape):
    return Wide(normal(rng, *shape))


def norms():
    calls = {
        "layer_norm": lambda k, x, w, b: k.layer_norm(x, w, b, EPS),
        "rms_norm": lambda k, x, w, b: k.rms_norm(x, w, EPS),
    }
    made = {}
    for name, function in calls.items():

        def plain(k, a, function=function):
            return function(k, a.x, a.w, a.b)

        def transposed(k, a, function=function):
            return function(k, a.x.swapaxes(0, 1), a.w, a.b)

        def stepped(k, a, function=function):
            return function(k, a.x[:, ::2], a.w[::2], a.b[::2])

        def strange(rng):
            x = normal(rng, 6, 37)
            x[[0, 2, 4], [36, 0, 17]] = np.nan, np.inf, -np.inf
            return {"x": x, "w": normal(rng, 37), "b": normal(rng, 37)}

        def zeros(rng):
            return {"x": np.zeros((3, 8)), "w": normal(rng, 8), "b": normal(rng, 8)}

        for shape in ((1, 1), (5, 7), (3, 2, 12), (33,), (4, 260), (2, 517), (2, 1028)):
            made[f"{name} {'x'.join(map(str, shape))}"] = Case(
                name, lambda rng, shape=shape: forward(rng, *shape), plain
            )
        made |= {
            f"{name} 0x5": Case(name, lambda rng: forward(rng, 0, 5), plain, by_reference=True),
            f"{name} 3x20, wide weights": Case(name, lambda rng: forward(rng, 3, 20, vector=wide_normal), plain),
            f"{name} 3x21, wide weights": Case(name, lambda rng: forward(rng, 3, 21, vector=wide_normal), plain),
            f"{name}, transposed": Case(
                name, lambda rng: {**forward(rng, 6, 3), "w": normal(rng, 6), "b": normal(rng, 6)}, transposed
            ),
            f"{name}, every other column": Case(name, lambda rng: forward(rng, 5, 24), stepped),
            f"{name} of what is not finite": Case(name, strange, quiet(plain)),
            f"{name} of zeros": Case(name, zeros, plain),
            f"{name} 2x8197": Case(name, lambda rng: forward(rng, 2, 8197), plain, dtypes=("float32", "float16")),
            f"{name} 1x9000": Case(name, lambda rng: forward(rng, 1, 9000), plain, cost="slow"),
            f"{name} 8192x768": Case(name, lambda rng: forward(rng, 8192, 768), plain, cost="gpu"),
            f"{name} 1048579x4": Case(name, lambda rng: forward(rng, (1 << 20) + 3, 4), plain, cost="gpu"),
            f"{name} 33x20000": Case(name, lambda rng: forward(rng, 33, 20_000), plain, cost="gpu"),
        }
    # Far from zero a float32 has three digits after the point: what is left of a row is still normalised.
    made["layer_norm far from zero"] = Case(
        "layer_norm",
        lambda rng: {"x": np.round(8 * normal(rng, 4, 70)) + 4096, "w": np.ones(70), "b": np.zeros(70)},
        lambda k, a: k.layer_norm(a.x, a.w, a.b, EPS),
        dtypes=("float64", "float32"),
    )
    made["layer_norm of constant rows"] = Case(
        "layer_norm",
        lambda rng: {
            "x": np.full((3, 37), 1e4) + np.arange(3)[:, None] / 8,
            "w": normal(rng, 37),
            "b": normal(rng, 37),
        },
        lambda k, a: k.layer_norm(a.x, a.w, a.b, EPS)[:2],
        exact=(0, 1),
    )
    return made


def branches():
    def make(rng, *shape, vector=normal):
        return {"x": normal(rng, *shape), "y": normal(rng, *shape) + 1, "bb": vector(rng, shape[-1]),
                "rows": hashes(rng, *shape[:-1]), "w": vector(rng, shape[-1]), "b": vector(rng, shape[-1])}  # fmt: skip

    def on_nothing(rng):
        return {**make(rng, 9, 133), "x": np.zeros((9, 133))}

    made = {}
    for name, vectors in (("residual_norm", ("w", "b")), ("residual_rms_norm", ("w",))):

        def call(bias, drops, p=0.3, name=name, vectors=vectors, y=lambda y: y):
            def run(k, a):
                weights = [getattr(a, v) for v in vectors]
                branch = a.bb if bias else None, a.rows if drops else None
                return getattr(k, name)(a.x, y(a.y), *branch, p, *weights, EPS)

            def exact(k, a):
                weights = [getattr(a, v) for v in vectors]
                total = a.stored(k.residual(a.x, y(a.y), a.bb if bias else None, a.rows if drops else None, p))
                norm = k.layer_norm if "b" in vectors else k.rms_norm
                return total, *norm(total, *weights, EPS)

            return run, exact

        def branch(how, *shape, make=make, name=name, **more):
            more = {"rounded": 2.0, "oracle": how[1]} | more
            return Case(name, lambda rng: make(rng, *shape), how[0], **more)

        def wide(rng, *shape):
            return make(rng, *shape, vector=wide_normal)

        made |= {
            f"{name} 1x1": branch(call(True, True), 1, 1),
            f"{name} 3x5x33": branch(call(True, True), 3, 5, 33),
            f"{name} 4x516": branch(call(True, True), 4, 516),
            f"{name} 3x30, no bias": branch(call(False, True), 3, 30),
            f"{name} 3x30, no dropout": branch(call(True, False), 3, 30),
            f"{name} 3x32, the sum alone": branch(call(False, False), 3, 32),
            f"{name} 5x40, wide vectors": branch(call(True, True), 5, 40, make=wide),
            f"{name} on nothing": Case(name, on_nothing, call(False, True)[0], masks=(0,), rounded=2.0),
            f"{name} 5x40, all dropped": branch(call(True, True, p=1.0), 5, 40, by_reference=True),
            f"{name} 5x40, a branch that broadcasts": branch(
                call(True, True, y=lambda y: y[:1]), 5, 40, by_reference=True
            ),
            f"{name} 0x40": branch(call(True, True), 0, 40, by_reference=True),
            f"{name} 1x8201": branch(call(True, True), 1, 8201, dtypes=("float64", "bfloat16"), cost="slow"),
            f"{name} 8192x768": branch(call(True, True), 8192, 768, cost="gpu"),
            f"{name} 33x20000": branch(call(True, True), 33, 20_000, cost="gpu"),
        }
    return made


def gradients():
    def make(rng, *shape, vector=normal):
        x = 2 * normal(rng, *shape) + 1
        rows = x.reshape(-1, shape[-1])
        return {
            "g": normal(rng, *shape), "x": x, "w": vector(rng, shape[-1]), "extra": normal(rng, *shape),
            "center": Wide(rows.mean(1, keepdims=True) - rows[:, :1]),
            "rstd": Wide(1 / np.sqrt(rows.var(1, keepdims=True) + EPS)),
        }  # fmt: skip

    calls = {
        "layer_norm_backward": lambda k, a, g, *more: k.layer_norm_backward(g, a.x, a.center, a.rstd, a.w, *more),
        "rms_norm_backward": lambda k, a, g, *more: k.rms_norm_backward(g, a.x, a.rstd, a.w, *more),
    }
    made = {}
    for name, function in calls.items():

        def plain(k, a, function=function):
            return function(k, a, a.g)

        def added(k, a, function=function):
            return function(k, a, a.g, a.extra)

        def broadcast(k, a, function=function):
            return function(k, a, a.xp.broadcast_to(a.g[:1], a.x.shape), a.extra[::-1])

        def gradient(call, *shape, make=make, name=name, **more):
            return Case(name, lambda rng: make(rng, *shape), call, **more)

        def wide(rng, *shape):
            return make(rng, *shape, vector=wide_normal)

        made |= {
            f"{name} 1x1": gradient(plain, 1, 1),
            f"{name} 5x33": gradient(plain, 5, 33),
            f"{name} 3x7x12, extra": gradient(added, 3, 7, 12),
            f"{name} 19x260, extra": gradient(added, 19, 260),
            f"{name} 70x9": gradient(plain, 70, 9, factor=2),
            f"{name} 3x20, wide weights": gradient(plain, 3, 20, make=wide),
            f"{name}, broadcast gradient": gradient(broadcast, 6, 10),
            f"{name} 0x5": gradient(plain, 0, 5),
            f"{name} 1x8196": gradient(added, 1, 8196, dtypes=("float32", "bfloat16")),
            f"{name} 3000x70": gradient(added, 3000, 70, factor=8, cost="slow"),
            f"{name} 8192x768": gradient(added, 8192, 768, factor=20, cost="gpu"),
            f"{name} 33x20000": gradient(added, 33, 20_000, factor=4, cost="gpu"),
            f"{name} 1048579x4": gradient(plain, (1 << 20) + 3, 4, factor=200, cost="gpu"),
        }
    return made


CASES = {**norms(), **branches(), **gradients()}
