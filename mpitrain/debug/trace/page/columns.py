"""Columns of whole numbers as text: for each its bytes by place, all of them deflated together.

    column   1, 3, 258, 4, ...      two bytes each
    planes   1 3 2 4 ...  0 0 1 0 ...      first all low bytes, then all high bytes

Numbers of a trace differ little from their neighbours, so most planes are nearly constant, and a span of 66 bytes
takes about six characters.  The page reads them with what every browser has (`DecompressionStream`).
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

WIDEST = 6  # bytes of a number: what a float64 of the page holds exactly


class Columns:
    """Columns that are written one behind the other.

    Attributes:
        index: of each column its name, length and bytes a number, in order; the page finds columns by it.
    """

    def __init__(self) -> None:
        self.index: list[tuple[str, int, int]] = []
        self._planes: list[bytes] = []

    def add(self, name: str, numbers: np.ndarray[Any, Any]) -> None:
        """Append a column; what is below 0 or beyond 48 bits is written as the nearest number that fits."""
        whole = np.clip(numbers, 0, (1 << 8 * WIDEST) - 1).astype("<u8")
        width = max(1, (int(whole.max(initial=0)).bit_length() + 7) // 8)
        self.index.append((name, len(whole), width))
        self._planes.append(whole.view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())

    def text(self) -> str:
        """All columns as base64."""
        return base64.b64encode(zlib.compress(b"".join(self._planes), 9)).decode()
