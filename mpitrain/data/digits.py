"""Scikit-learn's digits: 1,797 handwritten digits of 8 x 8 pixels, small enough to learn within seconds.

They come with the package scikit-learn, so nothing is downloaded.  Its file is read as it lies there: to import the
package would load SciPy into every rank, which takes seconds and a hundred megabytes.

Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, of which
scikit-learn has the 1,797 that were meant for tests.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mpitrain.data.images import Images
from mpitrain.data.order import permutation
from mpitrain.errors import DataError

TEST = 360
"""Images to test with; 1,437 are left to learn from."""

COUNT, SIDE, LARGEST = 1797, 8, 16  # pixels are written as whole numbers from 0 to 16


def digits(seed: int = 0) -> Images:
    """The digits, pixels from -1 to 1, float32 (n, 8, 8, 1); which are to test with is always the same.

    Args:
        seed: of the order in which they are read.

    Raises:
        DataError: scikit-learn is not installed, or has another file of digits than it has had so far.
    """
    rows = _rows()
    # In the file's order persons and digits come in turn, so a fixed shuffle says which are to test with.
    rows = rows[permutation(0, 0, COUNT, np.arange(COUNT))]
    pixels = (rows[:, :-1] * (2.0 / LARGEST) - 1.0).astype(np.float32).reshape(COUNT, SIDE, SIDE, 1)
    labels = rows[:, -1].astype(np.int64)
    return Images(pixels[TEST:], labels[TEST:], pixels[:TEST], labels[:TEST], seed)


def _rows() -> np.ndarray:
    """Pixels and class of each digit."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("The digits come with the package scikit-learn, which is missing: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            rows = np.loadtxt(file, delimiter=",")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}.\nThe digits come with scikit-learn: pip install scikit-learn") from None
    if rows.shape != (COUNT, SIDE * SIDE + 1) or rows.min() < 0 or rows.max() > LARGEST:
        raise DataError(f"{path}: {rows.shape} numbers, but {COUNT} digits of {SIDE} x {SIDE} pixels are wanted.")
    return rows
