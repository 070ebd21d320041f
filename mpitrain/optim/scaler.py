"""Scales of gradients: what keeps float16 gradients above the smallest half, and lowers itself when they overflow.

Gradients may lie below 2^-24, where a half is 0, and many lie where it loses bits.  The chain rule is linear:
multiplied by S at its seed, every gradient is S times as large, and divided again in float32 before anybody looks at
it.

    LossScaler     one S for all: the seed of backward is S / targets
    BlockScaler    one S_k for each residual branch: gradients carry it inside the branch only

A step in which some gradient on some rank is not finite is *skipped by all ranks*: weights, moments, the number of
updates and the learning rate stay, the scale falls.  All ranks hand in what they found to one all-reduce and hand what
comes out to `settle`, so they always hold the same scales.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2 (loss scaling); Ramesh et al. 2021, arXiv:2102.12092,
sections 2.4 and D.1 (scales of residual blocks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.nn.parameter import Parameter

HIGHEST = 2.0**120
"""Beyond it a scale would not be a float32."""

GROWTH = 2.0 ** (1.0 / 1000.0)
"""Of a branch's scale in a clean step."""

BETWEEN = 125
"""Steps in which a branch's scale is lowered once at most."""


def power(scale: float) -> str:
    """A scale for people: `2^16`, `2^-3`, `1`; of one that is no power of two two digits, `5.8e+03`."""
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5:
        return f"{scale:.2g}"
    return "1" if exponent == 1 else f"2^{exponent - 1}"


class Scaler(Protocol):
    """What a step asks of a scale.

    Attributes:
        seed: by which the gradient of the loss is multiplied.
        shown: the scale, for people: that of the loss, or the lowest of the branches.
        groups: into how many groups it parts the parameters.
    """

    @property
    def seed(self) -> float: ...

    @property
    def shown(self) -> float: ...

    @property
    def groups(self) -> int: ...

    def group(self, p: Parameter) -> int:
        """The group of a parameter; all its gradients carry one scale."""

    def inverse(self, group: int) -> float:
        """One over the scale that the gradients of a group carry."""

    def settle(self, bad: Sequence[bool]) -> str | None:
        """A step is over.

        Args:
            bad: for each group, whether a gradient on any rank was not finite; the same on all ranks.

        Returns:
            Why there is no point in going on; None: there is.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON holds it."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: it is not such a state.
        """


class LossScaler:
    """One scale of the loss, a power of two, so that scaling changes exponents only.

        overflow    hysteresis is counted down; where it is used up, scale = max(scale / 2, floor)
        success     after `window` in a row, scale = 2 scale, and the hysteresis is whole again

    Args:
        scale: at the start, a power of two.
        window: clean steps after which it is doubled; 0: it never changes.
        hysteresis: overflows that it takes to lower it, after a doubling or at the start.
        floor: the lowest.
        patience: skipped steps in a row after which something else than the scale is wrong.

    Attributes:
        scale: now.
        skipped: steps in a row, up to now.

    Raises:
        ConfigError: a value is out of its range.
    """

    groups = 1

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        floor: float = 1.0,
        patience: int = 20,
    ) -> None:
        for name, value in (("scale", scale), ("floor", floor)):
            if not (0 < value < math.inf and math.frexp(value)[0] == 0.5):
                raise ConfigError(
                    f"loss scaling: the {name} {value:g} is not a power of two: every gradient would be rounded twice."
                )
        if scale < floor or window < 0 or hysteresis < 1 or patience < 1:
            raise ConfigError(
                f"loss scaling: scale {scale:g} (at least the floor {floor:g}), window {window} (0 or more), hysteresis"
                f" {hysteresis} and patience {patience} (1 or more) do not go together."
            )
        self.scale = float(scale)
        self.window, self.hysteresis, self.floor, self.patience = window, hysteresis, float(floor), patience
        self.skipped = 0
        self._clean = 0
        self._left = hysteresis

    @property
    def seed(self) -> float:
        return self.scale

    @property
    def shown(self) -> float:
        return self.scale

    def group(self, p: Parameter) -> int:
        return 0

    def inverse(self, group: int) -> float:
        return 1.0 / self.scale

    def settle(self, bad: Sequence[bool]) -> str | None:
        (overflow,) = bad
        if not overflow:
            self.skipped = 0
            self._clean += 1
            if self.window and self._clean >= self.window:
                self._clean, self._left = 0, self.hysteresis
                self.scale = min(2.0 * self.scale, HIGHEST)
            return None
        self.skipped += 1
        self._clean = 0
        self._left = max(0, self._left - 1)
        if self.window and not self._left:
            if self.scale == self.floor:
                return f"gradients overflow even at the lowest loss scale, {power(self.floor)}"
            self.scale = max(self.scale / 2.0, self.floor)
        if self.skipped >= self.patience:
            scale = f"is {power(self.scale)} by now" if self.window else f"stays {power(self.scale)}"
            return f"{self.skipped} steps in a row were skipped (the loss scale {scale})"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean": self._clean, "left": self._left, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        scale = state.get("scale")
        counts = [state.get(name) for name in ("clean", "left", "skipped")]
        good = isinstance(scale, float) and self.floor <= scale <= HIGHEST and math.frexp(scale)[0] == 0.5
        if not good or not all(type(count) is int and count >= 0 for count in counts):
            raise CheckpointError(
                f"The saved loss scale is none: it must be a power of two from {self.floor:g} on, and three counts."
            )
        self.scale = float(scale)  # type: ignore[arg-type]
        self._clean, self._left, self.skipped = counts  # type: ignore[assignment]


class BlockScaler:
    """One scale S_k for each residual branch; the loss and the stream have none.

    clean       S_k = S_k 2^(1/1000), at most `highest`
    overflow    S_k = S_k / sqrt(2), at least `lowest`, unless it was lowered within the last 125 updates; the step is
                skipped

    Only the branches whose own gradients overflowed are lowered.  Scales are no powers of two: what carries them is
    multiplied and divided in float32.

    The paper multiplies start and bounds by the number of data-parallel ranks, because its loss is divided by the batch
    of all of them.  Here they do not depend on the layout, so that every layout is the same run.

    Args:
        branches: how the names of each branch's parameters begin, in order (`blocks.0.attention.`).  Parameters that
            belong to no branch, or are used `outside` of theirs, carry no scale; a router, which is kept in full
            precision within its branch, does.
        start: the scale of every branch at the start.
        lowest, highest: bounds of the scales.
        patience: skipped steps in a row after which something else than the scales is wrong.

    Attributes:
        scales: now, by branch.
        skipped: steps in a row, up to now.

    Source: Ramesh et al. 2021, arXiv:2102.12092, appendix D.1.
    """

    seed = 1.0

    def __init__(
        self,
        branches: Sequence[str],
        *,
        start: float = 2.0**13,
        lowest: float = 2.0**7,
        highest: float = 2.0**24,
        patience: int = 20,
    ) -> None:
        if not (0 < lowest <= start <= highest < math.inf and patience >= 1):
            raise ConfigError(
                f"block scaling: start {start:g} must be within {lowest:g} ... {highest:g}, and patience {patience} at"
                " least 1."
            )
        self.branches = tuple(branches)
        self.scales = [float(start)] * len(self.branches)
        self.lowest, self.highest, self.patience = float(lowest), float(highest), patience
        self.skipped = 0
        self._lowered = [-BETWEEN] * len(self.branches)  # number of the update at which it was divided last
        self._steps = 0
        self._groups: dict[str, int] = {}

    @property
    def shown(self) -> float:
        return min(self.scales, default=1.0)

    @property
    def groups(self) -> int:
        """The branches, and before them what carries no scale."""
        return 1 + len(self.branches)

    def scale(self, branch: int) -> float:
        """That of a branch, now."""
        return self.scales[branch]

    def group(self, p: Parameter) -> int:
        if p.outside:
            return 0
        if p.name not in self._groups:
            found = (k for k, prefix in enumerate(self.branches, start=1) if p.name.startswith(prefix))
            self._groups[p.name] = next(found, 0)
        return self._groups[p.name]

    def inverse(self, group: int) -> float:
        return 1.0 / self.scales[group - 1] if group else 1.0

    def settle(self, bad: Sequence[bool]) -> str | None:
        self._steps += 1
        self.skipped = self.skipped + 1 if any(bad) else 0
        for k, overflow in enumerate(bad[1:]):
            if not overflow:
                if not self.skipped:
                    self.scales[k] = min(self.scales[k] * GROWTH, self.highest)
            elif self._steps - self._lowered[k] > BETWEEN:
                self._lowered[k] = self._steps
                self.scales[k] = max(self.scales[k] / math.sqrt(2.0), self.lowest)
        if self.skipped >= self.patience:
            scale = f"is {power(self.shown)} by now"
            return f"{self.skipped} steps in a row were skipped (the lowest scale of a branch {scale})"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"scales": [*self.scales], "lowered": [*self._lowered], "steps": self._steps, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        scales, lowered = state.get("scales"), state.get("lowered")
        counts = [state.get("steps"), state.get("skipped")]
        n = len(self.branches)
        good = (
            isinstance(scales, list)
            and isinstance(lowered, list)
            and len(scales) == len(lowered) == n
            and all(isinstance(scale, float) and self.lowest <= scale <= self.highest for scale in scales)
            and all(type(count) is int for count in (*lowered, *counts))
        )
        if not good:
            raise CheckpointError(f"The saved scales of residual branches do not fit the {n} branches of this model.")
        self.scales[:], self._lowered[:] = scales, lowered  # type: ignore[assignment]
        self._steps, self.skipped = counts  # type: ignore[assignment]
