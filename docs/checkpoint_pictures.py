"""Two pictures of checkpoints: how a save becomes one, and how a tensor that ranks cut lies in files."""

from __future__ import annotations

from typing import NamedTuple

INK, GREY, LINE, PALE = "#1f2933", "#52606d", "#9aa5b1", "#e4e7eb"
FILES = ("#b9d7f5", "#bfe5c3", "#ffd9a0", "#d9c9f2")
EDGES = ("#2f7ed8", "#2f9e44", "#b4690e", "#7950b8")
SHAPE = (480, 720)  # of the tensor that is cut


class Patch(NamedTuple):
    """A rectangle of the tensor: rows and columns, and the file that it lies in."""

    rows: slice
    columns: slice
    file: int


def layouts_picture() -> str:
    """A matrix written on dp 2, tp 2 and read on tp 3: who writes which part, where it lies, who reads what."""
    written = _written(dp=2, tp=2)
    read = _read(written, tp=3)
    left, middle, right, top = 40, 372, 596, 74
    parts = [*_frame(900, 378, "How a tensor is written on two times two ranks and read on three")]
    parts.append(_text(left, 32, "written: dp 2, tp 2", 14))
    parts.append(_text(left, 52, "tp cuts columns, replicas share rows", 11, GREY))
    for patch in written:
        parts.append(_patch(patch, left, top, FILES[patch.file], EDGES[patch.file]))
        parts.append(_in_patch(patch, left, top, f"rank {patch.file}"))
    parts += [_text(middle, 32, "four files", 14), _text(middle, 52, "rank-00000.h5 ... rank-00003.h5", 11, GREY)]
    for number in range(4):
        y = top + 62 * number
        parts.append(f'<rect x="{middle}" y="{y}" width="36" height="48" rx="3" fill="{PALE}" stroke="{LINE}"/>')
        parts.append(_text(middle + 18, y + 29, "HDF5", 11, GREY, "middle"))
        for block in range(3):
            x = middle + 40 + 34 * block
            colour = f'fill="{FILES[number]}" stroke="{EDGES[number]}"'
            parts.append(f'<rect x="{x}" y="{y}" width="30" height="48" rx="3" {colour}/>')
            parts.append(_text(x + 15, y + 29, "crc", 11, INK, "middle"))
    parts.append(_text(middle, top + 256, "each 4 MiB: a CRC-32", 11, GREY))
    parts.append(_text(right, 32, "read: tp 3", 14))
    parts.append(_text(right, 52, "each rank takes what overlaps its columns", 11, GREY))
    for rank, patches in enumerate(read):
        for patch in patches:
            parts.append(_patch(patch, right, top, FILES[patch.file], FILES[patch.file]))
        whole = Patch(slice(0, SHAPE[0]), slice(rank * SHAPE[1] // 3, (rank + 1) * SHAPE[1] // 3), rank)
        parts.append(_patch(whole, right, top, "none", INK))
        x = right + _scaled(whole.columns.start + whole.columns.stop) / 2
        parts.append(_text(x, top + _scaled(SHAPE[0]) + 22, f"rank {rank}", 12, INK, "middle"))
        parts.append(_text(x, top + _scaled(SHAPE[0]) + 38, _of_files(patches), 11, GREY, "middle"))
    said = "The manifest says of every tensor which rectangle lies in which file, and where its bytes begin."
    parts.append(_text(left, 360, said, 12, GREY))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _written(dp: int, tp: int) -> list[Patch]:
    """What each rank of a layout writes of a matrix that tp cuts by columns, as the code decides."""
    import numpy as np

    from mpitrain.checkpoint import SlabRef, holder
    from mpitrain.comm.local import LocalWorld
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.world import world
    from mpitrain.spec import Shard, Spec, slab, slab_shape

    spec = Spec({"tp": Shard(1)})

    def body() -> Patch:
        mesh = Mesh(world(), dp=dp, tp=tp)
        mine = slab(SHAPE, spec, mesh.coords, mesh.sizes)
        ref = SlabRef("weight/w", SHAPE, mine, np.empty(slab_shape(mine), np.float32), holder(spec, mesh))
        assert ref.written is not None
        rows, columns = (slice(r.start + w.start, r.start + w.stop) for r, w in zip(mine, ref.written, strict=True))
        return Patch(rows, columns, world().rank)

    return list(LocalWorld(dp * tp).run(body))


def _read(written: list[Patch], tp: int) -> list[list[Patch]]:
    """What each rank of another layout takes of which file."""
    found = []
    for rank in range(tp):
        start, stop = rank * SHAPE[1] // tp, (rank + 1) * SHAPE[1] // tp
        overlaps = [(patch, max(patch.columns.start, start), min(patch.columns.stop, stop)) for patch in written]
        found.append([Patch(patch.rows, slice(low, high), patch.file) for patch, low, high in overlaps if low < high])
    return found


def _of_files(patches: list[Patch]) -> str:
    return f"of {', '.join(str(number) for number in sorted({patch.file for patch in patches}))}"


def _scaled(length: float) -> float:
    return length * 0.37


def _patch(patch: Patch, left: float, top: float, fill: str, edge: str) -> str:
    x, y = left + _scaled(patch.columns.start), top + _scaled(patch.rows.start)
    wide, high = _scaled(patch.columns.stop) + left - x, _scaled(patch.rows.stop) + top - y
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{fill}" stroke="{edge}"'
        ' stroke-width="1.6"/>'
    )


def _in_patch(patch: Patch, left: float, top: float, text: str) -> str:
    x = left + _scaled(patch.columns.start + patch.columns.stop) / 2
    return _text(x, top + _scaled(patch.rows.start + patch.rows.stop) / 2 + 4, text, 13, INK, "middle")


def save_picture() -> str:
    """Two ranks save in the background: what each does, and what stands in the folder when the power fails."""
    left, rename = 140, 686
    parts = [*_frame(900, 330, "How a save becomes a checkpoint")]
    for number, (y, rank) in enumerate(((42, "rank 0"), (122, "rank 1"))):
        parts.append(_text(16, y + 19, rank, 13, GREY))
        parts.append(_text(16, y + 49, "its thread", 11, GREY))
        for step in range(4):
            x = (left, left + 154, left + 288, left + 422)[step]
            parts += _box(x, y, 126, f"step {500 + step}", FILES[0])
        parts += _box(left + 130, y, 20, "copy", FILES[2], 9)
        parts += _box(left + 154, y + 32, (300, 262)[number], "write the slabs, sum, sync", FILES[1])
    parts += _box(left + 552, 42, 62, "publish", FILES[2], 11)
    parts += _box(left + 552, 122, 62, "publish", FILES[2], 11)
    parts += _box(left + 618, 42, 126, "step 504", FILES[0])
    parts += _box(left + 618, 122, 126, "step 504", FILES[0])
    parts.append(_text(left + 548, 30, "all agree; rank 0: manifest, sync, rename, sync", 11, GREY, "middle"))
    parts.append(f'<path d="M{rename + 40} 156 V300" stroke="#d64545" stroke-width="1.6" stroke-dasharray="5 3"/>')
    parts.append(_text(16, 226, "in the folder", 13, GREY))
    parts += _box(left, 208, rename + 36 - left, "step-00000400/   .tmp-step-00000500/", PALE)
    parts += _box(rename + 44, 208, 884 - rename - 44, "and step-00000500/", FILES[1], 12)
    parts.append(_text(16, 276, "power fails:", 13, GREY))
    parts += _box(left, 258, rename + 36 - left, "the run goes on from step 400; what was half written is swept", PALE)
    parts += _box(rename + 44, 258, 884 - rename - 44, "from step 500", FILES[1], 12)
    parts.append(_text(rename + 40, 318, "one rename", 12, "#d64545", "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(x: float, y: float, wide: float, text: str, fill: str, size: int = 12) -> list[str]:
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="28" rx="4" fill="{fill}"/>',
        _text(x + wide / 2, y + 18, text, size, INK, "middle"),
    ]


def _frame(wide: int, high: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
        f"<title>{title}</title>",
        f'<rect width="{wide}" height="{high}" rx="8" fill="#ffffff"/>',
    ]


def _text(x: float, y: float, text: str, size: int = 13, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>'
