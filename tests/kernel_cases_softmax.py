"""Cases of softmax and of the loss on it.

Softmax gives lines of up to 32 elements a thread each, longer ones along the last dim a block; along other dims every
line has a thread.  The loss reads 2,048 elements of a row at a time, those of a width that is a multiple of four as
fours.
"""

import numpy as np
from kernel_case import Case, Wide, normal

IGNORE = -100
quiet = np.errstate(all="ignore")  # around calls on what is not finite, of which NumPy warns
ELSEWHERE = -7  # a target that counts, whose logit another rank holds


def softmaxes():
    def plain(dim, *shape, spoilt=lambda x: x, **more):
        return Case(
            "softmax",
            lambda rng: {"x": spoilt(4 * normal(rng, *shape))},
            quiet(lambda k, a: k.softmax(a.x, dim, None)),
            **more,
        )

    def masked(dim, shape, mask_shape, often=0.6, turn=lambda m: m, **more):
        def make(rng):
            mask = rng.random(mask_shape) < often
            mask.reshape(-1, mask_shape[-1])[0] = False  # a line that sees nothing
            return {"x": 4 * normal(rng, *shape), "mask": mask}

        return Case("softmax", make, lambda k, a: k.softmax(a.x, dim, turn(a.mask)), masks=(0,), **more)

    def strange(x):
        x[0, 5], x[1, 0], x[2, -1], x[3], x[4, 1::2] = np.nan, np.inf, -np.inf, -np.inf, -np.inf
        return x

    def spoilt_and_masked(rng):
        mask = np.ones((3, 40), bool)
        mask[:, 7] = False
        x = normal(rng, 3, 40)
        x[0, 7], x[1, 8] = np.nan, np.nan  # the first is not seen
        return {"x": x, "mask": mask}

    return {
        "softmax 1": plain(0, 1),
        "softmax 5x7": plain(-1, 5, 7),
        "softmax 70x3": plain(1, 70, 3),
        "softmax 3x33": plain(-1, 3, 33),
        "softmax 2x3x270": plain(2, 2, 3, 270),
        "softmax 40x5 down": plain(0, 40, 5),
        "softmax 2x40x3 in the middle": plain(1, 2, 40, 3),
        "softmax 0x4": plain(-1, 0, 4, by_reference=True),
        "softmax 5x40, not finite": plain(-1, 5, 40, spoilt=strange),
        "softmax 5x9, not finite": plain(-1, 5, 9, spoilt=strange),
        "softmax of the largest numbers": Case(
            "softmax",
            lambda rng: {"x": np.array([[3e38, -3e38, 1.0, 3e38]] * 2)},
            quiet(lambda k, a: k.softmax(a.x, -1, None)),
            dtypes=("float64", "float32", "bfloat16"),
        ),
        "softmax, transposed": Case(
            "softmax", lambda rng: {"x": normal(rng, 6, 3)}, lambda k, a: k.softmax(a.x.T, -1, None)
        ),
        "softmax masked 4x40": masked(-1, (4, 40), (4, 40)),
        "softmax masked 4x9": masked(-1, (4, 9), (4, 9)),
        "softmax masked by columns": masked(-1, (4, 40), (40,)),
        "softmax masked by rows": masked(-1, (4, 40), (4, 1)),
        "softmax masked 2x3x40": masked(-1, (2, 3, 40), (3, 40)),
        "softmax masked 2x2x3x5x37, heads alike": masked(-1, (2, 2, 3, 5, 37), (2, 1, 1, 5, 37)),
        "softmax masked in the middle": masked(1, (3, 12, 5), (3, 12, 1)),
        "softmax masked, four dims apart": masked(4, (2, 3, 2, 3, 5), (2, 1, 2, 1, 5)),
        "softmax masked, five dims apart": masked(5, (2, 2, 2, 2, 2, 5), (2, 1, 2, 1, 2, 5)),
        "softmax masked, swapped dims": masked(
            -1, (2, 3, 4, 5), (3, 2, 4, 5), turn=lambda m: m.swapaxes(0, 1), often=0.5
        ),
        "softmax masked, transposed mask": masked(-1, (6, 40), (40, 6), turn=lambda m: m.T),
        "softmax masked, not finite": Case(
            "softmax", spoilt_and_masked, quiet(lambda k, a: k.softmax(a.x, -1, a.mask))
        ),
        "softmax 16384x1024": plain(-1, 16384, 1024, cost="gpu"),
        "softmax 1048579x33": plain(-1, (1 << 20) + 3, 33, dtypes=("float32",), cost="gpu"),
        "softmax 512x8x999 in the middle": plain(1, 512, 8, 999, cost="gpu"),
        "softmax masked 8x1024x1024": masked(-1, (8, 1024, 1024), (1024, 1024), cost="gpu"),
    }


def softmax_gradients():
    def make(rng, dim, *shape):
        y = np.exp(normal(rng, *shape))
        return {"g": normal(rng, *shape), "y": y / y.sum(dim, keepdims=True)}

    def gradient(dim, *shape, **more):
        return Case(
            "softmax_backward",
            lambda rng: make(rng, dim, *shape),
            lambda k, a: k.softmax_backward(a.g, a.y, dim),
            **more,
        )

    def transposed(k, a):
        return k.softmax_backward(a.g.T, a.y.T, -1)

    return {
        "softmax_backward 1": gradient(0, 1),
        "softmax_backward 5x7": gradient(-1, 5, 7),
        "softmax_backward 3x33": gradient(-1, 3, 33),
        "softmax_backward 2x3x270": gradient(2, 2, 3, 270),
        "softmax_backward 2x40x3 in the middle": gradient(1, 2, 40, 3),
        "softmax_backward 0x4": gradient(-1, 0, 4, by_reference=True),
        "softmax_backward, transposed": Case("softmax_backward", lambda rng: make(rng, 0, 40, 3), transposed),
        "softmax_backward 16384x1024": gradient(-1, 16384, 1024, cost="gpu"),
    }


def losses():
    def targets(rng, rows, width):
        found = rng.integers(0, max(1, width), rows)
        found[: rows // 4] = IGNORE
        found[rows // 4 : rows // 2] = ELSEWHERE
        found[-1:] = width - 1
        return found

    def make(rng, rows, width, spoilt=lambda x: x):
        return {"x": spoilt(4 * normal(rng, rows, width)), "t": targets(rng, rows, width)}

    def with_lse(rng, *shape, **more):
        inputs = make(rng, *shape, **more)
        with np.errstate(all="ignore"):
            lse = np.log(np.exp(inputs["x"]).sum(1)) if shape[1] else np.zeros(shape[0])
        return {**inputs, "lse": Wide(lse), "g": Wide(np.array(0.7))}

    @quiet
    def forward(k, a):
        return k.cross_entropy(a.x, a.t, IGNORE)

    @quiet
    def backward(k, a):
        return k.cross_entropy_backward(a.g, a.x, a.t, a.lse, IGNORE)

    def loss(*shape, spoilt=lambda x: x, change=lambda t: t, **more):
        def inputs(rng):
            made = make(rng, *shape, spoilt=spoilt)
            return {**made, "t": change(made["t"])}

        return Case("cross_entropy", inputs, forward, **more)

    def gradient(*shape, spoilt=lambda x: x, change=lambda t: t, **more):
        def inputs(rng):
            made = with_lse(rng, *shape, spoilt=spoilt)
            return {**made, "t": change(made["t"])}

        return Case("cross_entropy_backward", inputs, backward, **more)

    def holes(x):
        x[2], x[3, ::2], x[1, 1:] = -np.inf, -np.inf, -np.inf
        return x

    def ignored_and_strange(x):  # rows that do not count may hold anything
        x[0] = np.nan
        x[1, 3] = np.inf
        return x

    def strange(x):
        x[5, 36], x[6, 0] = np.nan, np.inf
        return x

    def nobody(t):
        return np.full_like(t, IGNORE)

    def transposed(k, a):
        return k.cross_entropy(a.x.T, a.t[:5], IGNORE)

    def transposed_backward(k, a):
        return k.cross_entropy_backward(a.g, a.x.T, a.t[:5], a.lse[:5], IGNORE)

    def of_views(rng):
        return {**with_lse(rng, 9, 5), "t": np.array([4, IGNORE, 0, ELSEWHERE, 8, 2, 2, 2, 2])}

    made = {}
    for name, of in (("cross_entropy", loss), ("cross_entropy_backward", gradient)):
        for shape in ((1, 1), (9, 33), (8, 132), (3, 2054), (3, 2056)):
            made[f"{name} {shape[0]}x{shape[1]}"] = of(*shape)
        made |= {
            f"{name} 8x37 with holes": of(8, 37, spoilt=holes),
            f"{name} 8x37, ignored ones not finite": of(8, 37, spoilt=ignored_and_strange),
            f"{name} 8x37, not finite": of(8, 37, spoilt=strange),
            f"{name} 5x6, nobody counts": of(5, 6, change=nobody),
            f"{name} 5x6, targets of 32 bits": of(5, 6, change=lambda t: t.astype(np.int32)),
            f"{name} 5x6, every other target": of(5, 6, change=lambda t: np.repeat(t, 2)[::2]),
            f"{name} 4x0": of(4, 0, change=nobody, by_reference=True),
            f"{name} 512x50257": of(512, 50257, cost="gpu"),
            f"{name} 512x50304": of(512, 50304, cost="gpu"),
            f"{name} 1048579x8": of((1 << 20) + 3, 8, dtypes=("float32",), cost="gpu"),
        }
    # Every four raise the maximum, so that the sum of exponentials is scaled again and again.
    made["cross_entropy 2x2600, rising"] = loss(2, 2600, spoilt=lambda x: np.sort(x * 5, axis=1), dtypes=("float32",))
    made["cross_entropy 0x6"] = loss(0, 6)
    made["cross_entropy_backward 0x6"] = gradient(0, 6, by_reference=True)
    made["cross_entropy, transposed"] = Case("cross_entropy", of_views, transposed)
    made["cross_entropy_backward, transposed"] = Case("cross_entropy_backward", of_views, transposed_backward)
    made["cross_entropy of the largest numbers"] = Case(
        "cross_entropy",
        lambda rng: {"x": np.array([[3e38, -3e38, 1.0, 3e38]] * 2), "t": np.zeros(2, np.int64)},
        forward,
        dtypes=("float64", "float32", "bfloat16"),
    )
    return made


CASES = {**softmaxes(), **softmax_gradients(), **losses()}
