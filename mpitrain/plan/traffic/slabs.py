"""The parameters of a rank: the shape of each slab, how wide it is kept, and the axes that sum its gradient.

    all that is in no group below   dp+cp
    Replicate on tp as well         dp+cp+tp     with sequence parallelism what lies between two regions; projections of
                                                 keys and values where there are fewer such heads than ranks of tp
    experts                         edp+cp       ep has others of them

Whole, they are 12 h^2 / t + 7 h / t + 6 h a block, or with experts (4 h^2 + 3 h) / t + 5 h + h E + 8 h^2 E / (e t);
V h / t for the table and for the head; 2 h of the last norm; s h of positions.  A family without biases, with MLPs of
three matrices and H hidden units, and rotary positions, has (2 h^2 + 2 h h_kv + 3 h H) / t + 2 h a block, h_kv the
width of all keys; h of the last norm; no positions.

Table and positions are on the first stage, the last norm and the head on the last; a tied table is on both.

What is frozen lies in buffers of its own, which stage 3 of ZeRO alone deals out.  With ZeRO a rank has rows of its own
of each slab, by the rule of `nn.rows`, along the axes that sum its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpitrain.nn.freezing import is_frozen
from mpitrain.nn.rows import assign_rows
from mpitrain.plan.traffic.step import Step
from mpitrain.spec import cut

DATA, DATA_AND_TP, EXPERTS = "dp+cp", "dp+cp+tp", "edp+cp"
"""The axes over whose merge gradients are summed: of most parameters, of those that are Replicate on tp as well, and of
experts."""
ATOMS = {DATA: ("edp", "ep", "cp"), DATA_AND_TP: ("edp", "ep", "cp", "tp"), EXPERTS: ("edp", "cp")}


class Slab(NamedTuple):
    """This rank's part of a parameter.

    name, shape: as on the rank; is_wide: whether it is in at least float32 where the model is of half precision; axes:
    over whose merge its gradient is summed; tp_dim: the dim that tp cuts; frozen: whether it is not trained.
    """

    name: str
    shape: tuple[int, ...]
    is_wide: bool = False
    axes: str = DATA
    tp_dim: int | None = None
    frozen: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def slabs(step: Step) -> Iterator[Slab]:
    """The parameters of this rank that are trained, from the first stage's to the last's."""
    return (slab for slab in all_slabs(step) if not slab.frozen)


def all_slabs(step: Step) -> Iterator[Slab]:
    """The parameters of this rank, frozen ones too."""
    for slab in _slabs(step):
        yield slab._replace(frozen=True) if step.freeze and is_frozen(slab.name, step.freeze) else slab


def _slabs(step: Step) -> Iterator[Slab]:
    sizes, h, stream = step.sizes, step.sizes.width, step.scaled
    between = _between(step)
    if step.is_first or (step.is_last and sizes.tied):
        yield Slab("table.weight", (words(step), h), stream, tp_dim=0)
    if step.is_first and not sizes.is_rotary:
        yield Slab("positions.weight", (sizes.seq_len, h), stream, between)
    for stage in step.stages:
        for number in step.blocks_of(stage):
            yield from _block(step, number)
    if step.is_last:
        yield from _norm(step, "norm")
        if not sizes.tied:
            yield Slab("head.weight", (h, words(step)), stream, tp_dim=1)


def _block(step: Step, number: int) -> Iterator[Slab]:
    """Where branches have scales only what lies inside of one is of half precision."""
    name = f"blocks.{number}"
    yield from _norm(step, f"{name}.norm1")
    yield from _attention(step, f"{name}.attention")
    yield from _norm(step, f"{name}.norm2")
    yield from (_experts if step.sizes.has_experts(number) else _mlp)(step, f"{name}.mlp")


def _norm(step: Step, name: str) -> Iterator[Slab]:
    of_stream = step.scaled, _between(step)
    yield Slab(f"{name}.weight", (step.sizes.width,), *of_stream)
    if step.sizes.has_biases:
        yield Slab(f"{name}.bias", (step.sizes.width,), *of_stream)


def _attention(step: Step, name: str) -> Iterator[Slab]:
    sizes, h, t = step.sizes, step.sizes.width, step.tp
    if sizes.groups == sizes.heads:
        yield from _columns(step, f"{name}.qkv", 3 * h // t)
    else:
        kv = 2 * sizes.groups * sizes.head_width
        apart = t <= sizes.groups  # with too few heads each rank holds all of them
        yield from _columns(step, f"{name}.q", h // t)
        yield from _columns(step, f"{name}.kv", kv // t) if apart else _columns(step, f"{name}.kv", kv, DATA_AND_TP)
    yield from _rows(step, f"{name}.proj", h // t)


def _mlp(step: Step, name: str) -> Iterator[Slab]:
    hidden = step.sizes.units // step.tp
    if step.sizes.is_gated:
        yield from _columns(step, f"{name}.gate", hidden)
    yield from _columns(step, f"{name}.up", hidden)
    yield from _rows(step, f"{name}.down", hidden)


def _columns(step: Step, name: str, width: int, axes: str = DATA) -> Iterator[Slab]:
    """A layer into a tensor-parallel region, of which this rank has so many columns: all, where tp sums too."""
    apart = axes == DATA
    yield Slab(f"{name}.weight", (step.sizes.width, width), axes=axes, tp_dim=1 if apart else None)
    if step.sizes.has_biases:
        yield Slab(f"{name}.bias", (width,), axes=axes, tp_dim=0 if apart else None)


def _rows(step: Step, name: str, width: int) -> Iterator[Slab]:
    """A layer out of a tensor-parallel region, of which this rank has so many rows."""
    yield Slab(f"{name}.weight", (width, step.sizes.width), tp_dim=0)
    if step.sizes.has_biases:
        yield Slab(f"{name}.bias", (step.sizes.width,), step.scaled, _between(step))


def _experts(step: Step, name: str) -> Iterator[Slab]:
    """The router on every rank, in full precision; of the experts E / e, without biases."""
    h, hidden = step.sizes.width, step.sizes.units // step.tp
    yield Slab(f"{name}.router.weight", (h, step.experts), True, _between(step))
    yield Slab(f"{name}.experts.up", (step.experts // step.ep, h, hidden), axes=EXPERTS, tp_dim=2)
    yield Slab(f"{name}.experts.down", (step.experts // step.ep, hidden, h), axes=EXPERTS, tp_dim=1)


def _between(step: Step) -> str:
    """Of what lies between two regions: with sequence parallelism each rank of tp uses it for tokens of its own."""
    return DATA_AND_TP if step.is_cut else DATA


def shares(step: Step) -> list[Slab]:
    """What of each slab this rank updates: with ZeRO its rows, of which it may have none, else all of them."""
    return [slab for slab in kept(step) if not slab.frozen]


def kept(step: Step) -> list[Slab]:
    """What this rank keeps of each slab: its share, and of what is frozen all, or in stage 3 its rows."""
    here = [*all_slabs(step)]
    if not step.zero:
        return here
    own = {slab.name: slab for slab in here}
    for buffer in all_buffers(step):
        if buffer[0].frozen and step.zero < 3:
            continue
        ranks, index = merged(step, ATOMS[buffer[0].axes])
        rows = assign_rows(
            [slab.shape for slab in buffer],
            ranks,
            sizes=[_whole_size(step, slab) for slab in buffer],
            pinned={at for at, slab in enumerate(buffer) if step.sizes.tied and slab.name == "table.weight"},
            later={at for at, slab in enumerate(buffer) if slab.tp_dim is not None},
        )[index]
        for slab, (start, stop) in zip(buffer, rows, strict=True):
            own[slab.name] = slab._replace(shape=(stop - start, *slab.shape[1:]))
    return [own[slab.name] for slab in here]


def buffers(step: Step) -> list[list[Slab]]:
    """The trained parameters that lie in one buffer, since they have the same axes and dtype, in their order."""
    return [buffer for buffer in all_buffers(step) if not buffer[0].frozen]


def all_buffers(step: Step) -> list[list[Slab]]:
    """The same with those of frozen parameters."""
    found: dict[tuple[str, int, bool], list[Slab]] = {}
    for slab in all_slabs(step):
        found.setdefault((slab.axes, beta_of(step, slab), slab.frozen), []).append(slab)
    return [*found.values()]


def beta_of(step: Step, slab: Slab) -> int:
    """Bytes of an element of a weight, and of its gradient on the wire."""
    return step.beta_wide if slab.is_wide else step.beta


def _whole_size(step: Step, slab: Slab) -> int:
    """Elements of the tensor of which a slab is a part."""
    if slab.name in ("table.weight", "head.weight"):
        return step.sizes.vocab * step.sizes.width
    return slab.size * (1 if slab.tp_dim is None else step.tp) * (step.ep if slab.axes == EXPERTS else 1)


def merged(step: Step, axes: Iterable[str]) -> tuple[int, int]:
    """Ranks on a merge of atomic axes, and which of them this one is."""
    edp = step.dp // step.ep
    edp_rank, ep_rank = divmod(step.dp_rank, step.ep)
    ranks = {
        "pp": (step.pp, step.pp_rank),
        "edp": (edp, edp_rank),
        "ep": (step.ep, ep_rank),
        "cp": (step.cp, step.cp_rank),
        "tp": (step.tp, step.tp_rank),
    }
    size, index = 1, 0
    for axis in ranks:
        if axis in axes:
            n, of_axis = ranks[axis]
            size, index = size * n, index * n + of_axis
    return size, index


def words(step: Step) -> int:
    """Rows of the vocabulary on this rank of tp."""
    first, stop = cut(step.sizes.vocab, step.tp, step.tp_rank)
    return stop - first


def parameters(step: Step) -> dict[str, int]:
    """Elements of this rank's parameters that are trained, by the axes over whose merge their gradients are summed."""
    found: dict[str, int] = {}
    for slab in slabs(step):
        found[slab.axes] = found.get(slab.axes, 0) + slab.size
    return found
