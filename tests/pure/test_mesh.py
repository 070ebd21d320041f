"""The grid of ranks: coordinates, groups, the picture, and layouts that do not fit."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, world
from mpitrain.errors import MeshError
from mpitrain.parallel.tensor import ColumnLinear, RowLinear
from mpitrain.parallel.vocabulary import VocabularyEmbedding
from mpitrain.spec import ATOMIC_AXES

AXES = (*ATOMIC_AXES, "dp", "ends")


def meshes(ranks: int, **sizes: int | None) -> list[Mesh]:
    return LocalWorld(ranks).run(lambda: Mesh(world(), **sizes))  # type: ignore[arg-type]


def groups(ranks: int, axis: str, **sizes: int) -> set[tuple[int, ...]]:
    return {getattr(mesh, axis).ranks for mesh in meshes(ranks, **sizes)}


def test_groups_of_sixteen_ranks_are_those_of_the_paper() -> None:
    """ALGORITHMS 1.2: N=16, t=2, c=1, d=2, p=4."""
    sizes = {"tp": 2, "dp": 2, "pp": 4}
    assert groups(16, "tp", **sizes) == {(i, i + 1) for i in range(0, 16, 2)}
    assert groups(16, "dp", **sizes) == {(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)}
    assert groups(16, "pp", **sizes) == {(i, i + 4, i + 8, i + 12) for i in range(4)}
    ends = groups(16, "ends", **sizes)
    assert {(0, 12), (1, 13), (2, 14), (3, 15)} <= ends
    assert {group for group in ends if len(group) == 1} == {(rank,) for rank in range(4, 12)}


def test_rank_and_coordinates_follow_the_formula() -> None:
    for mesh in meshes(24, pp=2, dp=4, ep=2, cp=1, tp=3):
        c = mesh.coords
        assert mesh.world.rank == (((c["pp"] * 2 + c["edp"]) * 2 + c["ep"]) * 1 + c["cp"]) * 3 + c["tp"]
        assert mesh.rank_of(c) == mesh.world.rank
        assert mesh.sizes == {"pp": 2, "edp": 2, "ep": 2, "cp": 1, "tp": 3}
        for axis in ATOMIC_AXES:
            line = getattr(mesh, axis)
            assert (line.name, line.rank, line.size) == (axis, c[axis], mesh.sizes[axis])
            assert line.ranks[line.rank] == mesh.world.rank
        assert mesh.dp.rank == c["edp"] * 2 + c["ep"]
        assert (mesh.dp.name, mesh.dp.size) == ("dp", 4)


def test_every_axis_always_exists() -> None:
    (mesh,) = meshes(1)
    for axis in AXES:
        line = getattr(mesh, axis)
        assert (line.size, line.rank, line.ranks) == (1, 0, (0,))
        assert line.all_reduce(np.array(3.0)) == 3.0
    assert mesh.is_reporter


def test_dp_is_what_the_other_axes_leave() -> None:
    for mesh in meshes(8, tp=2):
        assert mesh.dp.size == 4
    for mesh in meshes(8, pp=2, tp=2, ep=2):
        assert (mesh.edp.size, mesh.ep.size) == (1, 2)


def test_merges_are_made_once_in_the_order_of_the_axes() -> None:
    def main() -> None:
        mesh = Mesh(world(), pp=2, dp=2, cp=2, ep=2)
        assert mesh.merged(("ep", "edp")) is mesh.dp
        assert mesh.merged(["dp"]) is mesh.dp
        assert mesh.merged(("tp",)) is mesh.tp
        both = mesh.merged(("cp", "ep", "edp"))
        assert both is mesh.merged(("edp", "ep", "cp")) is mesh.merged(("dp", "cp"))
        assert both.name == "dp+cp"
        stage = mesh.coords["pp"]
        assert both.ranks == tuple(range(4 * stage, 4 * stage + 4))
        assert both.all_reduce(np.array(world().rank)) == sum(both.ranks)
        assert mesh.merged(()).size == 1
        with pytest.raises(MeshError, match="axis xp does not exist; known axes: pp edp ep cp tp dp"):
            mesh.merged(("xp", "tp"))

    LocalWorld(8).run(main)


def test_a_merge_is_the_business_of_its_members_only() -> None:
    def main() -> int:
        mesh = Mesh(world(), pp=2, dp=2, tp=2)
        if mesh.coords["pp"] == 0:
            return 0
        return int(mesh.merged(("dp", "tp")).all_reduce(np.array(1)))

    assert LocalWorld(8).run(main) == [0] * 4 + [4] * 4


def test_ends_are_the_first_and_the_last_stage() -> None:
    def main() -> int:
        mesh = Mesh(world(), pp=3, tp=2)
        return int(mesh.ends.all_reduce(np.array(world().rank)))

    assert LocalWorld(6).run(main) == [4, 6, 2, 3, 4, 6]


def test_one_rank_reports_it_is_of_the_last_stage() -> None:
    assert [mesh.world.rank for mesh in meshes(12, pp=3, dp=2, tp=2) if mesh.is_reporter] == [8]
    assert [mesh.world.rank for mesh in meshes(8, dp=4, ep=2, cp=2) if mesh.is_reporter] == [0]


WHOLE = "an axis has a whole number of ranks, 1 or more"
RUN = "Run: mpitrain local -n"


@pytest.mark.parametrize(
    ("ranks", "sizes", "text"),
    [
        (8, {"pp": 3, "dp": 2, "tp": 2}, f"--pp 3 --dp 2 --tp 2 needs 12 ranks, but STARTED 8.  {RUN} 12 ..."),
        (8, {"dp": 3}, f"--dp 3 needs 3 ranks, but STARTED 8.  {RUN} 3 ..., or leave out --dp"),
        (4, {"dp": 1}, f"--dp 1 needs 1 rank, but STARTED 4.  {RUN} 1 ..., or leave out --dp"),
        (8, {"pp": 3}, f"--pp 3 needs a multiple of 3 ranks, but STARTED 8.  {RUN} 6 ... or mpitrain local -n 9 ..."),
        (2, {"tp": 4}, f"--tp 4 needs a multiple of 4 ranks, but STARTED 2.  {RUN} 4 ..."),
        (4, {"tp": 0}, f"--tp 0: {WHOLE}"),
        (4, {"dp": -1}, f"--dp -1: {WHOLE}"),
        (4, {"cp": 2.0}, f"--cp 2.0: {WHOLE}"),
        (4, {"pp": True}, f"--pp True: {WHOLE}"),
        (
            4,
            {"dp": 4, "ep": 3},
            "--ep 3 does not divide dp 4: experts are spread over ep of the dp ranks.  Take --ep 2, or 3 ranks:"
            " mpitrain local -n 3 ...",
        ),
        (
            4,
            {"tp": 4, "ep": 2},
            "--ep 2 does not divide dp 1: experts are spread over ep of the dp ranks.  Take --ep 1, or 8 ranks:"
            " mpitrain local -n 8 ...",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_on_every_rank(ranks: int, sizes: dict[str, int], text: str) -> None:
    def main() -> str:
        try:
            Mesh(world(), **sizes)
        except MeshError as error:
            return str(error)
        return "made"

    assert LocalWorld(ranks).run(main) == [text.replace("STARTED", "mpitrain local started")] * ranks


def test_the_way_out_names_the_launcher() -> None:
    class Mpi(World):
        def __init__(self) -> None:
            self.size, self.kind = 8, "mpi"

    with pytest.raises(MeshError) as caught:
        Mesh(Mpi(), pp=3, dp=2, tp=2)
    assert str(caught.value) == ("--pp 3 --dp 2 --tp 2 needs 12 ranks, but MPI started 8.  Run: ./run_mpi.sh -n 12 ...")
    with pytest.raises(
        MeshError, match=r"--tp 2 needs a multiple of 2 ranks, but this is a world of 1\.  Run: ./run_mpi"
    ):
        Mesh(world(), tp=2)


def test_the_picture_shows_every_rank_at_its_coordinates() -> None:
    assert str(meshes(8, pp=2, dp=2, tp=2)[5]) == (
        "mesh of 8 ranks: pp 2 x dp 2 x cp 1 x tp 2\n"
        "             tp 0  tp 1\n"
        "  pp 0 dp 0     0     1\n"
        "  pp 0 dp 1     2     3\n"
        "  pp 1 dp 0     4     5\n"
        "  pp 1 dp 1     6     7\n"
        "this is rank 5: pp 1 dp 0 tp 1"
    )
    assert str(meshes(1)[0]) == "mesh of 1 rank: pp 1 x dp 1 x cp 1 x tp 1\n    0"
    assert str(meshes(4)[1]).splitlines()[1:3] == ["  dp 0  0", "  dp 1  1"]
    with_experts = str(meshes(8, dp=4, ep=2, cp=2)[6])
    assert "dp 4 (edp 2 x ep 2) x cp 2" in with_experts
    assert "  edp 1 ep 1     6     7" in with_experts


def test_a_mesh_in_the_place_of_an_axis_is_told_apart() -> None:
    mesh = Mesh(world())
    told = r"a Mesh stands where one of its axes belongs: it has no \w+ of its own.\n.* works over, as mesh.tp"
    for layer in (ColumnLinear, RowLinear, VocabularyEmbedding):
        with pytest.raises(MeshError, match=told):
            layer("a", 4, 6, mesh)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=told):
        mesh.all_reduce(np.ones(2))  # type: ignore[attr-defined]
    assert not hasattr(mesh, "nothing")
    assert copy.copy(mesh).tp is mesh.tp
