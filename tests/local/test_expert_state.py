"""What is around experts that ranks share: sums of gradients, optimizers, checkpoints, and who must agree with whom.

The weights of experts are tensors (E, a, b), cut over ep, and over tp along either other dim.  Ranks of edp and cp hold
the same of them, ranks of ep do not.
"""

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import world
from mpitrain.errors import StateError
from mpitrain.events import listen
from mpitrain.nn.init import normal
from mpitrain.nn.materialize import materialize
from mpitrain.nn.parameter import Parameter
from mpitrain.optim import Adafactor, AdamW, Group, Sgd
from mpitrain.parallel.data import BucketedReducer, FlatReducer
from mpitrain.parallel.replicas import check_replicas
from mpitrain.spec import Shard

EXPERTS = 4
UP, DOWN = {"ep": Shard(0), "tp": Shard(2)}, {"ep": Shard(0), "tp": Shard(1)}


def parameters(mesh, layers=3, dtype=np.float64):
    """Those of some blocks, in the order of a model, and their flat buffers."""
    made = []
    for number in range(layers):
        block = f"blocks.{number}"
        made += [
            Parameter(f"{block}.attention.proj.weight", (8, 8), {"tp": Shard(0)}, init=normal(0.3), decay=True),
            Parameter(f"{block}.norm.bias", (8,), init=normal(0.3)),
            Parameter(f"{block}.mlp.router.weight", (8, EXPERTS), init=normal(0.3), decay=True),
            Parameter(f"{block}.mlp.experts.up", (EXPERTS, 8, 16), UP, init=normal(0.3), decay=True),
            Parameter(f"{block}.mlp.experts.down", (EXPERTS, 16, 8), DOWN, init=normal(0.3), decay=True),
        ]
        made[-3].in_full = True
    return made, materialize(made, mesh.coords, mesh.sizes, 0, np.dtype(dtype))


def summand(p, mesh, step=0):
    """A gradient that belongs to the rows of this rank: of tokens of its own, for its own slab."""
    rows = mesh.coords["edp"], mesh.coords["ep"], mesh.coords["cp"]
    return np.random.default_rng([step, *rows, *p.name.encode()]).normal(size=p.full_shape)[p.rectangle]


# ----------------------------------------------------------------------------------------------- sums of gradients


def reduced(kind, dtype=np.float64, **axes):
    """Sums of two steps, in the second of which some ranks have no gradient for some experts.

    Returns:
        (a step: name -> sum, the same of what this rank brought, (verb, axis) of all messages, coordinates).
    """
    ranks = world()
    ranks.set_deterministic(True)
    mesh = Mesh(ranks, **axes)
    made, flats = parameters(mesh, dtype=dtype)
    reducer = FlatReducer(flats, mesh) if kind == "flat" else BucketedReducer(flats, mesh, 800)
    messages, brought, sums = [], [], []
    for step in range(2):
        brought.append({p.name: np.zeros(p.grad.shape) for p in made})
        with listen(lambda event: messages.append(event)):
            for p in made:
                p.touched = False
            for p in reversed(made):
                unused = "experts" in p.name and step and (mesh.dp.rank + len(p.name)) % 2
                if not unused:  # else all tokens of the group went elsewhere
                    brought[step][p.name] = summand(p, mesh, step)
                    p.accumulate(brought[step][p.name].astype(p.grad.dtype))
                    reducer.add(p)
            reducer.finish()
        sums.append({p.name: p.grad.copy() for p in made})
    begun = [event for event in messages if (event.kind, event.phase) == ("message", "begin")]
    return sums, brought, [(event.name, event.info["axis"]) for event in begun], dict(mesh.coords)


LAYOUTS = [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "tp": 2}]
LAYOUTS += [{"dp": 2, "ep": 2, "cp": 2}]


def count(axes):
    return int(np.prod([size for axis, size in axes.items() if axis != "ep"]))  # ep is a part of dp


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_experts_are_summed_over_the_ranks_that_share_them_and_the_rest_over_all(axes):
    """T16.4: what other ranks of ep have to say of an expert came to it with their tokens."""
    found = LocalWorld(count(axes)).run(lambda: reduced("flat", **axes))
    for sums, _, _, coords in found:
        beside = [other for other in found if other[-1]["tp"] == coords["tp"]]
        for step, of_step in enumerate(sums):
            for name, got in of_step.items():
                shared = [other for other in beside if "experts" not in name or other[-1]["ep"] == coords["ep"]]
                assert len(shared) == count(axes) // axes.get("tp", 1) // (axes["ep"] if "experts" in name else 1)
                wanted = sum(brought[step][name] for _, brought, _, _ in shared)
                assert np.abs(got - wanted).max() < 1e-12, (name, step, coords)


@pytest.mark.parametrize("dtype", [np.float64, np.float16], ids=["float64", "float16"])
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_buckets_of_two_sets_of_axes_give_the_bits_of_whole_buffers(axes, dtype):
    flat = LocalWorld(count(axes)).run(lambda: reduced("flat", dtype, **axes))
    cut = LocalWorld(count(axes)).run(lambda: reduced("buckets", dtype, **axes))
    for (whole, *_), (parts, *_) in zip(flat, cut, strict=True):
        for one, other in zip(whole, parts, strict=True):
            assert {name: a.tobytes() for name, a in one.items()} == {name: a.tobytes() for name, a in other.items()}


def test_buckets_leave_in_the_order_of_backward_whichever_buffer_they_are_of():
    """Sums of experts stand between those of their neighbours, on every rank alike, whatever was used."""
    axes = {"dp": 4, "ep": 2}
    sent = [messages for _, _, messages, _ in LocalWorld(4).run(lambda: reduced("buckets", **axes))]
    assert all(messages == sent[0] for messages in sent)
    starts = [axis for verb, axis in sent[0] if verb == "iall_reduce"]
    half = len(starts) // 2
    assert starts[:half] == starts[half:]  # in the second step, some gradients are missing
    kinds = [axis for place, axis in enumerate(starts[:half]) if place == 0 or starts[place - 1] != axis]
    assert kinds == ["edp+cp", "dp+cp"] * 3


# ------------------------------------------------------------------------------------------------ who holds the same


@pytest.mark.parametrize("name", ["blocks.1.mlp.experts.up", "blocks.2.mlp.router.weight"])
def test_ranks_of_edp_must_hold_the_same_experts_and_all_ranks_the_same_router(name):
    def main(spoiled):
        mesh = Mesh(world(), dp=4, ep=2)
        made, _ = parameters(mesh)
        for p in made:
            if mesh.world.rank == spoiled and p.name == name:
                p.data.reshape(-1).view(np.uint64)[-1] ^= 1  # the lowest bit of one element
        check_replicas(made, mesh, "at the start")

    LocalWorld(4).run(main, -1)
    for rank in range(4):
        with pytest.raises(StateError, match=f"{name} differs between ranks that share it, at the start"):
            LocalWorld(4).run(main, rank)


# -------------------------------------------------------------------------------------------------------- optimizers


def trained(mesh, kind, groups=(), steps=3, **more):
    """Slabs of weights and state after steps whose gradients are parts of whole ones: (rectangle, array) by name."""
    made, _ = parameters(mesh, layers=1)
    how = {AdamW: {}, Sgd: {"momentum": 0.9, "nesterov": True}, Adafactor: {"beta1": 0.5}}[kind] | more
    method = kind(made, mesh=mesh, lr=0.05, weight_decay=0.1, groups=groups, **how)
    for step in range(steps):
        for p in made:
            seed = [step, *p.name.encode()]
            p.grad[...] = np.random.default_rng(seed).normal(size=p.full_shape)[p.rectangle] * 10.0**step
            p.touched = True
        method.step()
    slabs = {f"weight/{p.name}": (p.rectangle, p.data) for p in made}
    for state, of in method.state_tensors().items():
        slabs.update({f"{state}/{name}": (kept.rectangle, kept.array) for name, kept in of.items()})
    return slabs, method


@pytest.mark.parametrize("kind", [AdamW, Sgd, Adafactor])
def test_every_optimizer_makes_the_updates_of_all_experts_on_one_rank(kind):
    alone, _ = LocalWorld(1).run(lambda: trained(Mesh(world()), kind))[0]
    for axes in ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "tp": 2}, {"dp": 4, "ep": 4}):
        for slabs, _ in LocalWorld(count(axes)).run(lambda axes=axes: trained(Mesh(world(), **axes), kind)):
            assert slabs.keys() == alone.keys()
            for name, (rectangle, array) in slabs.items():
                wanted = alone[name][1]
                assert np.abs(array - wanted[rectangle]).max() <= 1e-12 * np.abs(wanted).max(), (axes, name)
            if kind is not Adafactor:  # of which the rest stands in test_adafactor_on_ranks.py
                assert all(array.tobytes() == alone[name][1][part].tobytes() for name, (part, array) in slabs.items())


@pytest.mark.parametrize("bound", [0.5, 100.0], ids=["clipped", "unclipped"])
def test_adafactor_keeps_for_each_expert_what_it_keeps_for_a_matrix(bound):
    """Rows and columns are an expert's own; the sizes of weights and of the step are those of the whole tensor."""
    slabs, method = LocalWorld(1).run(lambda: trained(Mesh(world()), Adafactor, steps=1, clip=bound))[0]
    p = next(p for p in method.parameters if p.name == "blocks.0.mlp.experts.up")
    squares = p.grad**2
    for state, dim, shape in (("row_sums", 2, (EXPERTS, 8)), ("column_sums", 1, (EXPERTS, 16))):
        kept = slabs[f"{state}/{p.name}"][1]
        assert kept.shape == shape
        assert np.allclose(kept, squares.sum(dim), rtol=1e-12)  # at t = 1 beta2 is 0
    first = normal(0.3)(p.name, p.full_shape, tuple(slice(0, n) for n in p.full_shape), 0)
    of_expert = [squares[e].sum(1)[:, None] * squares[e].sum(0) / squares[e].sum() for e in range(EXPERTS)]
    u = p.grad / np.sqrt(of_expert)
    u /= max(1.0, np.sqrt((u**2).mean()) / bound)
    wanted = first * (1 - 0.05 * 0.1) - 0.05 * np.sqrt((first**2).mean()) * 0.5 * u
    assert np.abs(p.data - wanted).max() < 1e-14


def test_an_expert_without_tokens_keeps_its_weights_and_comes_back():
    """Its gradients are zero: no step, no NaN; and when tokens come, its first steps are of the size of others'."""

    def main():
        mesh = Mesh(world(), dp=2, ep=2)
        made, _ = parameters(mesh, layers=1, dtype=np.float32)
        method = Adafactor(made, mesh=mesh, lr=0.05)
        up = next(p for p in made if p.name.endswith("experts.up"))
        moved = []
        for step in range(6):
            before = up.data.copy()
            for p in made:
                p.accumulate(summand(p, mesh, step).astype(np.float32))
            if step < 4 and mesh.ep.rank:
                up.grad[0] = 0.0  # the first expert of the second rank
            method.step()
            for p in made:
                p.touched = False
            moved.append(np.abs(up.data - before).reshape(len(up.data), -1).max(1))
        return moved

    moved = LocalWorld(2).run(main)[1]
    assert [step[0] for step in moved[:4]] == [0.0] * 4
    for step in moved[4:]:
        assert 0 < step[0] < 10 * step[1]


@pytest.mark.parametrize("kind", [AdamW, Adafactor])
def test_experts_may_have_a_learning_rate_of_their_own(kind):
    """A factor of 0 shows exactly which weights it means, on every rank."""

    def main(rate):
        mesh = Mesh(world(), dp=2, ep=2)
        slabs, method = trained(mesh, kind, [Group("blocks.*.mlp.experts.*", lr=rate, weight_decay=0.0)], steps=1)
        rates = {p.name: treatment.rate for p, treatment in zip(method.parameters, method.treatments, strict=True)}
        still = {}
        for name, (rectangle, array) in slabs.items():
            if name.startswith("weight/"):
                p = next(p for p in method.parameters if f"weight/{p.name}" == name)
                still[p.name] = bool((array == p.init(p.name, p.full_shape, rectangle, 0)).all())
        return rates, still

    for rates, _ in LocalWorld(2).run(main, 0.5):
        assert {name for name, rate in rates.items() if rate == 0.5} == {n for n in rates if "experts" in n} != set()
    for rates, still in LocalWorld(2).run(main, 0.0):
        assert {name for name, kept in still.items() if kept} == {name for name in rates if "experts" in name}
