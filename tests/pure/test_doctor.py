"""The doctor never crashes, never hangs, and says how to mend what it finds."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain import doctor
from mpitrain.doctor import ask, gpu, launchers, machine
from mpitrain.doctor.ask import Answer, Finding, ask_python

ROOT = Path(__file__).parents[2]


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_child_that_hangs_is_ended_in_time_together_with_its_children(tmp_path):
    started = time.monotonic()
    answer = ask.ask(["/bin/sh", "-c", f"echo before; sleep 4321 & echo $! > {tmp_path}/pid; wait"], 0.5)
    assert time.monotonic() - started < 5
    assert answer == Answer(None, "before\n")
    assert answer.last_line == "no answer in time"
    command_line = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    while command_line.exists() and "4321" in command_line.read_text():  # it may take a moment to die
        assert time.monotonic() - started < 5


def test_a_child_that_ignores_the_request_to_end_is_killed():
    started = time.monotonic()
    assert ask.ask([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(99)"], 1).code is None
    assert time.monotonic() - started < 10


def test_a_missing_program_is_an_answer():
    assert ask.ask(["/nowhere/program"], 5).code == 127


def test_a_check_that_crashes_is_a_finding():
    def check_moon():
        raise RuntimeError("no moon")

    finding = doctor.examine([check_moon])[0]
    assert finding == Finding("moon", "warn", "could not be examined: RuntimeError: no moon")


def test_libraries_that_some_options_need_are_told_with_the_extras_that_bring_them(monkeypatch):
    def version(name):
        if name == "safetensors":
            return "0.8.0"
        raise machine.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", version)
    (found,) = machine.check_extras()
    assert (found.level, found.text) == ("note", "safetensors 0.8.0; not here: tokenizers, tensorboardX")
    assert "'mpitrain[hf,tensorboard]'" in found.fix
    monkeypatch.setattr(machine, "version", lambda name: "1.0")
    (found,) = machine.check_extras()
    assert (found.level, found.fix) == ("ok", "")


def test_it_answers_on_a_bare_machine_and_training_can_run_there(tmp_path):
    """No PATH, no home, no variables: only this Python; what lacks is a finding with a way out."""
    code = "import sys; from mpitrain.doctor import main; sys.exit(main(['--json']))"
    env = {"PYTHONPATH": str(ROOT), "OMPI_MCA_osc": "^ucx"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = json.loads(run.stdout)
    assert said["can_train"] is True
    topics = {finding["topic"] for finding in said["findings"]}
    assert {
        "Python",
        "NumPy",
        "cores",
        "memory",
        "/dev/shm",
        "MPI",
        "Slurm",
        "GPU",
        "HDF5",
        "folder",
        "kernels",
        "extras",
    } <= topics
    assert [f for f in said["findings"] if f["level"] in ("warn", "bad") and not f["fix"]] == []
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_says_whether_training_can_run(monkeypatch, capsys):
    good, bad = Finding("MPI", "warn", "none", "get one"), Finding("HDF5", "bad", "broken", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda: [good])
    assert doctor.main([]) == 0
    assert "Training can run here." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: [good, bad])
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "cannot run here until this is mended: HDF5" in out
    assert "fix: mend it" in out
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1]["fix"] == "mend it"


def test_a_launcher_of_another_mpi_is_found_out(tmp_path):
    mpirun = program(tmp_path / "mpirun", "echo world of 1; echo world of 1")
    finding = launchers.try_launch(mpirun, "Open MPI v5")
    assert finding.level == "bad"
    assert "another MPI" in finding.text
    assert finding.fix


def test_a_launcher_that_fails_is_quoted(tmp_path):
    mpirun = program(tmp_path / "mpirun", "echo; echo 'no fabric here' >&2; echo ------; exit 3")
    finding = launchers.try_launch(mpirun, "Open MPI v5")
    assert finding.level == "bad"
    assert "no fabric here" in finding.text


def test_two_ranks_that_meet_are_fine(tmp_path):
    mpirun = program(tmp_path / "mpirun", "echo world of 2; echo world of 2")
    assert launchers.try_launch(mpirun, "MPICH 5").level == "ok"


def test_slots_are_tried_without_the_settings_that_would_hide_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "")
    mpirun = program(tmp_path / "mpirun", 'test -n "$PRTE_MCA_rmaps_default_mapping_policy"')
    finding = launchers.try_slots(mpirun)
    assert finding.level == "note"
    assert "--oversubscribe" in finding.fix
    for name, value in launchers.UNBOUND.items():
        monkeypatch.setenv(name, value)
    finding = launchers.try_slots(mpirun)
    assert finding.level == "ok"
    assert "in force" in finding.text


def test_a_missing_mpi_leaves_one_rank_and_threads(monkeypatch):
    monkeypatch.setattr(launchers, "ask_python", lambda *_: Answer(1, "RuntimeError: cannot load MPI library"))
    [finding] = launchers.check_mpi()
    assert finding.level == "warn"
    assert "cannot load MPI library" in finding.text
    assert "mpitrain local" in finding.text
    assert "pip install 'mpitrain[mpi]'" in finding.fix


def test_a_surrounding_mpirun_is_hidden_from_children(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("OMPI_MCA_osc", "^ucx")
    env = ask.outside_of_mpi(EXTRA="1")
    assert "OMPI_COMM_WORLD_SIZE" not in env
    assert "PMI_RANK" not in env
    assert env["OMPI_MCA_osc"] == "^ucx"
    assert env["EXTRA"] == "1"


def test_small_shared_memory_is_a_warning(monkeypatch):
    room = SimpleNamespace(total=2**22, free=2**22)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: room)
    [finding] = machine.check_shared_memory()
    assert finding.level == "warn"
    assert "4 MiB free of 4" in finding.text
    assert "OMPI_MCA_btl_sm_backing_directory" in finding.fix


@pytest.mark.parametrize(("threads", "level"), [(1, "ok"), (64, "note"), (None, "ok")])
def test_many_blas_threads_are_noted(monkeypatch, threads, level):
    said = json.dumps({"numpy": "2.4.0", "blas": "openblas 0.3", "threads": threads})
    monkeypatch.setattr(machine, "ask_python", lambda *_: Answer(0, said))
    [finding] = machine.check_numpy()
    assert finding.level == level
    assert ("OMP_NUM_THREADS=1" in finding.fix) == (level == "note")


@pytest.mark.parametrize(
    ("answer", "topic", "level", "fix"),
    [
        (Answer(1, "ModuleNotFoundError: No module named 'h5py'"), "HDF5", "bad", "pip install"),
        (Answer(None, ""), "folder", "bad", "another folder"),
        (
            Answer(0, '{"h5py": "3", "hdf5": "2", "mpio": false, "write": "denied", "lock": ""}'),
            "folder",
            "warn",
            "FALSE",
        ),
        (
            Answer(0, '{"h5py": "3", "hdf5": "2", "mpio": true, "write": "", "lock": "no locks"}'),
            "folder",
            "warn",
            "FALSE",
        ),
    ],
)
def test_a_folder_where_no_run_can_be_kept_is_found(monkeypatch, answer, topic, level, fix):
    monkeypatch.setattr(machine, "ask_python", lambda *_: answer)
    finding = machine.check_folder()[-1]
    assert (finding.topic, finding.level) == (topic, level)
    assert fix in finding.fix


def test_cupy_that_reaches_no_device_is_not_taken_for_a_gpu(monkeypatch):
    one = "GPU 0: H200 (UUID: x)\n"
    finding = gpu_as(monkeypatch, one, {"broken": "CUDARuntimeError: cudaErrorInsufficientDriver"})
    assert finding.level == "warn"
    assert "InsufficientDriver" in finding.text
    finding = gpu_as(monkeypatch, one, {"refused": "--device cuda needs CuPy, which is not installed: pip\nOr not."})
    assert finding.level == "note"
    assert "mpitrain[cuda13]" in finding.fix
    finding = gpu_as(monkeypatch, one, {"refused": "--device cuda: the driver is too old.\nTake a newer driver."})
    assert (finding.level, finding.fix) == ("warn", "Take a newer driver.")
    assert finding.text == "1 device(s) that --device cuda cannot use: the driver is too old."


def test_without_a_gpu_nothing_is_to_be_mended(monkeypatch):
    for reason, words in (
        ("CuPy, which is not installed", "none; the CPU"),
        ("no driver", "none (CuPy is installed);"),
    ):
        finding = gpu_as(monkeypatch, None, {"refused": reason})
        assert finding.level == "ok"
        assert words in finding.text


def test_a_gpu_that_computes_is_named_and_one_that_computes_wrong_is_bad(monkeypatch):
    works = {"count": 1, "device": "cuda: H200", "version": "14.2.0", "product": 64.0**3, "squares": 64.0**2}
    finding = gpu_as(monkeypatch, "GPU 0: H200\n", works)
    assert (finding.level, finding.text) == ("ok", "--device cuda works: cuda: H200, CuPy 14.2.0")
    assert gpu_as(monkeypatch, "GPU 0: H200\n", {**works, "squares": 0.0}).level == "bad"


def test_several_gpus_have_nccl_or_can_get_it(monkeypatch):
    works = {"count": 2, "device": "cuda: H200", "version": "14.2.0", "product": 64.0**3, "squares": 64.0**2}
    finding = gpu_as(monkeypatch, "GPU 0: H200\nGPU 1: H200\n", {**works, "nccl": "NCCL 2.28.3"})
    assert (finding.topic, finding.level) == ("NCCL", "ok")
    assert "NCCL 2.28.3 loads: --device-messages nccl" in finding.text
    finding = gpu_as(monkeypatch, "GPU 0: H200\nGPU 1: H200\n", {**works, "nccl": ""})
    assert (finding.topic, finding.level) == ("NCCL", "note")
    assert "nvidia-nccl-cu13" in finding.fix


def test_gpus_that_are_hidden_are_told(monkeypatch):
    works = {"count": 1, "device": "cuda: H200", "version": "14.2.0", "product": 64.0**3, "squares": 64.0**2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    finding = gpu_as(monkeypatch, "GPU 0: H200\nGPU 1: H200\n", works)
    assert finding.level == "note"
    assert "1 of 2 device(s) are seen: CUDA_VISIBLE_DEVICES=1" in finding.text


def test_a_machine_without_a_gpu_is_asked_in_earnest():
    """The program that is run in a child knows the names that it uses."""
    answer = ask_python(gpu.PROGRAM, 60)
    assert json.loads(answer.text.splitlines()[-1]).keys() & {"refused", "squares"}, answer.text


def gpu_as(monkeypatch, listed: str | None, said: dict) -> Finding:
    """The last finding where nvidia-smi lists these, and a child that tries to compute says this."""
    monkeypatch.setattr(gpu, "ask", lambda *_: Answer(127, "") if listed is None else Answer(0, listed))
    monkeypatch.setattr(gpu, "ask_python", lambda *_: Answer(0, f"a warning\n{json.dumps(said)}\n"))
    return gpu.check_gpu()[-1]


def test_a_quota_of_the_container_limits_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine.Path, "read_text", lambda self: "250000 100000\n")
    assert machine.cores_allowed() == (2, "of 64; the container's quota is 2.5 cores")
