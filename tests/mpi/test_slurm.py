"""A job on a real Slurm: four ranks on two nodes are preempted, save, queue up again, and go on with the same bits."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupted import FLAGS, TEXT, Outcome, last_step, outcome, undisturbed
from mpi_launch import ROOT, find_mpirun, vendor
from slurm_cluster import Cluster, carriers, missing
from this_python import shell_of_this_python

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

# The user's script of these jobs: notes where each rank runs, then trains.
NOTED = f"""\
import os, runpy
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["SLURM_PROCID"]
with open(f"place-{{rank}}", "a") as file:
    file.write(os.environ["SLURMD_NODENAME"] + "\\n")
runpy.run_path({str(ROOT / "examples/train_gpt.py")!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without what lets ranks share cores: under Slurm that would put all on the first node."""
    variables = shell_of_this_python(tmp_path_factory.mktemp("shell"))
    for name in ("PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_rmaps_base_oversubscribe"):
        variables.pop(name)
    return variables


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, shell: dict[str, str]) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm"), shell) as cluster:
        yield cluster
    assert cluster.left_behind() == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shell: dict[str, str]) -> Outcome:
    """What the run comes to if nothing disturbs it."""
    return undisturbed(tmp_path_factory.mktemp("whole"), shell, 4)


@pytest.fixture(params=["mpirun", "srun"])
def launcher(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """What starts the ranks; skips if this Slurm cannot."""
    if request.param == "srun":
        mpirun = find_mpirun()
        assert mpirun is not None
        kind = "pmi2" if vendor(mpirun) == "mpich" else "pmix"
        if kind not in cluster.run("srun", "--mpi=list"):
            pytest.skip(f"this Slurm has no plugin {kind}: apt-get install libpmix-dev")
    return str(request.param)


class Job:
    """The job script of the examples, submitted in a folder with its three lines filled in."""

    def __init__(self, cluster: Cluster, folder: Path, launcher: str, partition: str = "main") -> None:
        self.cluster, self.folder = cluster, folder
        for name in ("examples", "run_mpi.sh"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "noted.py").write_text(NOTED)
        (folder / "book.txt").write_text(TEXT)
        script = (ROOT / "examples/slurm/job.sh").read_text()
        train = f"train=(noted.py {' '.join(FLAGS)})"
        for mine, theirs in {
            "#SBATCH --nodes=2 --ntasks-per-node=16 --time=04:00:00": "#SBATCH --nodes=2 --ntasks-per-node=2 --time=60",
            "setup() { module load openmpi; export MPITRAIN_MPI=system; }": "setup() { :; }",
            "train=(examples/train_gpt.py --steps 20000 --save-every 500 --keep 3)": train,
        }.items():
            assert script.count(mine) == 1, mine
            script = script.replace(mine, theirs)
        (folder / "job.sh").write_text(script)
        words = ("sbatch", "--parsable", f"--partition={partition}", "job.sh")
        said = cluster.run(*words, cwd=folder, MPITRAIN_LAUNCH=launcher)
        self.number = said.strip()
        self.run = folder / "runs" / self.number

    def output(self) -> str:
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def information(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def state(self) -> str:
        return self.information()["JobState"]

    def told(self) -> str:
        return f"job {self.information()}\n{self.output()}"

    def is_over(self) -> bool:
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90) -> float:
        """Until the condition holds; the seconds that it took.  Fails early if the job is over without it."""
        looks = 0  # a job that is queued again is "over" for a moment

        def holds() -> bool:
            nonlocal looks
            looks = looks + 1 if self.is_over() else 0
            held = condition()
            assert held or looks < 20, self.told()
            return held

        return self.cluster.wait(holds, seconds, self.told)

    def places(self) -> list[list[str]]:
        """Of each rank the node of each of its starts."""
        return [path.read_text().split() for path in sorted(self.folder.glob("place-*"))]


def goes_on_as_if_nothing_had_been(job: Job, whole: Outcome) -> None:
    """From here on the job stops, queues up, starts again, and comes to the same end."""
    queued = job.wait_for(lambda: job.information().get("Restarts") == "1")
    waited = job.wait_for(lambda: job.state() == "RUNNING")
    ended = job.wait_for(job.is_over)
    print(f"queued again after {queued:.1f} s, started after {waited:.1f} s more, at its end after {ended:.1f} s more")
    assert job.state() == "COMPLETED", job.told()
    assert job.output().count("go on after step") == 1, job.told()
    assert job.places() == [["n1", "n1"], ["n1", "n1"], ["n2", "n2"], ["n2", "n2"]]
    assert outcome(job.run) == whole


def test_a_job_that_gets_its_signal_saves_queues_up_and_goes_on_with_the_same_bits(cluster, tmp_path, launcher, whole):
    job = Job(cluster, tmp_path, launcher)
    job.wait_for(lambda: last_step(job.run) >= 15)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # as near the end of its time
    goes_on_as_if_nothing_had_been(job, whole)
    assert "job.sh: exit code 85, queueing up again" in job.output()


@pytest.mark.parametrize("partition", ["main", "graceful"])
def test_a_job_that_makes_room_for_an_urgent_one_goes_on_after_it_with_the_same_bits(
    cluster, tmp_path, launcher, partition, whole
):
    job = Job(cluster, tmp_path, launcher, partition)
    job.wait_for(lambda: last_step(job.run) >= 15)
    words = ("sbatch", "--parsable", "--partition=urgent", "-N2", "--ntasks-per-node=2", "--output=/dev/null")
    urgent = cluster.run(*words, "--wrap", "sleep 2", cwd=tmp_path).strip()
    goes_on_as_if_nothing_had_been(job, whole)
    assert ("job.sh: preempted, queueing up again" in job.output()) == (partition == "graceful")
    assert cluster.job(urgent)["JobState"] == "COMPLETED"


def test_a_job_that_is_cancelled_is_not_queued_again(cluster, tmp_path):
    job = Job(cluster, tmp_path, "mpirun")
    job.wait_for(lambda: last_step(job.run) >= 1)
    cluster.run("scancel", job.number)
    job.wait_for(lambda: job.state() == "CANCELLED")
    time.sleep(1)
    assert job.information()["Restarts"] == "0"
    assert job.state() == "CANCELLED"


def test_a_job_whose_ranks_are_worlds_of_one_is_refused(cluster, tmp_path):
    """C79: srun without the right --mpi."""
    (tmp_path / "book.txt").write_text(TEXT)
    command = [
        sys.executable,
        "-m",
        "mpi4py",
        str(ROOT / "examples/train_gpt.py"),
        *FLAGS,
        "--run",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        ["srun", "--mpi=none", "-N2", "-n4", *command],
        cwd=tmp_path,
        env=cluster.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "LaunchError: the launcher started 4 ranks" in done.stderr
    assert "srun --mpi=list" in done.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_of_a_cluster_outlives_a_test_that_is_killed(tmp_path, shell):
    if reason := missing():
        pytest.skip(reason)
    program = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests/mpi")!r})
from slurm_cluster import TOKEN, Cluster, carriers
cluster = Cluster(Path({str(tmp_path)!r}) / "slurm", dict(os.environ)).__enter__()
cluster.run("sbatch", "-N2", "--output=/dev/null", "--wrap", "srun -n2 sleep 300", cwd=Path({str(tmp_path)!r}))
token = cluster.variables[TOKEN]
cluster.wait(lambda: len(carriers(token)) > 6, 20, lambda: "")
print(token, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], env=shell, capture_output=True, text=True, timeout=60)
    token = done.stdout.strip()
    assert token, done.stderr
    end = time.monotonic() + 10
    while carriers(token) and time.monotonic() < end:
        time.sleep(0.1)
    assert carriers(token) == []
