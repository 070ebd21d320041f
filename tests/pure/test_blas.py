"""NumPy is loaded with the faster BLAS code where its own choice is not the fastest, and nothing else changes."""

import json
import os
import subprocess
import sys

import pytest

from mpitrain import blas

ZEN4 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2 avx512f avx512bw\n"
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), True),
        (("AuthenticAMD", "GenuineIntel"), False),
        ((": 25", ": 26"), False),
        ((" avx512f", ""), False),
        (("avx512f ", "avx512fp16 "), False),
        (("vendor_id", "CPU implementer"), False),
        ((ZEN4, ""), False),
    ],
)
def test_a_zen4_is_told_from_its_neighbours(change, expected, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text(ZEN4.replace(*change))
    monkeypatch.setattr(blas, "CPUINFO", info)
    assert blas.is_zen4() is expected


def test_where_the_system_does_not_say_it_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(blas, "CPUINFO", tmp_path / "missing")
    assert not blas.is_zen4()


ASK = """
import json, os, sys
BEFORE
import mpitrain.backend
import numpy, threadpoolctl
found = [pool.get("architecture") for pool in threadpoolctl.threadpool_info() if pool["internal_api"] == "openblas"]
print(json.dumps([found[:1], os.environ.get("OPENBLAS_CORETYPE")]))
"""


def ask(before="", **variables):
    pytest.importorskip("threadpoolctl")
    environment = {name: value for name, value in os.environ.items() if name != blas.VARIABLE} | variables
    code = ASK.replace("BEFORE", before)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_library_takes_the_faster_code_and_leaves_no_variable():
    (own,), _ = ask("import numpy")
    (found,), left = ask()
    assert left is None
    assert found == ("Haswell" if blas.is_zen4() else own)


def test_a_core_type_that_the_user_names_stays():
    (own,), _ = ask("import numpy")
    assert ask(OPENBLAS_CORETYPE=own) == [[own], own]


def test_numpy_that_is_loaded_already_stays_as_it_is():
    assert ask("import numpy") == ask("import numpy, mpitrain")


def test_ranks_whose_numpy_came_first_are_told_apart():
    """Their BLAS may have taken other code on the same processor."""
    code = "BEFORE\nimport mpitrain\nfrom mpitrain.parallel.replicas import _processor\nprint(_processor())"
    seen = set()
    for before in ("", "import numpy"):
        program = code.replace("BEFORE", before)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seen.add(done.stdout)
    assert len(seen) == 2


def test_the_library_says_who_it_is():
    pytest.importorskip("threadpoolctl")
    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    assert len(blas.library().split()) >= 3


THREADS = """
import mpitrain, numpy, threadpoolctl
print([pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"])
"""


@pytest.mark.parametrize(("asked", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_ranks_that_are_threads_of_one_process_have_one_blas_thread_unless_the_user_says_otherwise(
    tmp_path, asked, threads
):
    """NumPy is loaded together with the package, before the command is known."""
    pytest.importorskip("threadpoolctl")
    script = tmp_path / "ask.py"
    script.write_text(THREADS)
    environment = {name: value for name, value in os.environ.items() if name not in blas.THREADS} | asked
    command = [sys.executable, "-m", "mpitrain", "local", "-n", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(os.sched_getaffinity(0)) < 2 or done.stdout.split() == [f"[{threads}]"] * 2
