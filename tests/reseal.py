"""Change a manifest as somebody does who can also make its sum fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.manifest import sealed


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """`change` changes what the manifest of a checkpoint says."""
    path = checkpoint / "manifest.json"
    whole = json.loads(path.read_text())
    del whole["sha256"]
    change(whole)
    path.write_text(sealed(json.dumps(whole).removesuffix("}")))
