"""States, duals and slabs."""

import itertools

import numpy as np
import pytest

from mpitrain.errors import StateError
from mpitrain.spec import INVARIANT, LOCAL, PARTIAL, REPLICATE, Shard, Spec, cut, dual, slab, slab_shape


def test_the_dual_of_a_dual_is_the_state_itself():
    for state in (INVARIANT, REPLICATE, PARTIAL, Shard(0), Shard(2)):
        assert dual(dual(state)) == state
    assert dual(REPLICATE) == PARTIAL
    assert dual(INVARIANT) == INVARIANT


def test_an_axis_that_is_not_named_has_the_state_that_its_data_give_it():
    spec = Spec({"tp": Shard(1)})
    assert [spec.state(axis) for axis in ("pp", "edp", "ep", "cp", "tp")] == [
        LOCAL,
        REPLICATE,
        REPLICATE,
        REPLICATE,
        Shard(1),
    ]
    assert spec.replicate_axes() == ("edp", "ep", "cp")
    assert spec.norm_axes() == ("pp", "tp")


def test_dp_is_short_for_its_two_axes():
    assert Spec({"dp": Shard(0)}) == Spec({"edp": Shard(0), "ep": Shard(0)})
    assert Spec({"ep": Shard(0)}).replicate_axes() == ("edp", "cp")


def test_a_tied_parameter_says_so():
    assert Spec({"ends": REPLICATE}).tied
    assert not Spec().tied


@pytest.mark.parametrize(
    ("states", "words"), [({"xp": REPLICATE}, "known axes: pp edp ep"), ({"tp": PARTIAL}, "Partial")]
)
def test_a_wrong_spec_is_refused(states, words):
    with pytest.raises(StateError, match=words):
        Spec(states)


@pytest.mark.parametrize("length", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_the_parts_of_a_cut_join_without_gap(length, parts):
    edges = [cut(length, parts, index) for index in range(parts)]
    assert edges[0][0] == 0
    assert edges[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert max(stop - start for start, stop in edges) == -(-length // parts)


def test_slabs_tile_the_full_tensor_also_when_two_axes_cut_one_dim():
    full = np.arange(6 * 8).reshape(6, 8)
    spec = Spec({"edp": Shard(0), "tp": Shard(0), "cp": Shard(1)})
    sizes = {"edp": 2, "tp": 3, "cp": 2, "pp": 1, "ep": 1}
    seen = np.zeros_like(full)
    for edp in range(2):
        for tp in range(3):
            for cp in range(2):
                rectangle = slab(full.shape, spec, {"edp": edp, "tp": tp, "cp": cp}, sizes)
                assert slab_shape(rectangle) == (1, 4)
                seen[rectangle] += 1
    assert (seen == 1).all()


def test_a_sum_over_a_dim_has_the_spec_without_it():
    """Later dims move up; along an axis that cut the dim every rank has the sum, as by default."""
    spec = Spec({"edp": Shard(0), "cp": Shard(1), "tp": Shard(2), "ends": REPLICATE})
    assert spec.without(1) == Spec({"edp": Shard(0), "tp": Shard(1), "ends": REPLICATE})
    assert spec.without(2) == Spec({"edp": Shard(0), "cp": Shard(1), "ends": REPLICATE})
    assert spec.without(1).state("cp") == REPLICATE
    assert spec.without(2).state("tp") == INVARIANT
    assert spec.without(0).shard_dims() == {"cp": 0, "tp": 1}
    assert Spec({"tp": REPLICATE}).without(0) == Spec({"tp": REPLICATE})
