"""The files of a recording: what is written is read again, and what is not what was written is refused."""

import os

import h5py
import numpy as np
import pytest
from recorded import again, lines_of, made, write_lines

from mpitrain.errors import ConfigError, RecordingError
from mpitrain.recording import values
from mpitrain.recording.asked import ranks_of, steps_of
from mpitrain.recording.difference import difference, same
from mpitrain.recording.lines import DTYPES, Call, End, Got, Value, dtype_named, parsed, text_of, told, told_how, whole
from mpitrain.recording.outside import heard, place
from mpitrain.recording.reading import RankReader, ranks_in
from mpitrain.recording.writing import RankWriter

HEADER = {
    "size": 2,
    "kind": "local",
    "library": "threads",
    "host": "here",
    "deterministic": True,
    "sent": "values",
    "program": "script",
    "words": [],
}


def call(n=1, **other):
    about = {
        "n": n, "number": n, "axis": "dp", "ranks": (0, 1), "verb": "all_reduce", "how": ["sum"], "peer": -1,
        "shape": (2, 3), "dtype": "float32", "step": 0, "site": "x.py:3", "sent": None,
    }  # fmt: skip
    return Call(**{**about, **other})


def object_of(line):
    return whole(text_of(told(line)))


def test_values_of_every_dtype_and_size_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "FIRST", 1 << 12)
    monkeypatch.setattr(values, "MOST", 1 << 14)
    pytest.importorskip("ml_dtypes")
    draw = np.random.default_rng(0)
    arrays = [draw.integers(0, 2, (3, 5)).astype(dtype_named(name)) for name in sorted(DTYPES)]
    arrays += [np.zeros((0, 4)), np.float32(3.5).reshape(()), draw.normal(size=(7, 999)), np.arange(12).reshape(3, 4).T]
    writer = RankWriter(tmp_path, 1, HEADER)
    kept = [writer.value(array) for array in arrays * 3]
    writer.line(End("over", 0, 0))
    writer.close()
    reader = RankReader(tmp_path, 1)
    assert isinstance(reader.next(), End)
    for array, value in zip(arrays * 3, kept, strict=True):
        found = reader.value(value)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
    reader.close()
    files = sorted(tmp_path.glob("*.h5"))
    assert len(files) > 3
    assert sum(path.stat().st_size for path in files) < sum(value.nbytes for value in kept) + len(files) * (4096 + 2048)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    with h5py.File(files[-1]) as file:
        assert list(file) == ["bytes"]
        assert file["bytes"].chunks is None
        assert file["bytes"].id.get_offset() > 0
    assert not list(tmp_path.glob("*.tmp"))


def test_lines_come_back_as_they_were():
    value = Value("float32", (2, 3), 0, 64, 7)
    for line in (call(sent=value), call(sent=Value("float32", (2, 3), digest="a" * 32)), Got(3, None), Got(4, value)):
        text = text_of(told(line))
        assert text.endswith(b'"}\n')
        assert parsed(whole(text)) == line
    assert parsed({"is": "of a later version"}) is None
    assert told_how("all_gather", (np.int64(1), (np.int64(2), 3), np.zeros(3))) == [1, [2, 3]]


@pytest.mark.parametrize(
    "change",
    [
        {"verb": "exec"},
        {"verb": ["send"]}, {"n": -1}, {"n": True}, {"ranks": []}, {"ranks": ["0"]}, {"peer": -2}, {"shape": [1, -1]},
        {"shape": [0.5]}, {"shape": [1] * 33}, {"dtype": "object"}, {"dtype": "O"}, {"site": 3}, {"how": "sum"},
        {"sent": ["float32", [2, 3], 0, 64]}, {"sent": ["float32", [2, 3], -1, 0, 0]}, {"sent": ["float32", [2], "x"]},
        {"sent": ["V8", [2, 3], 0, 64, 7]}, {"sent": ["float32", [2, 3], 0, -4, 7]},
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_may_be_is_refused(change):
    with pytest.raises(RecordingError):
        parsed({**object_of(call()), **change})


def test_texts_that_are_told_are_printable():
    line = parsed({**object_of(call()), "site": "a\x1b[2J\nb" + "c" * 5000})
    assert line.site.startswith("a?[2J?bccc")
    assert len(line.site) == 400


@pytest.mark.parametrize("where", ["first", "middle", "last", "cut"])
def test_a_line_that_is_not_whole(tmp_path, where):
    made(tmp_path / "r", "messages")
    path = tmp_path / "r" / "rank-00001.index.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place_of = {"first": 0, "middle": 4, "last": len(lines) - 1, "cut": len(lines) - 1}[where]
    broken = lines[place_of].replace(b"1", b"2", 1) if where != "cut" else lines[-1][:-5]
    path.write_bytes(b"".join([*lines[:place_of], broken, *lines[place_of + 1 :]]))
    if where in ("first", "middle"):
        with pytest.raises(RecordingError, match=f"line {place_of + 1} is not what was written"):
            again(tmp_path / "r", 1, "messages")
    else:
        outcome, number = again(tmp_path / "r", 1, "messages")
        assert number is not None
        assert outcome.end == ""


def test_values_that_are_not_what_was_written_are_not_used(tmp_path):
    made(tmp_path / "r", "messages")
    path = tmp_path / "r" / "rank-00001-000.h5"
    good = path.read_bytes()
    path.write_bytes(good[:-40] + bytes(40))
    with pytest.raises(
        RecordingError, match=r"rank-00001-000\.h5 is damaged: \d+ bytes at \d+ are not what was written"
    ):
        again(tmp_path / "r", 1, "messages")
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(RecordingError, match="ends before a value of"):
        again(tmp_path / "r", 1, "messages")
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(good)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordingError, match="cannot be read"):
        again(tmp_path / "r", 1, "messages")
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        again(tmp_path / "r", 1, "messages")


def test_sizes_in_a_file_take_no_memory(tmp_path):
    """A line may promise a terabyte: it is read when the program asks for as much, and the file is as long."""
    made(tmp_path / "r", "messages")
    path = tmp_path / "r" / "rank-00001.index.jsonl"
    lines = lines_of(path)
    for about in lines:
        if about.get("is") == "got" and about["value"]:
            about["value"][1] = [1 << 40]
    write_lines(path, lines)
    with pytest.raises(RecordingError, match=r"brought \(1099511627776,\)"):
        again(tmp_path / "r", 1, "messages")
    reader = RankReader(tmp_path / "r", 1)
    reader.next()
    with pytest.raises(RecordingError, match="ends before a value"):
        reader.value(Value("float64", (1 << 40,), 0, 0, 0))
    reader.close()


def test_a_rank_is_known_by_the_name_of_its_file_alone(tmp_path):
    for name in ("rank-00003.index.jsonl", "rank-x.index.jsonl", "rank-00001.index.jsonl.tmp", "rank-4.index.jsonlx"):
        (tmp_path / name).touch()
    assert ranks_in(tmp_path) == [3]
    with pytest.raises(RecordingError, match="is no recording"):
        ranks_in(tmp_path / "nowhere")


def test_differences_in_words():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = a.copy()
    assert same(a, b)
    b[1, 2] += 0.5
    assert difference(a, b) == "max |d| 0.5 at [1, 2], in 1 of 6 elements"
    b[0, 1] = np.nan
    assert difference(a, b) == "1 in the place of nan at [0, 1], in 2 of 6 elements"
    nan = np.array([np.nan])
    assert same(nan, nan.copy())
    assert not same(np.zeros(1), -np.zeros(1))
    assert difference(np.array(2), np.array(5)) == "max |d| 3 at [], in 1 of 1 elements"
    assert difference(np.array([True, False]), np.array([True, True])) == "max |d| 1 at [1], in 1 of 2 elements"


@pytest.mark.parametrize("text", ["", "x", "3:2", "0:2", "1:2:3", "-1", "1:", ":2", "9" * 30, "1.5", "\u0661"])
def test_steps_that_are_none(text):
    with pytest.raises(ConfigError, match="must be the first step and the last"):
        steps_of(text)


def test_steps_and_ranks_in_words():
    assert (steps_of("100:103"), steps_of("7")) == ((100, 103), (7, 7))
    assert ranks_of("5, 3,3") == [3, 5]
    for text in ("", "a", "1,,2", "-1", "9" * 30):
        with pytest.raises(ConfigError, match="must be numbers of ranks"):
            ranks_of(text)


def test_without_a_recording_nothing_stands_between(tmp_path):
    assert heard("a question", lambda: (1, 2)) == (1, 2)
    assert place(tmp_path) is tmp_path
