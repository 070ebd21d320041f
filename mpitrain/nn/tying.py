"""Tying: a layer that uses the weight of another one, or its transpose.

    table = Embedding("table", vocab, width)
    head = Linear("head", width, vocab, bias=False, tied=table.weight)        # scores by the transpose of the table

It is one `Parameter` in two places: one name, one initial value, one gradient, which is the sum of both uses, one place
in a checkpoint.  Over a pipeline only the first and the last stage can share one (`{"ends": REPLICATE}` in its spec);
each then makes it anew, under the same name, for its own layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.errors import ShapeError
from mpitrain.nn.parameter import Parameter
from mpitrain.spec import State


def is_transposed(
    layer: str,
    shape: tuple[int, int],
    tied: Parameter,
    transposed: bool | None,
    cuts: Mapping[str, State] | None = None,
) -> bool:
    """Whether a layer uses the transpose of a weight that it is given.

    Args:
        layer: for errors: `head (Linear)`.
        shape: that the layer needs.
        tied: the weight.
        transposed: what was asked for; None: what the shapes say.
        cuts: axis -> how the layer's weight is cut.

    Raises:
        ShapeError: the weight has another shape or is cut in another way, or it is square and nothing was asked for.
    """
    own = f"{tied.name} {tied.full_shape}"
    if len(tied.full_shape) == 2 and shape[0] == shape[1] and tied.full_shape == shape and transposed is None:
        raise ShapeError(
            f"{layer}: the weight {own} is square: does the layer use it as it is, or its transpose?\n"
            "Say transposed=False or transposed=True."
        )
    turned = tied.full_shape == shape[::-1] and tied.full_shape != shape if transposed is None else transposed
    if tied.full_shape != (shape[::-1] if turned else shape):
        raise ShapeError(
            f"{layer}: the weight {own} cannot be tied to it: it needs {shape}, or the transpose of {shape[::-1]}."
        )
    for axis in ("tp", "ep", "edp", "cp"):
        wanted, has = (cuts or {}).get(axis), tied.spec.state(axis)
        dim = None if has.dim is None else 1 - has.dim if turned else has.dim
        if (None if wanted is None else wanted.dim) != dim:
            said = "whole" if has.dim is None else f"cut over {axis} along its dim {has.dim}"
            needs = "whole" if wanted is None or wanted.dim is None else f"cut over {axis} along dim {wanted.dim}"
            raise ShapeError(
                f"{layer}: the weight {own} is {said}{' and used transposed' * turned}, but the layer needs one that is"
                f" {needs}.\nTie it to a layer that is cut alike: ColumnLinear with RowLinear, VocabularyEmbedding with"
                " VocabularyHead."
            )
    return turned
