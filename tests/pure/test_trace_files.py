"""Files of a trace: what is written is read; cut, damaged and hostile files give what is whole, and nothing worse."""

import errno
import json
import os
import struct
import sys
import zlib
from array import array

import numpy as np
import pytest

from mpitrain import disk
from mpitrain.debug.trace import blocks, files, table, writer
from mpitrain.debug.trace.files import read
from mpitrain.debug.trace.records import KIND, KINDS, MEMORY, SPAN
from mpitrain.debug.trace.ring import SEGMENTS
from mpitrain.debug.trace.writer import MARK, Writer
from mpitrain.errors import DataError
from mpitrain.events import listen

MIB = 1 << 20


def head(rank=0, size=2, **more):
    about = {"rank": rank, "size": size, "host": "here", "clock": "c", "began": 1.5, "facts": {"model": "m"}}
    return {**about, **more}


def rows(count, kind=0, start=0):
    """So many rows of one kind, one after the other in time, the calls numbered."""
    flat = array("q")
    for number in range(start, start + count):
        flat.extend((10 * number, 10 * number + 5, kind, 1, number))
    return flat


def add(made, name="all_reduce", **words):
    return made.kinds.add((name, *words.items()), "message", name, **words)


def write(folder, count=10, **about):
    made = Writer(folder, head(**about))
    made.meet("tp", (0, 1))
    made.write(rows(count, add(made, axis="tp", peer=1, nbytes=64.0)))
    made.close()
    return folder / blocks.segment_name(about.get("rank", 0), 0)


def raw(folder, *parts, name="rank-00000.000.trace", magic=blocks.MAGIC):
    (folder / name).write_bytes(magic + b"".join(parts))
    return folder


HEAD = blocks.json_block("HEAD", {**head(), "dropped": 0})


def one(**fields):
    span = np.zeros(1, SPAN)
    span["kind"], span["peer"], span["stop"] = KIND["message"], -1, 9
    for name, value in fields.items():
        span[name] = value
    return blocks.block("SPAN", span.tobytes())


def test_what_is_written_is_read(tmp_path):
    made = Writer(tmp_path, head(rank=1, facts={"model": "tiny", "n": [1, None]}))
    made.meet("tp", (0, 1))
    words = {"axis": "tp", "path": "blocks.0", "action": "F", "site": "a.py:3", "shape": "(2,) float32"}
    number = add(made, **words, nbytes=24.0, depth=2)
    made.step({"step": 7, "start": 0, "stop": 99, "ops": True, "loss": 2.5, "tokens": 8})
    made.step({"step": 8, "start": 100, "stop": 120, "ops": False})
    made.hold(50, 7, {"weights": 4, "activations": 0})
    made.hold(60, 7, {"weights": 4, "activations": 6})
    assert made.write(rows(3, number))
    made.close()
    (rank,) = read(tmp_path).ranks
    assert (rank.rank, rank.size, rank.host, rank.clock, rank.dropped) == (1, 2, "here", "c", 0)
    assert rank.axes == {"tp": (0, 1)}
    assert rank.facts == {"model": "tiny", "n": [1, None]}
    span = rank.spans[2]
    texts = {name: rank.strings[span[name]] for name in ("name", "path", "action", "site", "axis", "shape")}
    assert texts == {
        **{"name": "all_reduce", "path": "blocks.0", "action": "F"},
        **{"site": "a.py:3", "axis": "tp", "shape": "(2,) float32"},
    }
    numbers = [span[name].item() for name in ("start", "stop", "depth", "step", "number", "peer", "tag", "bytes")]
    assert numbers == [20, 25, 2, 1, 2, -1, 0, 24.0]
    assert rank.steps == [
        {"step": 7, "start": 0, "stop": 99, "loss": 2.5, "tokens": 8, "ops": True},
        {"step": 8, "start": 100, "stop": 120, "ops": False},
    ]
    held = [(time, rank.strings[owner], nbytes) for time, _, owner, nbytes in rank.memory.tolist()]
    assert held == [(50, "weights", 4), (60, "activations", 6)]  # what did not change is not told again
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00001.000.trace"]
    assert os.stat(next(tmp_path.iterdir())).st_mode & 0o777 == 0o600


def test_a_run_folder_is_read_as_its_trace_folder(tmp_path):
    (tmp_path / "trace").mkdir()
    write(tmp_path / "trace")
    assert len(read(tmp_path).ranks[0].spans) == len(read(tmp_path / "trace").ranks[0].spans) == 10


def test_spans_come_in_order_of_time_the_outer_one_first(tmp_path):
    made = Writer(tmp_path, head())
    inner, outer = (made.kinds.add(name, "op", name, depth=depth) for name, depth in (("inner", 1), ("outer", 0)))
    made.write(array("q", (5, 8, inner, 0, 0, 5, 9, outer, 0, 0, 1, 2, inner, 0, 0)))
    made.close()
    rank = read(tmp_path).ranks[0]
    assert [rank.strings[name] for name in rank.spans["name"]] == ["inner", "outer", "inner"]


# ----------------------------------------------------------------------------------------------------- bounds on size


def test_the_first_files_and_the_newest_stay_below_the_limit(tmp_path):
    made = Writer(tmp_path, head(), limit=1)
    number, written = add(made, axis="tp"), 0
    for _ in range(40):
        made.write(rows(1000, number, start=written))
        number, written = add(made, axis="tp"), written + 1000
    made.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(sizes.values()) <= MIB
    assert len(sizes) <= SEGMENTS
    rank = read(tmp_path).ranks[0]
    kept = rank.spans["number"]
    assert rank.dropped + len(kept) == written
    assert rank.dropped > 0
    first = int(np.flatnonzero(np.diff(kept) > 1)[0]) + 1
    assert kept[:first].tolist() == list(range(first))  # the first steps
    assert kept[first:].tolist() == list(range(written - len(kept) + first, written))  # and all of the newest
    assert {rank.strings[name] for name in rank.spans["name"]} == {"all_reduce"}  # numbered anew in each file


def test_one_large_heap_of_rows_is_kept_below_the_limit_too(tmp_path):
    made = Writer(tmp_path, head(), limit=1)
    assert made.most <= MIB // SEGMENTS // SPAN.itemsize * table.ROW // 4


def test_names_that_never_come_again_end_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MOST", 50)
    made = Writer(tmp_path, head())
    for number in range(30):
        made.write(rows(1, add(made, name=f"op{2 * number}"), start=2 * number))
        made.write(rows(1, add(made, name=f"op{2 * number + 1}"), start=2 * number + 1))
    made.close()
    assert len(made.kinds) <= 51
    assert len(list(tmp_path.iterdir())) > 1
    rank = read(tmp_path).ranks[0]
    assert [rank.strings[name] for name in rank.spans["name"]] == [f"op{number}" for number in range(60)]


def test_long_names_are_cut(tmp_path):
    made = Writer(tmp_path, head())
    made.write(rows(1, add(made, name="x" * 10**6)))
    made.close()
    assert len(read(tmp_path).ranks[0].strings[1]) == table.LONGEST_STRING


# ----------------------------------------------------------------------------------------------------- a disk is full


def refusing(code, after):
    """A listener that lets so many writes pass and refuses all others."""
    count = 0

    def hear(event):
        nonlocal count
        if (event.kind, event.phase, event.name) == ("disk", "begin", "write"):
            count += 1
            if count > after:
                raise OSError(code, os.strerror(code))

    return hear


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_ends_the_trace_with_one_warning(tmp_path, capsys, code):
    ranks = [Writer(tmp_path, head(rank=rank, size=3)) for rank in range(3)]
    os.close(disk.create(tmp_path / MARK))
    with listen(refusing(code, after=3)):
        for rank in ranks:
            assert rank.write(rows(5, add(rank)))
            rank.step({"step": 4, "start": 0, "stop": 1, "ops": False})
        for rank in ranks:
            assert not rank.write(rows(5, add(rank), start=5))
            assert not rank.write(rows(5))  # and no more
            rank.close()
    said = capsys.readouterr().err
    assert said == (
        f"rank 0: the trace ends after step 4: {tmp_path} cannot be written: {os.strerror(code)};"
        " training goes on without.\n"
    )
    assert [len(rank.spans) for rank in read(tmp_path).ranks] == [5, 5, 5]
    assert not (tmp_path / MARK).exists()


def test_a_rank_that_comes_to_a_full_disk_last_says_so_too(tmp_path, capsys):
    """Those that have ended took the mark away, and nobody has said anything."""
    ranks = [Writer(tmp_path, head(rank=rank)) for rank in range(2)]
    os.close(disk.create(tmp_path / MARK))
    ranks[0].close()
    with listen(refusing(errno.ENOSPC, after=0)):
        assert not ranks[1].write(rows(1, add(ranks[1])))
    assert capsys.readouterr().err.startswith("rank 1: the trace ends after step 0")


def test_a_disk_that_is_full_when_a_file_begins_ends_the_trace_too(tmp_path, capsys):
    made = Writer(tmp_path, head(), limit=1)
    os.close(disk.create(tmp_path / MARK))
    with listen(refusing(errno.ENOSPC, after=1)):
        assert not made.write(rows(3000, add(made)))
    assert "No space left" in capsys.readouterr().err
    assert len(read(tmp_path).ranks[0].spans) == 3000


# ---------------------------------------------------------------------------------------- files that are cut or damaged


def test_a_cut_file_gives_what_is_whole_of_it(tmp_path):
    made = Writer(tmp_path, head())
    number = add(made)
    for start in range(5):
        made.write(rows(4, number, start=4 * start))
    made.close()
    path = tmp_path / blocks.segment_name(0, 0)
    data = path.read_bytes()
    found = []
    for length in range(0, len(data) + 1, 23):
        path.write_bytes(data[:length])
        try:
            (rank,) = read(tmp_path).ranks
        except DataError:
            found.append(-1)
            continue
        assert rank.spans["number"].tolist() == list(range(len(rank.spans)))
        found.append(len(rank.spans))
    assert found == sorted(found)
    assert set(found) >= {-1, 0, 4, 8, 12, 16}


def test_a_flipped_bit_ends_the_file_before_its_block(tmp_path):
    path = write(tmp_path, 4)
    data = path.read_bytes()
    place = data.index(b"SPAN")
    for at in range(place, len(data), 11):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert len(read(tmp_path).ranks[0].spans) == 0


def test_files_of_another_trace_in_the_folder_are_left_out(tmp_path):
    write(tmp_path, 3, rank=0, began=5.0)
    write(tmp_path, 3, rank=1, began=4.0)  # of the run before
    assert [rank.rank for rank in read(tmp_path).ranks] == [0]


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(DataError, match="holds no trace"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"No such file or directory\.  Train with --trace"):
        read(tmp_path / "nowhere")
    raw(tmp_path, magic=b"something else entirely")
    with pytest.raises(DataError, match="no file of a trace that can be read"):
        read(tmp_path)


def test_more_than_fits_is_refused_before_it_is_read(tmp_path, monkeypatch):
    with open(write(tmp_path), "r+b") as file:
        file.truncate(1 << 40)  # takes no room
    with pytest.raises(DataError, match="bytes of traces, at most"):
        read(tmp_path)
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 50)
    assert len(read(tmp_path).ranks[0].spans) == 10  # zeros are no blocks


def test_links_and_pipes_are_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write(elsewhere)
    folder = tmp_path / "trace"
    folder.mkdir()
    os.symlink(path, folder / path.name)
    os.mkfifo(folder / "rank-00001.000.trace")
    with pytest.raises(DataError, match="no file of a trace"):
        read(folder)


@pytest.mark.parametrize(
    "block",
    [
        blocks._HEADER.pack(b"SPAN", 0xFFFFFFFF, 0),
        blocks.block("SPAN", b"x" * (SPAN.itemsize + 1)),
        blocks.block("HELD", b"x" * (MEMORY.itemsize - 1)),
        blocks.json_block("TEXT", {"a": 1}),
        blocks.json_block("TEXT", [1]),
        blocks.block("TEXT", b"[" * 100_000),
        blocks.block("TEXT", b'["\xff"]'),
        blocks.block("TEXT", b'["' + b"x" * blocks.JSON + b'"]'),
        blocks.json_block("AXES", {"tp": [0, 5]}),
        blocks.json_block("AXES", {"tp": 3}),
        blocks.json_block("STEP", [{"step": -1, "start": 0, "stop": 1}]),
        blocks.block("STEP", b'[{"step": 1, "start": NaN, "stop": 1}]'),
        blocks.block("STEP", b'[{"step": ' + b"9" * 10_000 + b', "start": 0, "stop": 1}]'),
        HEAD,
        b"SPA",
    ],
)
def test_a_block_that_is_none_ends_the_file(tmp_path, block):
    (rank,) = read(raw(tmp_path, HEAD, one(number=1), block, one(number=2))).ranks
    assert rank.spans["number"].tolist() == [1]
    assert (rank.axes, rank.steps, rank.strings) == ({}, [], [""])


@pytest.mark.parametrize(
    "about",
    [
        {"rank": 1},
        {"size": 0},
        {"size": 10**9},
        {"size": True},
        {"host": 3},
        {"began": "x"},
        {"began": 1e308},
        {"dropped": -1},
        {"facts": []},
        {"facts": {"x": "y" * blocks.FACTS}},
    ],
)
def test_a_head_that_cannot_be_is_none(tmp_path, about):
    with pytest.raises(DataError, match="no file of a trace"):
        read(raw(tmp_path, blocks.json_block("HEAD", {**head(), "dropped": 0, **about}), one()))


@pytest.mark.parametrize(
    "fields",
    [
        *({word: 2} for word in ("name", "path", "action", "site", "axis", "shape")),
        {"kind": len(KINDS)},
        {"start": -5},
        {"start": 10},
        {"stop": 1 << 62},
        {"bytes": np.nan},
        {"bytes": -1.0},
        {"bytes": np.inf},
        {"peer": -2},
        {"peer": 0},  # of no axis
        {"peer": 2, "axis": 1},  # which has two
    ],
)
def test_a_span_that_cannot_be_is_left_out(tmp_path, fields):
    strings = blocks.json_block("TEXT", ["tp"]), blocks.json_block("AXES", {"tp": [0, 1]})
    (rank,) = read(raw(tmp_path, HEAD, *strings, one(number=1, axis=1, peer=1), one(number=2, **fields))).ranks
    assert rank.spans["number"].tolist() == [1]


def test_blocks_of_later_versions_are_passed_over(tmp_path):
    later = blocks.block("NEWS", b"what is this")
    assert len(read(raw(tmp_path, HEAD, later, one())).ranks[0].spans) == 1


def test_text_can_be_printed_whatever_it_was(tmp_path):
    texts = blocks.block("TEXT", json.dumps(["\udcff.py", "x" * 5000]).encode())
    strings = read(raw(tmp_path, HEAD, texts)).ranks[0].strings
    assert strings[1] == "?.py"
    assert len(strings[2]) == files.LONGEST_STRING


def test_a_crc_is_that_of_zlib(tmp_path):
    """The format is a promise: docs/reference/trace.md."""
    data = b"[1]"
    assert blocks.block("STEP", data) == b"STEP" + struct.pack("<II", 3, zlib.crc32(data)) + data
    assert sys.byteorder == "little" or SPAN["start"].str == "<i8"
    assert (SPAN.itemsize, MEMORY.itemsize) == (66, 24)
