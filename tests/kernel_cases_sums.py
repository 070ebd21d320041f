"""Cases of sums of rows: of all, and of those with the same number.

A block of `row_sum` adds up 32 of the sorted rows; a run of equal ids that reaches over several blocks is put together
from pieces.
"""

import numpy as np
from kernel_case import Case, Wide, normal


def sums():
    def of(*shape, call=lambda k, a: k.sum_rows(a.x), **more):
        return Case("sum_rows", lambda rng: {"x": normal(rng, *shape)}, call, **more)

    return {
        "sum_rows 1x1": of(1, 1),
        "sum_rows 33": of(33),
        "sum_rows 5x131": of(5, 131),
        "sum_rows 3x7x2x12": of(3, 7, 2, 12),
        "sum_rows 150x10": of(150, 10, factor=4),
        "sum_rows 0x5": of(0, 5),
        "sum_rows, transposed": of(6, 40, call=lambda k, a: k.sum_rows(a.x.T)),
        "sum_rows, broadcast": of(1, 12, call=lambda k, a: k.sum_rows(a.xp.broadcast_to(a.x, (9, 12)))),
        "sum_rows of what is not finite": Case(
            "sum_rows",
            lambda rng: {"x": np.where(np.arange(60).reshape(20, 3) == 41, np.nan, 1.0)},
            lambda k, a: k.sum_rows(a.x),
        ),
        "sum_rows 2500x140": of(2500, 140, factor=8, cost="slow"),
        "sum_rows 16384x3072": of(16384, 3072, factor=20, cost="gpu"),
        "sum_rows 300003x64": of(300_003, 64, factor=100, cost="gpu"),
        "sum_rows 33x100000": of(33, 100_000, cost="gpu"),
    }


def row_sums():
    def add(k, a):
        k.row_sum(a.ids, a.rows, a.out)
        return a.out

    def of(ids, width, table=7, into=Wide, rows=normal, call=add, **more):
        def make(rng):
            which = np.asarray(ids(rng) if callable(ids) else ids, np.int64)
            return {"ids": which, "rows": rows(rng, which.size, width), "out": into(normal(rng, table, width))}

        return Case("row_sum", make, call, writes=("out",), **more)

    def ones(rng, *shape):
        return np.ones(shape)

    def some(n, table):
        return lambda rng: rng.integers(0, table, n)

    def repeated(rng):
        return {"ids": np.array([3, 3, 3, 0]), "rows": np.ones((4, 2)), "out": Wide(np.zeros((5, 2)))}

    def runs(rng):  # that begin and end with a block's rows, and reach over one, two and three of them
        lengths = [32, 31, 2, 63, 33, 64, 7, 100, 1]
        return rng.permutation(np.repeat(np.arange(len(lengths)), lengths))

    def narrow_ids(k, a):
        k.row_sum(a.ids.astype(np.int32), a.rows, a.out)
        return a.out

    def views(k, a):
        k.row_sum(a.ids[::2], a.rows[::-2], a.out)
        return a.out

    def part(k, a):
        k.row_sum(a.ids, a.rows[:, ::2], a.out[:, ::2])
        return a.out

    return {
        "row_sum of repeated ids": Case("row_sum", repeated, add, writes=("out",), exact=(0,)),
        "row_sum 1": of([0], 1, table=1),
        "row_sum of one number each": of(some(90, 7), 1, factor=2),
        "row_sum 20x33": of(some(20, 7), 33),
        "row_sum 20x36": of(some(20, 7), 36),
        "row_sum 70 of one id": of(np.full(70, 5), 6, factor=2),
        "row_sum 333 in runs": of(runs, 5, table=9, factor=4),
        "row_sum 300 of 1000": of(some(300, 1000), 4, table=1000),
        "row_sum 8x1030": of(some(8, 3), 1030, table=3),
        "row_sum into a table of its own dtype": of(some(40, 7), 8, into=lambda x: x),
        "row_sum, ids of 32 bits": of(some(20, 7), 6, call=narrow_ids),
        "row_sum, views": of(some(20, 7), 6, call=views),
        "row_sum into a view": of(some(20, 7), 6, call=part, by_reference=True),
        "row_sum of nothing": of([], 6, by_reference=True),
        "row_sum of what is not finite": of(
            [2, 0, 2], 5, rows=lambda rng, *shape: np.where(np.arange(15).reshape(shape) == 7, np.nan, 1.0)
        ),
        "row_sum 16384x768 of 50257": of(some(16384, 50257), 768, table=50257, factor=4, cost="gpu"),
        "row_sum 16384x768, many alike": of(
            lambda rng: np.minimum(rng.geometric(0.05, 16384), 100) - 1, 768, table=100, factor=40, cost="gpu"
        ),
        "row_sum 65536x64 of one id": of(np.zeros(65536), 64, rows=ones, factor=4, cost="gpu"),
        "row_sum 200000x64 of 50257": of(some(200_000, 50257), 64, table=50257, factor=4, cost="gpu"),
    }


CASES = {**sums(), **row_sums()}
