"""Names of the MPI library's shared memory are taken away, and nothing else's."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from mpitrain.comm.library_memory import forget_names

MEMORY = Path("/dev/shm")


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="no /dev/shm to write to")
def test_only_what_this_process_has_mapped_of_mpich_loses_its_name(tmp_path: Path) -> None:
    mine, others, board = (MEMORY / f"{start}{secrets.token_hex(4)}_0" for start in ("mpich_shm_", "mpich_shm_", "x-"))
    elsewhere = tmp_path / "mpich_shm_12ab_0"
    maps = tmp_path / "maps"
    lines = [
        f"7f6bc0368000-7f6bc0772000 rw-s 00000000 00:1b 221609    {path}" for path in (mine, mine, board, elsewhere)
    ]
    maps.write_text("\n".join([*lines, "7f6bc0772000-7f6bc0773000 rw-p 00000000 00:00 0", ""]))
    try:
        for path in (mine, others, board, elsewhere):
            path.touch()
        forget_names(str(maps))
        assert [path.exists() for path in (mine, others, board, elsewhere)] == [False, True, True, True]
        forget_names(str(maps))  # as the next rank does
    finally:
        for path in (mine, others, board):
            path.unlink(missing_ok=True)


def test_where_nothing_tells_what_is_mapped_nothing_happens(tmp_path: Path) -> None:
    forget_names(str(tmp_path / "none"))
