"""What the README and the pages of docs/ say is true: code runs and prints what they show, links lead somewhere.

A block of a page is marked by the word behind its opening fence:

    python              runs with the blocks of its page before it; a text block right behind it is what it prints
    python ranks=2      runs on two ranks
    python file=x.py    a complete script
    sh                  every line stands in COMMANDS below, with the small form in which it is run here
    bash file=x.sh      a shell script: its syntax is checked, and its commands stand in COMMANDS, too
"""

from __future__ import annotations

import contextlib
import contextvars
import doctest
import importlib.util
import io
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mpitrain.comm.local import LocalWorld

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

TINY = "--layers 1 --width 16 --heads 2 --seq-len 16 --batch 4 --data book.txt --sample-length 8"

MPI = "mpi"  # the small form launches MPI processes

SAVED = f"python examples/train_gpt.py --run runs/a --steps 2 --stop-after 1 {TINY}"  # a run with a checkpoint
EXPORTED = "mpitrain checkpoint export runs/a gpt2 >log"  # the weights of that run as transformers keeps them
IMPORTED = f"{EXPORTED}\nmpitrain checkpoint import gpt2 runs/gpt2 >log"
KEPT = "export MPITRAIN_CACHE=cache"  # what is kept of encoded texts stays here
WORDS = "mpitrain tokenizer train book.txt words/ --vocab 300 >log"
THREE = f"python examples/train_gpt.py --run runs/a --steps 4 --save-every 1 --stop-after 3 {TINY}"  # with three
TRACED = f"mpitrain local -n 2 examples/train_gpt.py --pp 2 --steps 4 --trace --run runs/a {TINY} >log"

STAND_IN = f"export PYTHONPATH={ROOT}/tests/device/as_cupy:$PYTHONPATH"  # there `import cupy` finds the stand-in

RECORDED = f"mpitrain local -n 2 examples/train_gpt.py --steps 2 --record recordings/a {TINY} >log"

HUNTED = [  # played whole, and compared with what the pages show, by tests/local/test_bug_hunt.py
    (how, f"examples/bugs/{name}.py")
    for name, commands in {
        "00_first": "local -n 1, local -n 4, debug -n 4",
        "01_worse_on_more_ranks": "local -n 1, local -n 4, debug -n 4",
        "02_learns_nothing": "local -n 1, local -n 2, debug -n 2",
        "03_nobody_goes_on": "local -n 4, debug -n 4",
        "04_not_a_number": "local -n 4, debug -n 4",
        "05_stands_still": "local -n 2, debug -n 2",
        "06_fits_on_two": "local -n 2, local -n 4, debug -n 4",
        "07_the_last_batch": "local -n 4, debug -n 4",
        "08_drifts_apart": "local -n 1, local -n 4, debug -n 4",
        "09_grows": "debug -n 2",
    }.items()
    for how in commands.split(", ")
]

COMMANDS: dict[str, tuple[str, str]] = {
    # what the documents say: how it is run here, and whether that takes MPI
    "./run_mpi.sh -n 8 examples/train_gpt.py": (f"./run_mpi.sh -n 2 examples/train_gpt.py --steps 3 {TINY}", MPI),
    "./run_mpi.sh test": (f"./run_mpi.sh test -q {ROOT}/tests/pure/test_spec.py", ""),
    "MPITRAIN_MPI=system ./run_mpi.sh doctor": ("./run_mpi.sh doctor", ""),
    "python train.py": ("python train.py", ""),
    "mpirun -n 4 python train.py": ("mpirun -n 2 python train.py", MPI),
    "mpitrain local -n 4 train.py": ("mpitrain local -n 2 train.py", ""),
    "mpirun -n 8 python examples/train_gpt.py": (f"mpirun -n 2 python examples/train_gpt.py --steps 2 {TINY}", MPI),
    "mpitrain train --freeze table,positions,blocks.0": (
        f"mpitrain train --freeze table,positions {TINY} --steps 2",
        "",
    ),
    "mpitrain train --freeze '*,!head,!norm'": (f"mpitrain train --freeze '*,!head,!norm' {TINY} --steps 2", ""),
    "mpitrain verify --layout dp2,pp2 examples/train_gpt.py --freeze table,positions,blocks.0 --zero 3": (
        "mpitrain verify --layout pp2 examples/train_gpt.py --freeze table,positions,blocks.0 --zero 3"
        f" --steps 1 {TINY} --layers 2",
        "",
    ),
    "python examples/train_gpt.py --steps 5": (f"python examples/train_gpt.py --steps 5 {TINY}", ""),
    "mpitrain local -n 4 examples/train_gpt.py --steps 5": (
        f"mpitrain local -n 2 examples/train_gpt.py --steps 5 {TINY}",
        "",
    ),
    "python examples/01_autograd.py": ("python examples/01_autograd.py", ""),
    "mpitrain local -n 4 examples/02_collectives.py": ("mpitrain local -n 2 examples/02_collectives.py", ""),
    "mpitrain local -n 4 examples/03_data_parallel.py": ("mpitrain local -n 3 examples/03_data_parallel.py", ""),
    # docs/explanation/attention-masks.md
    "mpitrain local -n 4 examples/train_gpt.py --model llama-mini --pack --window 32 --dp 2 --cp 2": (
        "mpitrain local -n 2 examples/train_gpt.py --model llama-tiny --pack --window 8 --cp 2 --steps 2 --batch 4"
        " --sample-length 4",
        "",
    ),
    # docs/how-to/use-gpus.md: on the stand-in
    "./run_mpi.sh doctor": ("./run_mpi.sh doctor", ""),
    "./run_mpi.sh -n 1 examples/train_gpt.py --device cuda --dtype bfloat16": (
        f"{STAND_IN}\npython examples/train_gpt.py --device cuda --dtype bfloat16 --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --device cuda --tp 2": (
        f"{STAND_IN}\nmpirun -n 2 python examples/train_gpt.py --device cuda --tp 2 --steps 2 {TINY}",
        MPI,
    ),
    # docs/how-to/bring-your-weights.md, docs/reference/checkpoint-commands.md
    "mpitrain checkpoint import gpt2 runs/gpt2": (
        f"{SAVED} >log\n{EXPORTED}\nmpitrain checkpoint import gpt2 runs/gpt2",
        "",
    ),
    "mpitrain checkpoint inspect runs/gpt2": (f"{SAVED} >log\n{IMPORTED}\nmpitrain checkpoint inspect runs/gpt2", ""),
    'mpitrain generate runs/gpt2 --prompt "The meaning of life is"': (
        f'{SAVED} >log\n{IMPORTED}\nmpitrain generate runs/gpt2 --prompt "The" --length 4',
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --init runs/gpt2 --data notes/ --run runs/mine --save-every 500"
    " --dp 2 --tp 2 --pp 2 --lr 1e-4": (
        f"{SAVED} >log\n{IMPORTED}\nmpitrain local -n 2 examples/train_gpt.py --init runs/gpt2 --data notes/ --tp 2"
        " --run runs/mine --save-every 500 --steps 2 --batch 4 --sample-length 4 >log\n"
        "mpitrain checkpoint export runs/mine mine",
        "",
    ),
    "python read_weights.py": (f"{SAVED} >log\n{IMPORTED}\npython read_weights.py", ""),
    "mpitrain checkpoint export runs/mine mine": (
        f"{SAVED} --run runs/mine >log\nmpitrain checkpoint export runs/mine mine",
        "",
    ),
    "mpitrain checkpoint import llama runs/llama --dtype float32": (
        f"{SAVED} --model llama-tiny >log\nmpitrain checkpoint export runs/a llama\n"
        "mpitrain checkpoint import llama runs/llama --dtype float32",
        "",
    ),
    "mpitrain checkpoint export runs/llama/checkpoints/step-00000000 back --shard-size 1GiB": (
        f"{SAVED} >log\n{IMPORTED}\nmpitrain checkpoint export runs/gpt2/checkpoints/step-00000000 back",
        "",
    ),
    # docs/how-to/use-a-tokenizer.md, docs/how-to/look-at-metrics.md
    "./run_mpi.sh -n 4 examples/train_gpt.py --data book.txt --tokenizer bpe:8000": (
        f"{KEPT}\nmpitrain local -n 2 examples/train_gpt.py --tokenizer bpe:300 --steps 2 {TINY}",
        "",
    ),
    "mpitrain tokenizer train book.txt words/ --vocab 8000": (
        "mpitrain tokenizer train book.txt words/ --vocab 300",
        "",
    ),
    'mpitrain tokenizer show words/ --text "It was the best of times"': (
        f'{WORDS}\nmpitrain tokenizer show words/ --text "It was the best of times"',
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --data book.txt --tokenizer words/": (
        f"{KEPT}\n{WORDS}\nmpitrain local -n 2 examples/train_gpt.py --tokenizer words/ --steps 2 {TINY}",
        "",
    ),
    **{
        f"./run_mpi.sh -n 4 examples/train_gpt.py --run runs/a --metrics {kinds}": (
            f"mpitrain local -n 2 examples/train_gpt.py --run runs/a --metrics {kinds} --steps 2 {TINY}",
            "",
        )
        for kinds in ("csv", "csv,tensorboard")
    },
    # docs/how-to/generate-text.md
    **{
        f"mpitrain generate runs/a {flags}": (f"{SAVED} >log\nmpitrain generate runs/a {flags} --length 4", "")
        for flags in (
            '--prompt "def main("',
            '--prompt "def main(" --temperature 0',
            '--prompt "def main(" --top-k 40 --top-p 0.95 --seed 7',
            '--prompt "def main(" --samples 4',
        )
    },
    "mpitrain generate runs/a --prompt-file prompts.txt --by-line --json": (
        f"{SAVED} >log\nprintf 'one\\ntwo\\n' >prompts.txt\n"
        "mpitrain generate runs/a --prompt-file prompts.txt --by-line --json --length 4",
        "",
    ),
    "cat chapter.txt | mpitrain generate runs/a --prompt-file - --length 500": (
        f"{SAVED} >log\nhead -c 50 book.txt | mpitrain generate runs/a --prompt-file - --length 4",
        "",
    ),
    'mpirun -n 4 mpitrain generate runs/a --prompt "def main(" --tp 2 --pp 2': (
        f'{SAVED} >log\nmpirun -n 2 mpitrain generate runs/a --prompt "def main(" --tp 2 --length 4',
        MPI,
    ),
    'mpitrain local -n 4 generate runs/a --prompt "def main(" --tp 2 --pp 2': (
        f'{SAVED} >log\nmpitrain local -n 2 generate runs/a --prompt "def main(" --tp 2 --length 4',
        "",
    ),
    'mpitrain generate runs/a --prompt "def main(" --length 1000 --slide 16': (
        f'{SAVED} >log\nmpitrain generate runs/a --prompt "def main(" --length 30 --slide 4',
        "",
    ),
    # docs/how-to/compare-two-runs.md
    "python examples/train_gpt.py --steps 20 --digests 10 --run runs/one": (
        f"python examples/train_gpt.py --steps 2 --digests 1 --run runs/one {TINY}",
        "",
    ),
    "mpitrain local -n 4 examples/train_gpt.py --steps 20 --dp 2 --tp 2 --digests 10 --run runs/four": (
        f"mpitrain local -n 2 examples/train_gpt.py --steps 2 --dp 2 --digests 1 --run runs/four {TINY}",
        "",
    ),
    "mpitrain compare runs/one runs/four": (
        f"python examples/train_gpt.py --steps 2 --digests 1 --run runs/one {TINY}\nmpitrain compare runs/one runs/one",
        "",
    ),
    "python examples/train_gpt.py --steps 20 --gelu erf --digests 10 --run runs/erf": (
        f"python examples/train_gpt.py --steps 2 --gelu erf --digests 1 --run runs/erf {TINY}",
        "",
    ),
    "mpitrain compare runs/one runs/erf": (
        f"python examples/train_gpt.py --steps 2 --digests 1 --run runs/one {TINY}\n"
        f"python examples/train_gpt.py --steps 2 --gelu erf --digests 1 --run runs/erf {TINY}\n"
        "mpitrain compare runs/one runs/erf --json || test $? = 1",
        "",
    ),
    # docs/explanation/tensor-parallelism.md
    "mpitrain local -n 4 examples/04_tensor_parallel.py": ("mpitrain local -n 2 examples/04_tensor_parallel.py", ""),
    "./run_mpi.sh -n 4 examples/train_gpt.py --tp 2": (
        f"mpitrain local -n 4 examples/train_gpt.py --tp 2 --steps 2 {TINY}",
        "",
    ),
    # docs/explanation/sequence-parallelism.md
    "mpitrain local -n 4 examples/05_sequence_parallel.py": (
        "mpitrain local -n 2 examples/05_sequence_parallel.py",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --tp 4 --sequence-parallel": (
        f"mpitrain local -n 2 examples/train_gpt.py --tp 2 --sequence-parallel --steps 2 {TINY}",
        "",
    ),
    # docs/explanation/context-parallelism.md
    "mpitrain local -n 4 examples/06_context_parallel.py": ("mpitrain local -n 2 examples/06_context_parallel.py", ""),
    "./run_mpi.sh -n 4 examples/train_gpt.py --cp 4 --seq-len 512": (
        f"mpitrain local -n 2 examples/train_gpt.py --cp 2 --steps 2 {TINY}",
        "",
    ),
    # docs/explanation/optimizers.md
    "./run_mpi.sh -n 1 examples/train_gpt.py --steps 300": (f"python examples/train_gpt.py --steps 2 {TINY}", ""),
    "./run_mpi.sh -n 1 examples/train_gpt.py --steps 300 --optimizer adafactor": (
        f"python examples/train_gpt.py --steps 2 --optimizer adafactor {TINY}",
        "",
    ),
    # docs/explanation/mixed-precision.md
    "./run_mpi.sh -n 4 examples/train_gpt.py --dtype float16": (
        f"mpitrain local -n 2 examples/train_gpt.py --dtype float16 --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --dtype bfloat16": (
        f"mpitrain local -n 2 examples/train_gpt.py --dtype bfloat16 --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --dtype float16 --recompute full --optimizer adafactor --memory": (
        "mpitrain local -n 2 examples/train_gpt.py --dtype float16 --recompute full --optimizer adafactor --memory"
        f" --steps 2 {TINY}",
        "",
    ),
    "mpitrain local -n 2 examples/09_half_precision.py": ("python examples/09_half_precision.py", ""),
    ".venv/bin/python benchmarks/gpu_check.py": (
        f"CUDA_VISIBLE_DEVICES= python {ROOT}/benchmarks/gpu_check.py --json gpu.json | grep 'nothing was checked'",
        "",
    ),
    ".venv/bin/python benchmarks/precision.py": (
        f"python {ROOT}/benchmarks/precision.py --small --only float32 float16 underflow --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/precision.py --write-docs": (
        f"python {ROOT}/benchmarks/precision.py --show --result none.json",
        "",
    ),
    # docs/explanation/mixture-of-experts.md
    "python examples/train_gpt.py --experts 8": (f"python examples/train_gpt.py --experts 8 --steps 2 {TINY}", ""),
    "./run_mpi.sh -n 4 examples/train_gpt.py --experts 8 --top-k 2 --ep 4 --capacity-factor 1.25": (
        "mpitrain local -n 2 examples/train_gpt.py --experts 4 --top-k 2 --ep 2 --capacity-factor 1.25"
        f" --steps 2 {TINY}",
        "",
    ),
    "mpitrain verify --layout dp4,ep2 --layout dp2,ep2,tp2,sp --layout dp2,ep2,cp2 -- --experts 4 --top-k 2": (
        "mpitrain verify --layout dp2,ep2 --first 1 -- --experts 4 --top-k 2 --layers 1",
        "",
    ),
    "python examples/10_experts.py --svg experts.svg": (
        "python examples/10_experts.py --steps 2 --svg experts.svg\ngrep -q '<title>Which expert' experts.svg",
        "",
    ),
    "mpirun -n 2 python examples/10_experts.py --steps 300": (
        "mpirun -n 2 python examples/10_experts.py --steps 2",
        MPI,
    ),
    ".venv/bin/python benchmarks/experts.py --jobs 2": (
        f"python {ROOT}/benchmarks/experts.py --small --only 'dense, seed 1' 'switch, seed 1' --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/experts.py --write-docs": (
        f"python {ROOT}/benchmarks/experts.py --show --result none.json",
        "",
    ),
    # docs/how-to/train-on-images.md
    "mpitrain local -n 4 examples/11_digits_cnn.py --pp 2": (
        "mpitrain local -n 2 examples/11_digits_cnn.py --pp 2 --epochs 1",
        "",
    ),
    "mpirun -n 4 python examples/11_digits_cnn.py": ("mpirun -n 2 python examples/11_digits_cnn.py --epochs 1", MPI),
    "mpirun -n 4 python examples/11_digits_cnn.py --batch-norm": (
        "mpirun -n 2 python examples/11_digits_cnn.py --batch-norm --epochs 1",
        MPI,
    ),
    "mpitrain local -n 4 examples/15_digits_mlp.py --tp 2": (
        "mpitrain local -n 2 examples/15_digits_mlp.py --tp 2 --epochs 1",
        "",
    ),
    # docs/explanation/gist.md
    "python examples/11_digits_cnn.py --gist 16": ("python examples/11_digits_cnn.py --gist 16 --epochs 1", ""),
    "./run_mpi.sh -n 4 examples/train_gpt.py --gist 16 --memory": (
        f"mpitrain local -n 2 examples/train_gpt.py --gist 16 --memory --steps 2 {TINY}",
        "",
    ),
    "mpitrain verify --layout tp2,sp --layout dp2,pp2,zb-h1 -- --gist 16": (
        "mpitrain verify --layout tp2,sp --first 1 -- --gist 16 --layers 1",
        "",
    ),
    ".venv/bin/python benchmarks/gist.py": (
        f"python {ROOT}/benchmarks/gist.py --small --only bytes --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/gist.py --write-docs": (
        f"python {ROOT}/benchmarks/gist.py --show --result none.json",
        "",
    ),
    # docs/explanation/expert-overlap.md
    "./run_mpi.sh -n 2 examples/train_gpt.py --experts 8 --ep 2 --expert-overlap": (
        f"mpitrain local -n 2 examples/train_gpt.py --experts 8 --ep 2 --expert-overlap --steps 2 {TINY}",
        "",
    ),
    "mpirun -n 2 python -m mpi4py benchmarks/expert_overlap.py --undisturbed": (
        f"mpirun -n 2 python -m mpi4py {ROOT}/benchmarks/expert_overlap.py --rounds 1 --widths 64 --network 1",
        MPI,
    ),
    # docs/how-to/train-a-mixture-of-experts.md
    **{
        f"{launch} examples/train_gpt.py --experts 8 --ep 4": (
            f"mpitrain local -n 2 examples/train_gpt.py --experts 4 --ep 2 --steps 2 {TINY}",
            "",
        )
        for launch in ("./run_mpi.sh -n 4", "mpitrain local -n 4")
    },
    "python examples/11_digits_cnn.py": ("python examples/11_digits_cnn.py --epochs 1", ""),
    "mpitrain local -n 4 examples/12_zero.py": ("mpitrain local -n 2 examples/12_zero.py", ""),
    "mpitrain local -n 2 examples/10_experts.py": ("mpitrain local -n 2 examples/10_experts.py --steps 2", ""),
    "mpitrain local -n 4 own_experts.py --ep 4": ("mpitrain local -n 4 own_experts.py --ep 4", ""),
    "mpitrain verify --layout dp2,ep2 --layout dp2,ep2,tp2 own_experts.py": (
        "mpitrain verify --layout dp2,ep2 --layout dp2,ep2,tp2 --first 2 own_experts.py",
        "",
    ),
    "mpitrain verify --layout dp4 --layout dp4,ep2 --layout dp4,ep4 -- --experts 4": (
        "mpitrain verify --layout dp2 --layout dp2,ep2 --first 1 -- --experts 4 --layers 1",
        "",
    ),
    # docs/explanation/zero.md
    "mpirun -n 4 python examples/train_gpt.py --zero 1": (
        f"mpirun -n 2 python examples/train_gpt.py --zero 1 --steps 2 {TINY}",
        MPI,
    ),
    # docs/explanation/offload.md, docs/how-to/train-beyond-memory.md
    "./run_mpi.sh -n 2 examples/train_gpt.py --offload optimizer": (
        f"mpitrain local -n 2 examples/train_gpt.py --offload optimizer --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 2 examples/train_gpt.py --offload optimizer,activations,parameters"
    " --offload-to hdf5:/tmp/scratch": (
        "mpitrain local -n 2 examples/train_gpt.py --offload optimizer,activations,parameters --offload-to hdf5:scratch"
        f" --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 2 examples/train_gpt.py --memory-budget 64MiB": (
        f"mpitrain local -n 2 examples/train_gpt.py --memory-budget 64MiB --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 2 examples/train_gpt.py --memory-budget 16MiB --offload-to hdf5:/tmp/scratch": (
        f"mpitrain local -n 2 examples/train_gpt.py --memory-budget 16MiB --offload-to hdf5:scratch --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 2 examples/train_gpt.py --offload optimizer --offload-to hdf5:/tmp/scratch": (
        f"mpitrain local -n 2 examples/train_gpt.py --offload optimizer --offload-to hdf5:scratch --steps 2 {TINY}",
        "",
    ),
    "mpitrain local -n 4 examples/train_gpt.py --zero 3 --memory --steps 5": (
        f"mpitrain local -n 2 examples/train_gpt.py --zero 3 --memory --steps 2 {TINY}",
        "",
    ),
    "mpitrain verify --layout dp4,zero1 --layout dp2,tp2,zero3": (
        "mpitrain verify --layout dp2,zero1 --layout dp2,zero3 --first 1 -- --layers 1",
        "",
    ),
    ".venv/bin/python benchmarks/zero.py": (f"python {ROOT}/benchmarks/zero.py --show --result none.json", ""),
    ".venv/bin/python benchmarks/zero.py --write-docs": (
        f"python {ROOT}/benchmarks/zero.py --show --result none.json",
        "",
    ),
    # docs/explanation/asynchronous.md
    **{
        f"./run_mpi.sh -n 4 examples/train_gpt.py {flags}": (
            f"mpitrain local -n 2 examples/train_gpt.py {flags} --steps 2 {TINY}",
            "",
        )
        for flags in (
            "--reducer stale --staleness 3",
            "--reducer stale --staleness 3 --stale-workers",
            "--reducer local --local-steps 16",
        )
    },
    "mpitrain verify --layout dp2,tp2 -- --reducer stale --staleness 2": (
        "mpitrain verify --layout dp2,tp2 --first 3 -- --reducer stale --staleness 2 --layers 1",
        "",
    ),
    ".venv/bin/python benchmarks/asynchronous.py": (
        f"python {ROOT}/benchmarks/asynchronous.py --small --only 'adamw, K=3, seed 1' 'adamw, H=4, seed 1' bowl"
        " --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/asynchronous.py --write-docs": (
        f"python {ROOT}/benchmarks/asynchronous.py --show --result none.json",
        "",
    ),
    # docs/explanation/powersgd.md
    "./run_mpi.sh -n 4 examples/train_gpt.py --reducer powersgd --optimizer adafactor": (
        f"mpitrain local -n 2 examples/train_gpt.py --reducer powersgd --optimizer adafactor --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --reducer powersgd --powersgd-rank 16 --powersgd-start 200": (
        f"mpitrain local -n 2 examples/train_gpt.py --reducer powersgd --powersgd-start 1 --steps 2 {TINY}",
        "",
    ),
    "mpitrain verify --layout dp4 --layout dp2,pp2 --layout dp2,cp2 -- --reducer powersgd": (
        "mpitrain verify --layout dp2 --first 2 -- --reducer powersgd --powersgd-tables --layers 1",
        "",
    ),
    ".venv/bin/python benchmarks/powersgd.py --jobs 2": (
        f"python {ROOT}/benchmarks/powersgd.py --small --only 'adafactor, exact, seed 1' 'adafactor, rank 4, seed 1'"
        " --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/powersgd.py --write-docs": (
        f"python {ROOT}/benchmarks/powersgd.py --show --result none.json",
        "",
    ),
    # docs/explanation/recompute.md
    "./run_mpi.sh -n 4 examples/train_gpt.py --recompute full": (
        f"python examples/train_gpt.py --recompute full --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --recompute-modules 'blocks.*.mlp,blocks.0.attention'": (
        f"python examples/train_gpt.py --recompute-modules 'blocks.*.mlp,blocks.0.attention' --steps 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --recompute-budget 4": (
        f"python examples/train_gpt.py --recompute-budget 4 --steps 2 {TINY}",
        "",
    ),
    # docs/explanation/partitioning.md
    "./run_mpi.sh -n 4 examples/train_gpt.py --pp 4 --balance flops": (
        f"mpitrain local -n 2 examples/train_gpt.py --pp 2 --balance flops --steps 2 {TINY}",
        "",
    ),
    # docs/explanation/pipelines
    "./run_mpi.sh -n 4 examples/train_gpt.py --pp 4 --schedule 1f1b --microbatches 8 --layers 8 --steps 100": (
        f"mpitrain local -n 2 examples/train_gpt.py --pp 2 --schedule 1f1b --microbatches 2 --steps 2 {TINY}",
        "",
    ),
    "mpirun -n 2 python examples/07_pipeline_timeline.py zb-h1": (
        "mpirun -n 2 python examples/07_pipeline_timeline.py zb-h1",
        MPI,
    ),
    "mpitrain local -n 2 examples/07_pipeline_timeline.py 1f1b": (
        "mpitrain local -n 2 examples/07_pipeline_timeline.py 1f1b --microbatches 2",
        "",
    ),
    "mpirun -n 2 python examples/07_pipeline_timeline.py zb-h1 --svg timeline.svg": (
        "mpirun -n 2 python examples/07_pipeline_timeline.py zb-h1 --svg timeline.svg --microbatches 2",
        MPI,
    ),
    "python examples/08_find_a_deadlock.py": ("python examples/08_find_a_deadlock.py", ""),
    "mpitrain schedule": ("mpitrain schedule", ""),
    **{
        command: (command, "")
        for command in (
            "mpitrain schedule gpipe --stages 4 --microbatches 8",
            "mpitrain schedule 1f1b --stages 4 --microbatches 8",
            "mpitrain schedule interleaved --stages 4 --microbatches 8 --chunks 2",
            "mpitrain schedule zb-h1 --stages 4 --microbatches 8",
            "mpitrain schedule terapipe --stages 4 --microbatches 2 --slices 4",
            "mpitrain schedule pipedream --stages 4 --batches 10",
            "mpitrain schedule pipedream-2bw --stages 4 --microbatches 4 --batches 3",
        )
    },
    # docs/how-to/write-a-schedule.md
    "mpitrain schedule 1f1b --stages 3 --microbatches 6 --compute-rows > mine.txt": (
        "mpitrain schedule 1f1b --stages 3 --microbatches 6 --compute-rows > mine.txt\ncat mine.txt",
        "",
    ),
    "mpitrain schedule --file mine.txt --costs f=1,b=1,w=1,message=0.5 --svg mine.svg --arrows": (
        "mpitrain schedule 1f1b --stages 3 --microbatches 6 --compute-rows > mine.txt\n"
        "mpitrain schedule --file mine.txt --costs f=1,b=1,w=1,message=0.5 --svg mine.svg --arrows",
        "",
    ),
    "mpitrain local -n 3 eager.py --pp 3": ("mpitrain local -n 3 eager.py --pp 3", ""),
    "mpitrain verify --layout pp3 --layout pp3,dp2 eager.py": (
        "mpitrain verify --layout pp3 --layout pp3,dp2 --first 2 eager.py",
        "",
    ),
    # docs/explanation/stale-weights.md
    "mpitrain local -n 4 stale.py --pp 4": ("mpitrain local -n 4 stale.py --pp 4", ""),
    "mpitrain verify --layout pp4,pipedream stale.py": ("mpitrain verify --layout pp4,pipedream stale.py", ""),
    "mpitrain verify --layout pp2,dp2,pipedream-2bw stale.py --microbatches 4": (
        "mpitrain verify --layout pp2,dp2,pipedream-2bw stale.py --microbatches 4",
        "",
    ),
    # docs/explanation/kernels.md
    "MPITRAIN_KERNELS=numpy ./run_mpi.sh -n 4 examples/train_gpt.py --steps 20": (
        f"MPITRAIN_KERNELS=numpy python examples/train_gpt.py --steps 2 {TINY}",
        "",
    ),
    # docs/how-to/fuzz.md
    ".venv/bin/python tests/fuzz_graphs.py --graphs 20000": (f"python {ROOT}/tests/fuzz_graphs.py --graphs 40", ""),
    ".venv/bin/python tests/fuzz_files.py --files 20000": (f"python {ROOT}/tests/fuzz_files.py --files 45", ""),
    ".venv/bin/python tests/fuzz_graphs.py --seed 20000 --seconds 3600": (
        f"python {ROOT}/tests/fuzz_graphs.py --seed 20000 --graphs 40",
        "",
    ),
    ".venv/bin/python tests/fuzz_graphs.py --kernels numpy": (
        f"python {ROOT}/tests/fuzz_graphs.py --kernels numpy --graphs 40",
        "",
    ),
    # docs/how-to/train-on-your-text.md
    "./run_mpi.sh -n 8 examples/train_gpt.py --data book.txt": (f"python examples/train_gpt.py --steps 2 {TINY}", ""),
    "./run_mpi.sh -n 8 examples/train_gpt.py --data notes/": (
        f"python examples/train_gpt.py --steps 2 {TINY} --data notes/",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --data tokens/": (
        f"python examples/train_gpt.py --steps 2 {TINY} --data tokens/",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --data book.txt --budget 600": (
        f"python examples/train_gpt.py --budget 1 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --data book.txt --model gpt-small --batch 32 --steps 5000": (
        "python examples/train_gpt.py --data book.txt --model gpt-small --width 48 --seq-len 16 --batch 2 --steps 1",
        "",
    ),
    # docs/explanation/checkpoints.md, docs/how-to/recover.md
    # docs/reference/console.md
    "mpitrain debug -n 8 examples/14_console.py": ("mpitrain debug -n 4 -c 'step; c' examples/14_console.py", ""),
    "mpitrain debug -n 8 --commands examples/14_console.txt examples/14_console.py": (
        "mpitrain debug -n 8 --commands examples/14_console.txt -c quit examples/14_console.py",
        "",
    ),
    "mpitrain local -n 4 examples/13_checkpoints.py": ("mpitrain local -n 2 examples/13_checkpoints.py", ""),
    ".venv/bin/python benchmarks/checkpoint.py": (
        f"python {ROOT}/benchmarks/checkpoint.py --small --only disk shares --rounds 1 --result small.json",
        "",
    ),
    ".venv/bin/python benchmarks/checkpoint.py --write-docs": (
        f"python {ROOT}/benchmarks/checkpoint.py --show --result none.json",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --run runs/a --resume latest": (
        f"{SAVED}\nmpitrain local -n 4 examples/train_gpt.py --run runs/a --resume latest",
        "",
    ),
    "./run_mpi.sh --restarts 3 -n 4 examples/train_gpt.py --run runs/a --steps 2000 --save-every 100": (
        f"./run_mpi.sh --restarts 1 -n 2 examples/train_gpt.py --run runs/a --steps 2 --save-every 1 {TINY}",
        MPI,
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --run runs/a --resume latest --save-every 100 --keep 2": (
        f"{THREE}\npython examples/train_gpt.py --run runs/a --resume latest --save-every 1 --keep 2\n"
        "test $(ls runs/a/checkpoints | wc -l) = 2",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --resume runs/a/checkpoints/step-00000400 --lr 0.0003": (
        f"{THREE}\npython examples/train_gpt.py --resume runs/a/checkpoints/step-00000001 --lr 0.0003\n"
        "ls -d runs/a/checkpoints/given-up-1-step-00000002",
        "",
    ),
    # docs/how-to/save-and-resume.md, in the order of the page
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/a --steps 2000 --save-every 500": (
        f"python examples/train_gpt.py --run runs/a --steps 4 --save-every 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/a --resume latest": (
        f"{SAVED}\npython examples/train_gpt.py --run runs/a --resume latest",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/a --steps 2000 --save-every 500 --resume auto": (
        f"python examples/train_gpt.py --run runs/a --steps 2 --save-every 1 --resume auto {TINY}",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/a --resume latest --save-every 100 --keep 3 --async-save": (
        f"{SAVED}\nmpitrain local -n 2 examples/train_gpt.py --run runs/a --resume latest --save-every 1 --keep 3"
        " --async-save",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/b --resume auto --max-seconds 7200": (
        f"python examples/train_gpt.py --run runs/b --resume auto --max-seconds 1e-3 {TINY} --steps 9 || test $? = 85\n"
        "ls -d runs/b/checkpoints/step-*",
        "",
    ),
    # docs/how-to/resume-elsewhere.md
    "./run_mpi.sh -n 2 examples/train_gpt.py --run runs/c --resume latest --pp 1 --schedule 1f1b --zero 2"
    " --dtype bfloat16": (
        f"mpitrain local -n 2 examples/train_gpt.py --run runs/c --steps 3 --stop-after 1 {TINY} --pp 2 --layers 2\n"
        "mpitrain local -n 2 examples/train_gpt.py --run runs/c --resume latest --pp 1 --schedule 1f1b --zero 2"
        " --dtype bfloat16",
        "",
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --run runs/b --steps 2000 --stop-after 1000": (
        f"python examples/train_gpt.py --run runs/b --steps 4 --stop-after 2 {TINY}",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --run runs/c --steps 400 --stop-after 100 --pp 4 --layers 8"
    " --microbatches 8": (
        f"mpitrain local -n 4 examples/train_gpt.py --run runs/c --steps 4 --stop-after 2 {TINY} --pp 4 --layers 4",
        "",
    ),
    "./run_mpi.sh -n 4 examples/train_gpt.py --run runs/c --resume latest --stop-after 200 --pp 2"
    " --schedule interleaved": (
        f"mpitrain local -n 4 examples/train_gpt.py --run runs/c --steps 4 --stop-after 2 {TINY} --pp 4 --layers 4"
        " --microbatches 2\n"
        "mpitrain local -n 4 examples/train_gpt.py --run runs/c --resume latest --stop-after 3 --pp 2"
        " --schedule interleaved",
        "",
    ),
    "./run_mpi.sh -n 1 examples/train_gpt.py --run runs/c --resume latest --pp 1 --schedule 1f1b": (
        f"mpitrain local -n 4 examples/train_gpt.py --run runs/c --steps 4 --stop-after 2 {TINY} --pp 4 --layers 4\n"
        "python examples/train_gpt.py --run runs/c --resume latest --pp 1 --schedule 1f1b",
        "",
    ),
    # docs/reference/checkpoint-commands.md
    # docs/how-to/trace-a-run.md
    "./run_mpi.sh -n 8 examples/train_gpt.py --dp 2 --tp 2 --pp 2 --microbatches 4 --steps 22 --run runs/a --trace": (
        f"mpirun -n 2 python examples/train_gpt.py --run runs/a --trace --steps 2 {TINY}; ls runs/a/trace",
        MPI,
    ),
    "./run_mpi.sh -n 8 examples/train_gpt.py --dp 2 --tp 2 --pp 2 --microbatches 4 --steps 20 --run runs/traced --trace"
    " --trace-ops 1": (
        "mpitrain local -n 4 examples/train_gpt.py --tp 2 --pp 2 --microbatches 4 --steps 2 --trace --trace-ops 1"
        f" --run runs/a {TINY} --layers 2",
        "",
    ),
    "mpitrain trace runs/traced --html timeline.html": (
        f"mpitrain local -n 2 examples/train_gpt.py --pp 2 --steps 2 --run runs/traced --trace {TINY} >log\n"
        "mpitrain trace runs/traced --html timeline.html && grep -ci doctype timeline.html",
        "",
    ),
    "mpitrain local -n 8 examples/14_console.py": ("mpitrain local -n 2 examples/14_console.py", ""),
    "mpitrain trace runs/a": (f"{TRACED}; mpitrain trace runs/a | grep 'to the byte, in each of 3 steps'", ""),
    "mpitrain trace runs/a --step 12": (f"{TRACED}; mpitrain trace runs/a --step 2 | grep 'computed'", ""),
    "mpitrain trace runs/a --html trace.html --perfetto trace.json.gz": (
        f"{TRACED}; mpitrain trace runs/a --html trace.html --perfetto trace.json.gz; gunzip -t trace.json.gz",
        "",
    ),
    "mpitrain checkpoint inspect runs/a": (f"{SAVED}\nmpitrain checkpoint inspect runs/a", ""),
    "mpitrain checkpoint inspect runs/a/checkpoints/step-00001000 --tensors 'weight/blocks.0.mlp.*.weight'": (
        f"{SAVED}\n"
        "mpitrain checkpoint inspect runs/a/checkpoints/step-00000001 --tensors 'weight/blocks.0.mlp.*.weight'",
        "",
    ),
    "mpitrain checkpoint verify runs/a": (f"{SAVED}\nmpitrain checkpoint verify runs/a", ""),
    "mpitrain checkpoint diff runs/a runs/b": (
        f"{SAVED}\n{SAVED.replace('runs/a', 'runs/b')}\nmpitrain checkpoint diff runs/a runs/b",
        "",
    ),
    "mpitrain checkpoint diff runs/a runs/b --tensors 'weight/*' --tolerance 1e-6": (
        f"{SAVED}\nmpitrain checkpoint diff runs/a runs/a --tensors 'weight/*' --tolerance 1e-6",
        "",
    ),
    "mpitrain checkpoint reshard runs/a runs/c/checkpoints/step-00001000 --ranks 4": (
        f"{SAVED}\nmpitrain checkpoint reshard runs/a runs/c/checkpoints/step-00000001 --ranks 4",
        "",
    ),
    "mpitrain checkpoint reshard runs/a --one-file gpt.h5": (
        f"{SAVED}\nmpitrain checkpoint reshard runs/a --one-file gpt.h5",
        "",
    ),
    "python read_one.py": (
        f"{SAVED}\nmpitrain checkpoint reshard runs/a --one-file gpt.h5\npython read_one.py",
        "",
    ),
    "mpitrain checkpoint reshard gpt.h5 runs/d/checkpoints/step-00001000 --ranks 1": (
        f"{SAVED}\nmpitrain checkpoint reshard runs/a --one-file gpt.h5\n"
        "mpitrain checkpoint reshard gpt.h5 runs/d/checkpoints/step-00000001 --ranks 1",
        "",
    ),
    # docs/how-to/debug-a-hang.md
    "./run_mpi.sh -n 2 examples/train_gpt.py --steps 50 --timeout 20": (
        f"./run_mpi.sh -n 2 examples/train_gpt.py --steps 3 --timeout 20 {TINY}",
        MPI,
    ),
    # docs/how-to/verify-a-layout.md
    "mpitrain verify --layout dp2 --layout dp4 train.py": ("mpitrain verify --layout dp2 train.py", ""),
    "mpitrain verify --layout dp2,tp2,sp -- --tied --kv-heads 2": (
        "mpitrain verify --layout dp2,tp2,sp -- --tied --kv-heads 2 --layers 1",
        "",
    ),
    "mpitrain verify --layout dp4,ep2 --layout dp4,ep2,tp2,sp -- --experts 4 --top-k 2": (
        "mpitrain verify --layout dp2,ep2 --first 1 -- --layers 1",
        "",
    ),
    "./run_mpi.sh verify --all 8": ("./run_mpi.sh verify --all 1 --first 1 -- --layers 1", ""),
    "mpitrain verify --layout full --layout dp2,tp2,full --layout pp2,zb-h1,full": (
        "mpitrain verify --layout full --layout pp2,zb-h1,full --first 1",
        "",
    ),
    "mpitrain verify --layout tp2,pp2 -- --optimizer adafactor --lr-groups '*.bias=2' --lr-schedule linear": (
        "mpitrain verify --layout pp2 --first 1 -- --optimizer adafactor --lr-groups '*.bias=2' --lr-schedule linear",
        "",
    ),
    "mpitrain verify --layout pp2,tp2 -- --dtype float16 --loss-scaling blocks --recompute-budget 5": (
        "mpitrain verify --layout pp2 --first 1 -- --dtype float16 --loss-scaling blocks --recompute-budget 5",
        "",
    ),
    "mpitrain verify --layout pp2,dp2 --layout pp4,zb-h1": (
        "mpitrain verify --layout pp2,dp2 --layout pp4,zb-h1 --first 1",
        "",
    ),
    "mpitrain verify --layout pp2,dp2,pipedream -- --microbatches 1 --clip 0": (
        "mpitrain verify --layout pp2,dp2,pipedream -- --microbatches 1 --clip 0 --layers 2",
        "",
    ),
    "mpitrain verify --layout dp2 --transport mpi train.py": (
        "mpitrain verify --layout dp2 --transport mpi train.py",
        MPI,
    ),
    "mpitrain verify --sweep 2000 --seed 0": ("mpitrain verify --sweep 3 --seed 0", ""),
    # docs/how-to/cut-a-model-into-stages.md
    "mpitrain local -n 4 deep.py --pp 4 --schedule zb-h1": (
        "mpitrain local -n 4 deep.py --pp 4 --schedule zb-h1",
        "",
    ),
    "mpitrain verify --check --layout pp4 --layout dp2,pp3 --layout pp2,tp2,zb-h1 deep.py": (
        "mpitrain verify --check --layout pp4 --layout dp2,pp3 --layout pp2,tp2,zb-h1 --first 2 deep.py",
        "",
    ),
    # docs/how-to/write-a-train-script.md
    "mpitrain local -n 8 any_layout.py --pp 2 --tp 2 --cp 2 --sequence-parallel": (
        "mpitrain local -n 8 any_layout.py --pp 2 --tp 2 --cp 2 --sequence-parallel",
        "",
    ),
    "mpitrain verify --layout dp2,tp2,sp --layout cp4 --layout pp2,tp2 any_layout.py": (
        "mpitrain verify --layout dp2,tp2,sp --layout cp4 --layout pp2,tp2 --first 2 any_layout.py",
        "",
    ),
    "mpitrain verify --layout dp2,ep2 --layout dp2,ep2,cp2 any_layout.py --experts 4": (
        "mpitrain verify --layout dp2,ep2 --layout dp2,ep2,cp2 --first 2 any_layout.py --experts 4",
        "",
    ),
    "mpitrain verify --layout dp4,zero1 --layout dp2,pp2,zero3 any_layout.py": (
        "mpitrain verify --layout dp4,zero1 --layout dp2,pp2,zero3 --first 2 any_layout.py",
        "",
    ),
    "mpitrain local -n 2 resumable.py": (
        "python resumable.py\nmpitrain local -n 2 resumable.py | grep -q '4 steps are done'; ls runs/own/checkpoints",
        "",
    ),
    # docs/explanation/llama.md
    "./run_mpi.sh -n 8 examples/train_gpt.py --model llama-mini --dp 2 --tp 2 --pp 2": (
        f"mpitrain local -n 4 examples/train_gpt.py --model llama-tiny --tp 2 --pp 2 --steps 2 {TINY}",
        "",
    ),
    "mpitrain verify --layout dp2,tp2,pp2 --layout cp4,tp2,sp,zero3 -- --model llama-tiny": (
        "mpitrain verify --layout cp2,tp2,sp,zero3 --first 1 -- --model llama-tiny",
        "",
    ),
    # docs/tutorials/your-own-layer-op-and-model.md
    "python neighbours.py": ("python neighbours.py", ""),
    "mpitrain local -n 4 neighbours.py --tp 2": ("mpitrain local -n 2 neighbours.py --tp 2", ""),
    "mpitrain verify --layout dp2 --layout tp2 --layout dp2,tp2 neighbours.py": (
        "mpitrain verify --layout dp2,tp2 --first 2 neighbours.py",
        "",
    ),
    "mpitrain local -n 2 bits.py": ("mpitrain local -n 2 bits.py", ""),
    "mpitrain local -n 2 bits.py --dtype bfloat16": ("python bits.py --dtype bfloat16", ""),
    "mpitrain verify --layout dp2 --layout dp4,full bits.py": (
        "mpitrain verify --layout dp2 --layout dp4,full --first 2 bits.py",
        "",
    ),
    # docs/how-to/hunt-bugs.md, docs/tutorials/your-first-distributed-bug.md
    **{
        f"mpitrain {how} {script}": (f"mpitrain debug -n 1 -c quit {script}" if "debug" in how else f"ls {script}", "")
        for how, script in HUNTED
    },
    "mpirun -n 4 python examples/bugs/10_slow.py": ("mpirun -n 2 python examples/bugs/10_slow.py", MPI),
    "mpitrain compare runs/on-1 runs/on-4": ("ls examples/bugs/08_drifts_apart.py", ""),
    "mpitrain trace runs/slow": (f"{TRACED}; mpitrain trace runs/a", ""),
    # docs/how-to/find-a-mismatch.md
    "MPITRAIN_CHECK=1 ./run_mpi.sh -n 4 train.py": ("MPITRAIN_CHECK=1 mpirun -n 2 python train.py", MPI),
    "PYTHONPATH=.:tests python tests/mismatches.py": (f"python {ROOT}/tests/mismatches.py local op dims", ""),
    "./run_mpi.sh -n 2 benchmarks/checked_cost.py": (
        f"mpirun -n 2 python {ROOT}/benchmarks/checked_cost.py --sizes mini --layouts dp2 --rounds 2",
        MPI,
    ),
    # docs/how-to/record-and-replay.md
    "./run_mpi.sh -n 8 examples/train_gpt.py --dp 2 --tp 2 --pp 2 --steps 200 --record recordings/a"
    " --record-steps 100:103": (
        "./run_mpi.sh -n 2 examples/train_gpt.py --pp 2 --steps 3 --record recordings/a --record-steps 2:3"
        f" {TINY}; mpitrain replay recordings/a --rank 1 | grep 'bit by bit the same'",
        MPI,
    ),
    "mpitrain replay recordings/a": (f"{RECORDED}; mpitrain replay recordings/a | grep 'rank 1:'", ""),
    "mpitrain replay recordings/a --rank 3": (
        f"{RECORDED}; mpitrain replay recordings/a --rank 1 | grep 'bit by bit the same'",
        "",
    ),
    "mpitrain replay recordings/a --rank 3 --pdb": (
        f"{RECORDED}; echo 'p step' | mpitrain replay recordings/a --rank 1 --pdb | grep -A2 'first step'",
        "",
    ),
    "mpitrain local -n 2 --record recordings/own sums.py": ("mpitrain local -n 2 --record recordings/own sums.py", ""),
    "mpitrain replay recordings/own --rank 1 sums.py": (
        "mpitrain local -n 2 --record recordings/own sums.py; mpitrain replay recordings/own --rank 1 sums.py",
        "",
    ),
    # docs/how-to/inject-faults.md
    './run_mpi.sh -n 4 examples/train_gpt.py --steps 50 --faults "kill rank=1 at=message:all_reduce step=12"': (
        "mpitrain local -n 2 examples/train_gpt.py --steps 4 --faults 'kill rank=1 at=message:all_reduce step=2'"
        f" {TINY} || [ $? = 137 ]; echo killed",
        "",
    ),
    "./run_mpi.sh --restarts 3 -n 4 examples/train_gpt.py --run runs/f --steps 50 --save-every 10"
    ' --faults "random seed=7 faults=2 steps=50"': (
        "./run_mpi.sh --restarts 3 -n 2 examples/train_gpt.py --run runs/f --steps 4 --save-every 2"
        f" --faults 'raise rank=1 at=action:STEP step=3' {TINY}",
        MPI,
    ),
    'MPITRAIN_FAULTS="raise rank=1 at=message:all_reduce" mpirun -n 2 python train.py': (
        "MPITRAIN_FAULTS='raise rank=1 at=message:all_reduce' mpitrain local -n 2 train.py || [ $? = 1 ]; echo over",
        "",
    ),
    # docs/how-to/run-on-a-cluster.md, docs/how-to/a-slurm-job-and-its-preemption.md; in Slurm: tests/mpi/test_slurm.py
    "sbatch examples/slurm/job.sh": (
        "sed -e 's/^setup() .*/setup() { :; }/' -e 's/^train=.*/train=(-n 2 examples\\/train_gpt.py --steps 2"
        f" --save-every 1 {TINY})/' examples/slurm/job.sh >job.sh\n"
        "SLURM_JOB_ID=7 bash job.sh && ls -d runs/7/checkpoints/step-00000002",
        MPI,
    ),
}

SMALLER = {  # how scripts of the documents are made small
    "train.py": {"load()": 'load("book.txt")', "stop_step=400": "stop_step=3"},
    "deep.py": {"load()": 'load("book.txt")', "stop_step=20": "stop_step=3"},
    "eager.py": {"load()": 'load("book.txt")', "stop_step=20": "stop_step=3"},
    "stale.py": {"load()": 'load("book.txt")', "range(0, 40, 10)": "range(0, 20, 10)"},
    "any_layout.py": {"load()": 'load("book.txt")', "stop_step=20": "stop_step=3"},
    "resumable.py": {"load()": 'load("book.txt")', '"runs/own", 40': '"runs/own", 4', "% 10": "% 2"},
    "neighbours.py": {"load()": 'load("book.txt")', "stop_step=60": "stop_step=3", "% 20": "% 3"},
    "bits.py": {"load()": 'load("book.txt")', "stop_step=100": "stop_step=3"},
    "read_one.py": {},
    "read_weights.py": {},
    "sums.py": {},
    "own_experts.py": {"load()": 'load("book.txt")', "stop_step=100": "stop_step=3"},
}


class Block(NamedTuple):
    """A fenced block of a page; `shown` is the text block right behind it."""

    page: Path
    line: int
    language: str
    attributes: dict[str, str]
    text: str
    shown: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, after in zip_longest(fences, fences[1:]):
        follows = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
        attributes = dict(pair.split("=", 1) for pair in fence[2].split())
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[1], attributes, fence[3], after[3] if after and follows else None))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SCRIPTS = {
    block.attributes["file"]: block for block in BLOCKS if block.language == "python" and "file" in block.attributes
}
SCRIPT = SCRIPTS["train.py"]


def commands_of(block: Block) -> list[str]:
    """Its commands, one a line; of a script those that start something of ours."""
    lines = [line.partition("  #")[0].strip() for line in block.text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if block.language == "bash":
        lines = [line for line in lines if re.match(r"\./run_mpi|python|mpi", line)]
    return lines


SHOWN_COMMANDS = {
    command: block for block in BLOCKS if block.language in ("sh", "bash") for command in commands_of(block)
}
FIRST_PAGE = {
    command for block in BLOCKS if str(block).startswith("README.md") for command in commands_of(block)
}  # the others of the documents are run by CI, here one of six


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the documents' commands run: the clone's files, the README's script, three small texts."""
    for name in ("examples", "run_mpi.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, block in SCRIPTS.items():
        script = block.text
        for large, small in SMALLER[name].items():
            assert large in script, f"{block}: {large} is not there to be made smaller"
            script = script.replace(large, small)
        (tmp_path / name).write_text(script)
    text = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer\n" for n in range(99, 0, -1))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/one.txt").write_text(text)
    (tmp_path / "tokens").mkdir()
    np.arange(2000, dtype=np.uint16).__mod__(97).tofile(tmp_path / "tokens/train.bin")
    return tmp_path


def test_every_command_of_the_documents_is_known_here_and_every_one_known_is_shown() -> None:
    unknown = {f"{block}: {command}" for command, block in SHOWN_COMMANDS.items() if command not in COMMANDS}
    assert not unknown, "say in COMMANDS how these are run small"
    forgotten = set(COMMANDS) - set(SHOWN_COMMANDS)
    assert not forgotten, "no document shows these any more"


def marks(command: str, mpi: str) -> list[pytest.MarkDecorator]:
    """What a command needs."""
    found = [pytest.mark.mpi] if mpi else []
    if "examples/bugs/" in command:
        found.append(pytest.mark.slow)  # tests/local/test_bug_hunt.py plays what these pages say in full
    if "fuzz_graphs.py --seed" in command or "fuzz_graphs.py --kernels" in command:
        found.append(pytest.mark.slow)  # as the command without these words
    if "--freeze" in command and "blocks.0" not in command.split("verify")[0]:
        found.append(pytest.mark.slow)  # as the first of them; tests/local/test_freezing.py tries more
    if "generate runs/a" in command and "by-line" not in command:
        found.append(pytest.mark.slow)  # as that command; tests/local/test_generate_command.py tries more
    if " tokenizer " in command or "--tokenizer " in command:
        found.append(pytest.mark.skipif(find_spec("tokenizers") is None, reason="the extra hf is not installed"))
    if "tensorboard" in command:
        found.append(pytest.mark.skipif(find_spec("tensorboardX") is None, reason="the extra tensorboard is missing"))
    if command != "mpitrain checkpoint import gpt2 runs/gpt2" and (
        "runs/gpt2" in command or "checkpoint ex" in command or "read_weights" in command
    ):
        found.append(pytest.mark.slow)  # test_interchange.py and test_init_from.py try more
    if "_digits_" in command or command.endswith("benchmarks/gist.py"):
        missing = find_spec("sklearn") is None
        found.append(pytest.mark.skipif(missing, reason="scikit-learn is not installed, which brings the digits"))
    if command not in FIRST_PAGE and [*COMMANDS].index(command) % 6:
        found.append(pytest.mark.slow)
    return found


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks(c, mpi), id=c) for c, (_, mpi) in COMMANDS.items()])
def test_a_command_of_the_documents_works(command: str, folder: Path, run: Callable[..., str]) -> None:
    assert run(COMMANDS[command][0], folder).strip()


SHELL_SCRIPTS = {str(block): block.text for block in BLOCKS if block.language == "bash"}
SHELL_SCRIPTS |= {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "examples").rglob("*.sh"))}


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_a_shell_script_of_the_documents_and_examples_is_one(name: str) -> None:
    subprocess.run(["bash", "-n"], input=SHELL_SCRIPTS[name], text=True, check=True)


def test_slurm_reads_all_options_of_a_job_script() -> None:
    """It stops at the first command, without a word."""
    for name, script in SHELL_SCRIPTS.items():
        lines = script.splitlines()
        first = next(number for number, line in enumerate(lines) if line.strip() and not line.startswith("#"))
        assert not [line for line in lines[first:] if line.startswith("#SBATCH")], name


# -------------------------------------------------------------------------------------------------------------- Python


def test_the_script_of_the_readme_has_at_most_20_lines() -> None:
    code = [line for line in SCRIPT.text.splitlines() if line.strip()]
    assert len(code) <= 20


def test_the_script_of_the_readme_gives_the_same_losses_alone_and_on_two_local_ranks(
    folder: Path, run: Callable[..., str]
) -> None:
    alone = run("python train.py", folder)
    assert alone.count("loss") >= 2
    assert run("mpitrain local -n 2 train.py", folder) == alone


@pytest.mark.mpi
def test_the_script_of_the_readme_gives_the_same_losses_alone_and_on_two_processes(
    folder: Path, run: Callable[..., str]
) -> None:
    assert run("mpirun -n 2 python train.py", folder) == run("python train.py", folder)


PYTHON_PAGES = [
    page
    for page in PAGES
    if any(b.page == page and b.language == "python" and "file" not in b.attributes for b in BLOCKS)
]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone: dict[str, object] = {"__name__": "page"}
    settings = contextvars.copy_context()  # what a page sets ends with it
    for block in BLOCKS:
        if block.page != page or block.language != "python" or "file" in block.attributes:
            continue
        code = compile("\n" * block.line + block.text, str(page), "exec")
        ranks = int(block.attributes.get("ranks", "0"))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if ranks:
                LocalWorld(ranks).run(lambda code=code: exec(code, {"__name__": "page"}))
            else:
                settings.run(exec, code, alone)
        if block.shown is not None:
            checker, options = doctest.OutputChecker(), doctest.ELLIPSIS
            same = checker.check_output(block.shown, printed.getvalue(), options)
            assert same, f"{block} prints\n{printed.getvalue()}but shows\n{block.shown}"


# --------------------------------------------------------------------------------------------------- links and pictures


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    seen: Counter[str] = Counter()
    found = set()
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_well_formed_and_shown_somewhere(picture: Path) -> None:
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")
    assert any(picture.name in page.read_text(encoding="utf-8") for page in PAGES)


def test_generated_tables_and_pictures_are_current() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    stale = [path for path, text in generate.current().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python docs/generate.py"
