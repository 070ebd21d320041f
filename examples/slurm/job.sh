#!/bin/bash
# Train on several nodes. Before the time is up, or when Slurm wants the nodes back: save, queue up again, go on there.
#
#     sbatch examples/slurm/job.sh        in the clone; once before, on the login node: MPITRAIN_MPI=system ./run_mpi.sh doctor
#
# Three lines are yours. (1) What you ask for:
#SBATCH --nodes=2 --ntasks-per-node=16 --time=04:00:00

# 300 seconds before the end Slurm sends SIGUSR1 to this shell (B:), or up to a minute earlier. In that time all ranks must
# finish a step and write a checkpoint. Slurm reads its options down to the first command, and no further.
#SBATCH --job-name=mpitrain
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

# (2) The cluster's MPI, and (3) what is trained:
setup() { module load openmpi; export MPITRAIN_MPI=system; }
train=(examples/train_gpt.py --steps 20000 --save-every 500 --keep 3)

queue_again() { echo "job.sh: $1, queueing up again"; scontrol requeue "$SLURM_JOB_ID"; exit 85; }
is_preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }

trap 'queue_again "asked to stop before it began"' USR1
setup
# In the background: a shell acts on a signal only when what it runs in the foreground is over.
./run_mpi.sh "${train[@]}" --run "runs/$SLURM_JOB_ID" --resume auto &
job=$!
trap 'kill -USR1 "$job"' USR1
while kill -0 "$job" 2>/dev/null; do wait "$job"; done # each signal ends one wait
wait "$job"
code=$?

# 85: stopped as asked, and saved. 138: asked so early that training had not begun. A preempted job that has a grace time
# loses its ranks at once, but only while this script runs is it queued again. Whatever else went wrong would do so again.
case $code in 85 | 138) queue_again "exit code $code" ;; esac
if is_preempted; then queue_again "preempted"; fi
exit $code
