"""All that there is of this folder where there is no GPU."""

import pytest


def test_the_gpu(missing: str) -> None:
    pytest.skip(f"no GPU, so the tests of tests/gpu are left out: {missing}")
