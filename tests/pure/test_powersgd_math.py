"""PowerSGD's algebra on one rank: bases, products, which matrices are compressed, what a factor of rank r can hold."""

from itertools import pairwise

import numpy as np
import pytest

from mpitrain.comm.alone import Alone
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.errors import ConfigError
from mpitrain.nn.init import zeros
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.powersgd import ERROR, Choice, PowerSgd
from mpitrain.parallel.powersgd.products import orthonormal, outer_sum, unit_columns
from mpitrain.spec import Shard

ALL = {"exact": (), "worth": 0.0}


def alone(shape, rank, dtype=np.float64, spec=None, **how):
    """A parameter and the reducer that sums its gradient over one rank."""
    mesh = Mesh(World(Alone(), "none"))
    p = Parameter("w", shape, spec, init=zeros)
    flats = materialize([p], mesh.coords, mesh.sizes, 0, np.dtype(dtype))
    return p, PowerSgd(flats, mesh, rank, **{**ALL, **how})


def send(p, reducer, gradient, updated=True):
    """What comes back for a gradient."""
    p.touched = False
    p.accumulate(gradient.astype(p.grad.dtype))
    reducer.finish()
    if updated:
        reducer.updated()
    return p.grad.copy()


def error(reducer):
    return reducer.state_tensors()[ERROR]["w"].array[0]


def of_rank(rank, n, m, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m))


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("shape", [(1, 7, 3), (3, 64, 4), (2, 3, 5), (1, 1, 1), (4, 5, 5), (2, 0, 3), (0, 4, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_columns_of_a_basis_are_orthonormal_and_span_what_they_are_of(shape, dtype):
    """T26.4."""
    x = np.random.default_rng(1).normal(size=shape).astype(dtype)
    basis = orthonormal(x)
    n, r = shape[1:]
    close = 1e-6 if dtype == np.float32 else 1e-14
    wanted = np.broadcast_to(np.diag([1.0] * min(n, r) + [0.0] * max(0, r - n)), (shape[0], r, r))
    assert basis.dtype == dtype
    np.testing.assert_allclose(basis.swapaxes(1, 2) @ basis, wanted, atol=close)
    np.testing.assert_allclose(basis @ (basis.swapaxes(1, 2) @ x), x, atol=20 * close)


@pytest.mark.parametrize("columns", ["zero", "equal", "sums of others", "tiny", "huge"])
def test_columns_that_bring_nothing_new_get_directions_of_their_own(columns):
    """No eps I is added: what the columns span is spanned to the last digit, however they depend on each other."""
    x = np.random.default_rng(2).normal(size=(1, 9, 4))
    match columns:
        case "zero":
            x[..., 1] = x[..., 3] = 0
        case "equal":
            x[...] = x[..., :1]
        case "sums of others":
            x[..., 2] = x[..., 0] - 3 * x[..., 1]
        case "tiny":
            x *= 1e-150
        case "huge":
            x *= 1e150
    basis = orthonormal(x)
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(4), atol=1e-14)
    np.testing.assert_allclose(basis @ (basis.swapaxes(1, 2) @ x), x, atol=1e-14 * abs(x).max())


def test_a_basis_of_what_is_not_finite_is_not_finite():
    x = np.ones((1, 5, 2))
    x[0, 3, 0] = np.inf
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(orthonormal(x)).all()


@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (300, 257, 3), (5, 40_000, 2), (3, 2, 0), (0, 3, 2), (3, 0, 2)])
def test_a_product_is_added_up_column_by_column(n, m, r):
    """The order is that of the columns in every element, whichever block of rows it is in."""
    rng = np.random.default_rng(3)
    p, q = rng.normal(size=(2, n, r)).astype(np.float32), rng.normal(size=(2, m, r)).astype(np.float32)
    out = np.full((2, n, m), np.nan, np.float32)
    outer_sum(p, q, out)
    wanted = np.zeros((2, n, m), np.float32)
    for j in range(r):
        wanted += p[:, :, None, j] * q[:, None, :, j]
    assert out.tobytes() == wanted.tobytes()


def test_columns_of_length_one_but_for_those_of_zeros():
    q = np.random.default_rng(4).normal(size=(2, 6, 3))
    q[1, :, 2] = 0
    lengths = np.linalg.norm(unit_columns(q), axis=1)
    np.testing.assert_allclose(lengths, [[1, 1, 1], [1, 1, 0]], rtol=1e-15)


# -------------------------------------------------------------------------------------------------------- what it holds


@pytest.mark.parametrize("rank", [2, 3, 7, 50])
@pytest.mark.parametrize("true", [1, 2])
def test_a_gradient_of_no_higher_rank_is_sent_whole(rank, true):
    """T26.1; also with more columns than the matrix has rows."""
    p, reducer = alone((9, 13), rank)
    for step in range(3):
        gradient = of_rank(true, 9, 13, seed=step)
        sent = send(p, reducer, gradient)
        np.testing.assert_allclose(sent, gradient, atol=1e-12)
        np.testing.assert_allclose(error(reducer), 0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_same_gradient_again_and_again_is_held_ever_better_up_to_the_best_that_the_rank_can(rank):
    """T26.3: without feedback each step is one of subspace iteration, which ends at the largest singular values."""
    gradient = np.random.default_rng(5).normal(size=(20, 30))
    values = np.linalg.svd(gradient, compute_uv=False)
    best = np.sqrt((values[rank:] ** 2).sum())
    p, reducer = alone((20, 30), rank, feedback=False)
    misses = [np.linalg.norm(gradient - send(p, reducer, gradient)) for _ in range(400)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(misses))
    assert misses[0] > 1.02 * best
    np.testing.assert_allclose(misses[-1], best, rtol=1e-6)


def test_with_a_fixed_factor_the_same_gradient_is_held_no_better_the_next_time():
    gradient = np.random.default_rng(5).normal(size=(20, 30))
    p, reducer = alone((20, 30), 2, feedback=False, warm_start=False)
    first, second = (send(p, reducer, gradient) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_what_is_sent_is_as_long_as_its_right_factor():
    """T26.4: the left factor is orthonormal."""
    p, reducer = alone((20, 30), 3)
    sent = send(p, reducer, np.random.default_rng(6).normal(size=(20, 30)))
    (q,) = (tensor.array for tensor in reducer.state_tensors()["powersgd_q"].values())
    np.testing.assert_allclose(np.linalg.norm(sent), np.linalg.norm(q), rtol=1e-12)


def test_a_direction_that_no_gradient_had_can_come_back():
    """After gradients of rank 1 the second column of Q is noise, and after zeros all are; later ones use it again."""
    p, reducer = alone((8, 9), 2)
    for _ in range(5):
        send(p, reducer, of_rank(1, 8, 9))
    for _ in range(2):
        send(p, reducer, np.zeros((8, 9)))
    later = of_rank(2, 8, 9, seed=1)
    np.testing.assert_allclose(send(p, reducer, later), later, atol=1e-12)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_the_size_of_gradients_does_not_matter(size):
    """In float32; the product of two gradients of 1e-30 would be 0."""
    gradient = np.random.default_rng(7).normal(size=(12, 16))
    (p, small), (p1, plain) = (alone((12, 16), 2, np.float32) for _ in range(2))
    for _ in range(4):
        sent, wanted = send(p, small, gradient * size), send(p1, plain, gradient)
    np.testing.assert_allclose(sent / np.float32(size), wanted, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ what is compressed


def found(shape, rank=4, stacked=False, **how):
    return Choice(rank, **{"exact": (), **how}).of("w", shape, shape, stacked)


def test_vectors_and_small_matrices_are_not_compressed():
    """n m <= 2 r (n + m): nothing would be saved to speak of."""
    assert found((100,)) is None
    assert found(()) is None
    assert found((16, 16)) is None  # 256 numbers, 2 x 4 x 32
    assert found((17, 17)) is not None
    assert found((4, 1000)) is None
    assert found((1000, 3), rank=1) is not None
    assert found((8, 100), stacked=True) is None  # eight vectors


def test_the_rank_is_at_most_the_shorter_side():
    assert found((3, 50), rank=8, worth=0.0).rank == 3
    assert found((5, 50, 4), rank=8, worth=0.0, stacked=True) == (5, 50, 4, 4)


def test_a_kernel_is_a_matrix_of_its_first_dim_and_the_rest():
    assert found((32, 16, 3, 3)) == (1, 32, 144, 4)


def test_experts_are_as_many_matrices():
    p, reducer = alone((3, 20, 30), 2, spec={"ep": Shard(0)})
    gradient = np.stack([of_rank(2, 20, 30, seed) for seed in range(3)])  # rank 6 as one matrix
    np.testing.assert_allclose(send(p, reducer, gradient), gradient, atol=1e-12)


def test_tables_and_head_are_left_out_by_name():
    choice = Choice(4)
    for name in ("table.weight", "positions.weight", "head.weight"):
        assert choice.of(name, (256, 128), (256, 128), False) is None
    assert choice.of("blocks.0.mlp.up.weight", (128, 512), (128, 512), False) is not None


def test_all_ranks_decide_by_the_largest_slab():
    """The last rank of three holds 2 of 20 rows, whose factors would save nothing."""
    choice = Choice(4, exact=(), worth=1.0)
    assert choice.of("w", (2, 50), (9, 50), False) == (1, 2, 50, 4)
    assert choice.of("w", (2, 50), (2, 50), False) is None


@pytest.mark.parametrize("how", [{"rank": 0}, {"rank": 4, "start": -1}])
def test_ranks_and_starts_below_the_least_are_refused(how):
    with pytest.raises(ConfigError, match="must be 1 or more"):
        alone((3, 3), **how)


# ------------------------------------------------------------------------------------------------------ when it counts


def test_a_step_without_an_update_leaves_error_and_factor_as_they_were():
    p, reducer = alone((9, 12), 1)
    rng = np.random.default_rng(8)
    gradients = rng.normal(size=(3, 9, 12))
    send(p, reducer, gradients[0])
    before = {kind: of["w"].array.tobytes() for kind, of in reducer.state_tensors().items()}
    with np.errstate(invalid="ignore"):
        lost = send(p, reducer, np.where(rng.random((9, 12)) < 0.1, np.inf, gradients[1]), updated=False)
    assert not np.isfinite(lost).all()  # so that all ranks skip it
    assert {kind: of["w"].array.tobytes() for kind, of in reducer.state_tensors().items()} == before
    other_p, other = alone((9, 12), 1)
    send(other_p, other, gradients[0])
    assert send(p, reducer, gradients[2]).tobytes() == send(other_p, other, gradients[2]).tobytes()


def test_the_same_step_made_twice_before_its_update_is_the_same():
    """An autopsy runs a step again."""
    p, reducer = alone((9, 12), 1)
    gradient = np.random.default_rng(9).normal(size=(9, 12))
    send(p, reducer, gradient)
    once, twice = (send(p, reducer, gradient, updated=False) for _ in range(2))
    assert once.tobytes() == twice.tobytes()


def test_exact_steps_first_and_then_an_error_of_zero():
    """T26.6 on one rank; the first compressed step begins without an error."""
    p, reducer = alone((9, 12), 1, start=2)
    other_p, other = alone((9, 12), 1)
    gradients = np.random.default_rng(10).normal(size=(3, 9, 12))
    for gradient in gradients[:2]:
        assert send(p, reducer, gradient).tobytes() == gradient.tobytes()
        assert not reducer.state_tensors()[ERROR]
    assert send(p, reducer, gradients[2]).tobytes() == send(other_p, other, gradients[2]).tobytes()
    assert error(reducer).any()


def test_a_parameter_that_no_other_rank_shares_is_left_alone():
    """Cut over every axis: there is nothing to send, so nothing to compress."""
    cut = {axis: Shard(0) for axis in ("edp", "ep", "cp")}
    p, reducer = alone((20, 30), 1, spec=cut)
    gradient = np.random.default_rng(11).normal(size=(20, 30))
    assert send(p, reducer, gradient).tobytes() == gradient.tobytes()
    assert reducer.compressed == ()
