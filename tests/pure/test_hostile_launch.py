"""run_mpi.sh with words and variables that a shell could take for code: refused, or handed on as they are."""

import pytest
from test_run_mpi import Clone

CODE = [
    "$(touch owned)",
    "`touch owned`",
    "; touch owned",
    "| touch owned",
    "&& touch owned",
    "a[$(touch owned)]",
    "${IFS}",
]
NO_NUMBER = [
    "8;touch owned",
    "$(touch owned)",
    "`touch owned`",
    "a[$(touch owned)]",
    "8 --host evil",
    "8\n9",
    "\u0668",
    "+8",
]
NO_NUMBER += ["0x8", "8'", '8"', "*", "~", "--", "9" * 400, "8e0", " 8", "{1,2}"]
REFUSED = [
    *(["-n", value, "examples/train_gpt.py"] for value in NO_NUMBER),
    *([f"-n8{value}", "examples/train_gpt.py"] for value in (";x", "$(touch owned)", "`x`", "\n")),
    *(["--restarts", value, "--run", "a"] for value in NO_NUMBER[:8]),
    *([f"--restarts={value}", "--run", "a"] for value in CODE),
    *([value] for value in CODE),
    *(
        ["../../x"],
        ["./train"],
        ["Train"],
        ["train;x"],
        ["-"],
        ["-c"],
        ["-m"],
        ["a b"],
        ["\u0445"],
        ["a\nb"],
        ["/bin/sh"],
    ),
    *([f"{value}.py"] for value in CODE),
]
VARIABLES = [(name, value) for name in ("MPITRAIN_MPI", "MPITRAIN_LAUNCH") for value in (*CODE, "../x")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    made = Clone(tmp_path_factory.mktemp("clone"))
    made.stand_in("srun")
    assert made.run().code == 0
    return made


def nothing_was_touched(clone):
    return not [path for path in clone.root.parent.rglob("owned*")]


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_are_code_are_refused_before_anything_runs(clone, words):
    run = clone.run(*words)
    assert run.code == 2
    assert run.calls == []
    assert run.errors.startswith("run_mpi.sh: ")
    assert len(run.errors.splitlines()) <= 5
    assert nothing_was_touched(clone)


@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_variables_with_a_list_of_values_take_no_other(clone, name, value):
    run = clone.run(**{name: value})
    assert run.code == 2
    assert run.calls == []
    assert f"{name}={value} is not known" in run.errors
    assert nothing_was_touched(clone)


@pytest.mark.parametrize("value", CODE)
def test_what_may_be_any_text_is_handed_on_as_it_is(clone, value):
    """Flags of the script, and variables that others set; a number that is none does not count."""
    others = (
        "OMP_NUM_THREADS",
        "SLURM_NTASKS",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "COLUMNS",
        "MPITRAIN_TTY",
        "TMPDIR",
    )
    run = clone.run("--restarts", "1", "--run", value, "--data", value, **dict.fromkeys(others, value))
    assert run.code == 0, run.errors
    words = run.calls[-1]
    assert words[-4:] == ["--run", value, "--data", value]
    assert words[words.index("-n") + 1] == "8"
    assert run.env["OMP_NUM_THREADS"] == value
    assert nothing_was_touched(clone)


@pytest.mark.parametrize("value", CODE)
def test_a_type_of_mpi_for_srun_is_one_word_of_its_command(clone, value):
    run = clone.run(MPITRAIN_LAUNCH="srun", MPITRAIN_SRUN_MPI=value)
    assert nothing_was_touched(clone)
    assert run.code == 2 or f"--mpi={value}" in run.calls[-1]
