"""For which of the predicted causes a message was sent that a ledger has heard of."""

from __future__ import annotations

from mpitrain.plan.traffic.slabs import ATOMS

OUTSIDE_OF_OPS = {
    "COUNT": "count of targets",
    "SEND_F": "activations",
    "SEND_B": "activation gradients",
    "B": "gradients",  # buckets that leave during backward
    "W": "gradients",
    "REDUCE": "gradients",
    "STEP": "loss and norm",
}
"""By what the executor was doing."""


def cause_of(axis: str, action: str, path: str, op: str) -> str:
    """The cause for which a message is sent that was heard of at this place.

    Args:
        axis: its name.
        action: what the executor was doing: `F`, `SEND_F`, `B`, `COUNT`, `REDUCE`, `STEP`.
        path: of the module: `blocks.0.mlp.up`; empty outside of the model; `weights` where ranks have updated some of
            them each.
        op: the innermost, or `fetch` around weights of a part of the model that come when it works; empty outside of
            ops, as the gradients' buckets that leave during backward, and what ranks tell each other of the choices of
            tokens.

    Returns:
        As in the lines of `traffic`; "other" for what is none of them.
    """
    if axis == "ends":
        return "tied table"
    if op == "fetch":
        return "weights"
    if action == "STEP" and axis != "world":
        return path or "optimizer"
    if axis in ATOMS and action in ("B", "W"):
        return "gradients"
    if path and op in ("", "recompute", "recompute.backward"):  # of no op: the last two are around what a module does
        return "routing"
    if axis == "ep":
        return "experts"
    if not op:
        return OUTSIDE_OF_OPS.get(action, "other")
    if axis == "cp":
        return "attention"
    if op.startswith("vocabulary_cross_entropy"):
        return "cross-entropy"
    return {"table": "embedding", "head": "head", "blocks": "layers"}.get(path.partition(".")[0], "other")
