"""Changed files are refused or read, with nothing else touched; tests/fuzz_files.py tries thousands of them."""

import fuzz_files
import pytest
from confined import Outcome
from hostile_cases import KINDS, VALUES, Case


def test_changed_files_of_every_kind_are_refused_or_read(capsys):
    assert fuzz_files.main(["--files", str(12 * len(KINDS))]) == 0
    said = capsys.readouterr().out
    assert [kind for kind in KINDS if f"  {kind} " not in said] == []
    assert f"{12 * len(KINDS)} files: 0 wrong" in said


@pytest.mark.parametrize(
    ("call", "exact", "outcome"),
    [
        ("load", False, Outcome("signal", "11")),
        ("load", False, Outcome("raised", "Traceback ...", "KeyError")),
        ("load", False, Outcome("refused", "1\n2\n3\n4\n5\n6", "CheckpointError")),
        ("load", False, Outcome("refused", "\x1b[2J", "CheckpointError")),
        ("load", True, Outcome("returned", "({'updates': 1, 'step': 1}, [[0.0, 1.0]])")),
        ("look_and_read", False, Outcome("raised", "Traceback ...", "KeyError")),
    ],
)
def test_what_must_not_happen_is_seen(call, exact, outcome):
    assert fuzz_files.what_is_wrong(Case([call, "x"], exact), outcome)
    assert not fuzz_files.what_is_wrong(Case(["load", "x"], True), Outcome("returned", f"({{'step': 1}}, {VALUES})"))


def test_a_path_outside_of_the_case_is_seen(tmp_path):
    (tmp_path / "case").mkdir()
    for name, path in (("in", tmp_path / "case" / "a.toml"), ("out", tmp_path / "a.toml")):
        path.write_text("lr = 0.5\n")
        case = Case(["settings", str(path)])
        wrong = fuzz_files.what_is_wrong(case, fuzz_files.outcome_of(case, tmp_path / "case"))
        assert bool(wrong) == (name == "out"), wrong
