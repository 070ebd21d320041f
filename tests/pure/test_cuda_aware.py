"""What an MPI library says of itself is read as it is meant."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mpitrain.comm import cuda_aware


class Library:
    """One that has the functions of these answers."""

    def __init__(self, built: int | None, now: int | None, code: int = 0) -> None:
        if built is not None:
            self.MPIX_Query_cuda_support = lambda: built
        if now is not None:

            def query(kind: Any, flag: Any) -> int:
                assert kind.value == 0
                flag._obj.value = now
                return code

            self.MPIX_GPU_query_support = query


@pytest.mark.parametrize(
    ("built", "now", "code", "said"),
    [
        (1, None, 0, True),  # Open MPI
        (0, None, 0, False),
        (-1, None, 0, False),
        (1, 1, 0, True),  # MPICH
        (1, 0, 0, False),  # built to, and switched off
        (0, 1, 0, False),
        (None, 1, 0, True),  # Cray's
        (None, None, 0, None),  # Intel's
        (None, 1, 5, None),
    ],
)
def test_both_functions_must_agree(monkeypatch, built, now, code, said):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library(built, now, code))
    assert cuda_aware.takes_device_memory("module") is said


def test_a_library_that_cannot_be_opened_says_nothing():
    assert cuda_aware.takes_device_memory("/nowhere/libmpi.so") is None
