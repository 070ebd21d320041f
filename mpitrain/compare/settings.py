"""What two runs were told to do, and with what: settings, versions, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import config
from mpitrain.config import OPTIONS
from mpitrain.errors import UserError

OF_LAYOUT = frozenset("pp dp ep cp tp sequence_parallel cp_attention schedule chunks slices zero microbatches".split())
"""Settings by which no run becomes another run."""
OF_PLACE = frozenset("run resume stop_after faults log_every config digests".split())
"""Settings that are no part of the training."""
MOST_FACTS = 40


class Other(NamedTuple):
    """A setting that is not the same in both runs."""

    name: str
    one: Any
    other: Any

    @property
    def is_layout(self) -> bool:
        """Whether it says only how the training is laid out."""
        return self.name in OF_LAYOUT


def read(folder: Path) -> dict[str, Any]:
    """The settings of a run; empty where it has none that can be read."""
    path = folder / "config.toml"
    if not path.is_file():
        return {}
    try:
        return asdict(config.parse(["--config", str(path)]))
    except UserError:
        return {}


def others(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Other]:
    """The settings that differ, those of the training first."""
    if not one or not other:
        return []
    names = [name for name in OPTIONS if name in one and name in other and name not in OF_PLACE]
    found = [Other(name, one[name], other[name]) for name in names if one[name] != other[name]]
    return sorted(found, key=lambda each: each.is_layout)


def facts(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Other]:
    """Versions, kernels and the like that differ."""
    names = list(dict.fromkeys([*one, *other]))[:MOST_FACTS]
    return [Other(str(name), one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]
