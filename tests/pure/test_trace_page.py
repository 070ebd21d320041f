"""The page of a trace as a file: what it holds is the trace, it is small, and nothing that a trace holds runs in it."""

import base64
import hashlib
import itertools
import json
import os
import re
import zlib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from synthetic_trace import synthetic

import mpitrain.debug.trace.page as page_package
from mpitrain.debug.trace.clocks import aligned
from mpitrain.debug.trace.matches import matched
from mpitrain.debug.trace.page.choice import choose
from mpitrain.debug.trace.page.contents import held_since, thinned
from mpitrain.debug.trace.page.html import PROGRAM, facts_of, write_page
from mpitrain.debug.trace.page.plain import LONGEST_TEXT, shown
from mpitrain.debug.trace.records import KIND, KINDS, MEMORY, SPAN, RankTrace, Trace

SOURCES = Path(page_package.__file__).parent
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "</script /",
    "]]><img src=x onerror=alert(1)>",
    "'\"&lt;&#x3c;{{program}}{{facts}}",
    "\u202egnp.exe\u2028\u2029\x00\x1b[31m\ud800",
    "__proto__",
    "constructor",
    "x" * 10_000,
)


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open = (tag, dict(attrs))
            self.texts.append([self._open, ""])

    def handle_data(self, data):
        if self._open:
            self.texts[-1][1] += data

    def handle_endtag(self, tag):
        self._open = None

    def text(self, tag, **attributes):
        (found,) = [t for (name, attrs), t in self.texts if name == tag and attributes.items() <= attrs.items()]
        return found


def written(tmp_path, trace, **how):
    path = tmp_path / "trace.html"
    told = write_page(path, trace, aligned(trace), **how)
    text = path.read_text(encoding="ascii")
    assert told.nbytes == len(text)
    return text, told


def data_of(text):
    """The facts and the columns of a page, read as the page's program reads them."""
    elements = Elements(text)
    facts = json.loads(elements.text("script", id="facts"))
    raw = np.frombuffer(zlib.decompress(base64.b64decode(elements.text("script", id="columns"))), np.uint8)
    columns, at = {}, 0
    for name, length, width in facts["columns"]:
        planes = raw[at : at + length * width].reshape(width, length).astype(np.int64)
        columns[name] = (planes << 8 * np.arange(width)[:, None]).sum(axis=0)
        at += length * width
    assert at == len(raw)
    return facts, columns


def by_rank(facts, column):
    return np.split(column, np.cumsum([rank["spans"] for rank in facts["ranks"]])[:-1])


@pytest.fixture(scope="module")
def trace():
    return synthetic()


@pytest.fixture(scope="module")
def whole(trace, tmp_path_factory):
    """The page of that trace, and what was told of it."""
    return written(tmp_path_factory.mktemp("page"), trace)


@pytest.fixture(scope="module")
def data(whole):
    return data_of(whole[0])


def test_eight_ranks_and_twenty_steps_with_all_ops_take_a_fraction_of_five_megabytes(whole, trace):
    _, told = whole
    spans = sum(len(rank.spans) for rank in trace.ranks)
    assert spans == 40_160
    assert told.nbytes < 12 * spans
    assert told.left_out == ""


@pytest.mark.parametrize("clocks_apart", [0, 1_700_000_000])
def test_every_span_is_there_with_its_time_and_its_names(tmp_path, clocks_apart):
    trace = synthetic(steps=3, clocks_apart=clocks_apart)
    clocks = aligned(trace)
    facts, columns = data_of(written(tmp_path, trace)[0])
    tick = facts["tick"]
    origin = min(int(clocks.shared(rank.rank, rank.spans["start"]).min()) for rank in trace.ranks)
    origin = min(origin, *(int(clocks.shared(0, np.array([step["start"]]))[0]) for step in trace.ranks[0].steps[:1]))
    deltas, lengths, labels = (by_rank(facts, columns[name]) for name in ("start", "length", "label"))
    for rank, delta, length, label in zip(trace.ranks, deltas, lengths, labels, strict=True):
        start = np.cumsum(delta) * tick
        assert np.abs(start + origin - clocks.shared(rank.rank, rank.spans["start"])).max() < 2 * tick
        stop = start + length * tick
        assert np.abs(stop + origin - clocks.shared(rank.rank, rank.spans["stop"])).max() < 2 * tick
        for field in ("name", "path", "action", "site", "axis", "shape"):
            words = columns[f"label.{field}"][label]
            assert [facts["strings"][word] for word in words] == [rank.strings[n] for n in rank.spans[field]], field
        assert (columns["label.peer"][label] - 1 == rank.spans["peer"]).all()
        assert (columns["label.bytes"][label] == rank.spans["bytes"]).all()
        assert [KINDS[kind] for kind in columns["label.kind"][label]] == [KINDS[k] for k in rank.spans["kind"]]


def test_a_span_around_another_is_its_outer_one(data, trace):
    facts, columns = data
    for rank, outer in zip(trace.ranks, by_rank(facts, columns["outer"]), strict=True):
        at = np.flatnonzero(outer)
        inside, around = rank.spans[at], rank.spans[at - outer[at]]
        assert (around["start"] <= inside["start"]).all()
        assert (around["stop"] >= inside["stop"]).all()
        nested = np.isin(inside["kind"], [KIND["op"], KIND["message"], KIND["wait"]])
        assert (around["depth"][nested] == inside["depth"][nested] - 1).all()
        deep = rank.spans["depth"] > 0
        assert (outer[deep & (rank.spans["kind"] != KIND["arrival"])] > 0).all()


def test_both_ends_of_messages_are_those_that_were_matched(data, trace):
    facts, columns = data
    found = matched(trace)
    offset = np.cumsum([0, *(rank["spans"] for rank in facts["ranks"])])
    assert (columns["sent"] == offset[found.pairs["source"]] + found.pairs["sent"]).all()
    assert (columns["got"] == offset[found.pairs["dest"]] + found.pairs["got"]).all()
    assert len(found.pairs) == 2 * 4 * 4 * 20  # to and fro, 4 micro-batches, 4 pairs of ranks
    assert sorted(columns["call"]) == sorted(offset[found.meetings["rank"]] + found.meetings["span"])
    assert sorted(columns["done"]) == sorted(offset[found.meetings["rank"]] + found.meetings["done"])
    assert (columns["done"] != columns["call"]).sum() == 8 * 20  # the sums of gradients do not block
    sizes = np.bincount(np.cumsum(columns["meeting"]))
    assert set(sizes) == {2, 8}
    assert (sizes == 8).sum() == 20  # the norm of each step


def test_memory_is_there_to_the_byte(data, trace):
    facts, columns = data
    ends = np.cumsum([rank["memory"] for rank in facts["ranks"]])[:-1]
    owners, held = np.split(columns["memory.owner"], ends), np.split(columns["memory.bytes"], ends)
    for rank, owner, nbytes in zip(trace.ranks, owners, held, strict=True):
        assert (nbytes == rank.memory["bytes"]).all()
        assert [facts["strings"][n] for n in owner] == [rank.strings[n] for n in rank.memory["owner"]]


def test_a_long_trace_loses_ops_of_old_steps_before_anything_else(trace):
    total = sum(len(rank.spans) for rank in trace.ranks)
    ops = sum(int((rank.spans["kind"] == KIND["op"]).sum()) for rank in trace.ranks)
    choice = choose(trace, total - ops // 2)
    assert choice.left_out == "ops before step 11 and outside of steps"
    for rank, kept in zip(trace.ranks, choice.kept, strict=True):
        gone = rank.spans[~kept]
        assert set(gone["kind"]) == {KIND["op"]}
        assert set(gone["step"]) == set(range(1, 11))


def test_a_longer_one_loses_old_steps_and_the_newest_stays_whatever_it_takes(tmp_path, trace):
    text, told = written(tmp_path, trace, most=1500)
    assert told.left_out.endswith("everything before step 20 and outside of steps")
    facts, columns = data_of(text)
    assert set(columns["step"]) == {20}
    assert [step["step"] for step in facts["steps"]] == [20]
    assert facts["steps"][0]["start"] < 1e6  # time begins with what is in the page
    last = {rank.rank: rank.spans[rank.spans["step"] == 20] for rank in trace.ranks}
    assert [rank["spans"] for rank in facts["ranks"]] == [len(spans) for spans in last.values()]
    kept = sum(rank["spans"] for rank in facts["ranks"])
    assert columns["sent"].max() < kept
    assert len(columns["sent"]) == 32


def test_what_was_held_and_did_not_change_is_known_where_old_steps_are_left_out():
    memory = np.array([(10, 1, 1, 100), (20, 1, 2, 7), (30, 2, 2, 8), (40, 3, 2, 9)], MEMORY)
    assert held_since(memory, 0).tolist() == memory.tolist()
    assert sorted(held_since(memory, 3).tolist()) == [(40, 3, 1, 100), (40, 3, 2, 8), (40, 3, 2, 9)]
    assert held_since(memory, 3)[-1]["bytes"] == 9
    assert len(held_since(memory, 9)) == 2
    assert len(held_since(memory[:0], 2)) == 0


@pytest.mark.parametrize("ranks", [[], [RankTrace(0, 1)], [RankTrace(3, 8, axes={"world": tuple(range(8))})]])
def test_a_trace_without_spans_is_a_page(tmp_path, ranks):
    facts, columns = data_of(written(tmp_path, Trace(ranks))[0])
    assert len(facts["ranks"]) == len(ranks)
    assert all(len(column) == 0 for column in columns.values())


def test_times_that_no_run_has_are_written_as_numbers_that_the_page_can_hold(tmp_path):
    spans = np.zeros(3, SPAN)
    spans["start"], spans["stop"] = (-(1 << 62), 0, 1 << 62), (-(1 << 62), 5, 1 << 62)
    spans["bytes"] = (np.inf, np.nan, -1.0)
    spans["tag"] = (-(1 << 31), 0, (1 << 31) - 1)
    trace = Trace([RankTrace(0, 1, axes={"world": (0,)}, spans=spans)])
    facts, columns = data_of(written(tmp_path, trace)[0])
    assert columns["start"].sum() * facts["tick"] < 1 << 63
    assert max(column.max() for column in columns.values() if len(column)) < 1 << 48


# -- safety -----------------------------------------------------------------------------------------------------------


def hostile_trace():
    trace = synthetic(steps=2)
    for rank in trace.ranks:
        rank.strings = [rank.strings[0], *(HOSTILE[n % len(HOSTILE)] for n in range(1, len(rank.strings)))]
        rank.host = HOSTILE[0]
        rank.axes = {**rank.axes, HOSTILE[0]: (rank.rank,), "constructor": (rank.rank,)}
        rank.facts = {HOSTILE[0]: HOSTILE[1], "command": list(HOSTILE), "layout": {HOSTILE[0]: 2}, "deep": [[[]]]}
    return trace


def test_names_of_a_trace_cannot_leave_their_place(tmp_path):
    text, _ = written(tmp_path, hostile_trace(), title=HOSTILE[0], records=[{"step": 1, "loss": float("nan")}])
    plain, _ = written(tmp_path, synthetic(steps=2), title="runs/a")
    assert [tag for tag, _ in Elements(text).tags] == [tag for tag, _ in Elements(plain).tags]
    assert Elements(text).text("title") == HOSTILE[0]
    facts, _ = data_of(text)
    assert HOSTILE[0] in facts["strings"]
    assert not {"<", ">", "&"} & set(Elements(text).text("script", id="facts"))
    assert facts["title"] == HOSTILE[0]
    assert "{{program}}" not in plain
    assert text.count('"use strict"') == 1


def test_the_policy_names_the_only_script_and_style_and_forbids_all_connections(whole):
    elements = Elements(whole[0])
    (policy,) = [a["content"] for tag, a in elements.tags if tag == "meta" and "http-equiv" in a]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["base-uri"] == parts["form-action"] == "'none'"
    running = [text for (tag, attrs), text in elements.texts if tag == "script" and "type" not in attrs]
    (style,) = [text for (tag, _), text in elements.texts if tag == "style"]
    for text, name in ((*running, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert parts[name] == f"'sha256-{digest}'"
    assert "unsafe" not in policy
    for tag, attrs in elements.tags:
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "href", "style", "action")], tag


def test_the_program_writes_text_only_as_text_and_knows_no_network():
    program = "".join((SOURCES / "js" / f"{part}.js").read_text(encoding="ascii") for part in PROGRAM)
    as_html = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "import(")
    to_others = ("fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "postMessage", "localStorage", "http", ".src")
    assert not [word for word in (*as_html, *to_others) if word in program]


def test_signs_that_cannot_be_seen_or_turn_text_around_are_replaced():
    assert shown("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc\ufffd"
    assert len(shown("x" * 10**6)) == LONGEST_TEXT
    assert shown("\N{GREEK SMALL LETTER MU}s") == "\N{GREEK SMALL LETTER MU}s"


def test_facts_are_a_few_short_lines_of_what_is_understood():
    rank = RankTrace(0, 1, facts={f"f{n}": n for n in range(50)})
    assert len(facts_of(Trace([rank]))) == 12
    rank.facts = {"layout": {"pp": 2, "edp": 2, "ep": 2, "tp": 1}}
    assert facts_of(Trace([rank])) == [("layout", "pp 2 edp 2 ep 2")]
    rank.facts = {
        "layout": {"pp": 2, "edp": 4, "ep": 1},
        "schedule": {"name": "1f1b", "microbatches": 4},
        "predicted": {"x": 1},
    }
    assert facts_of(Trace([rank])) == [("layout", "pp 2 dp 4"), ("schedule", "1f1b, 4 micro-batches")]


def test_the_page_is_its_owners_and_a_link_in_its_place_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "trace.html").symlink_to(target)
    written(tmp_path, synthetic(steps=1))
    assert target.read_text() == "kept"
    assert not (tmp_path / "trace.html").is_symlink()
    assert os.stat(tmp_path / "trace.html").st_mode & 0o77 == 0


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path):
    trace = synthetic(steps=1)
    with pytest.raises(ValueError, match=r"none/trace\.html: the page cannot be written: No such file"):
        write_page(tmp_path / "none" / "trace.html", trace, aligned(trace))


# -- the sources ------------------------------------------------------------------------------------------------------


def test_the_sources_of_the_page_are_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    patterns = data.get("mpitrain.debug.trace.page", [])
    for path in (p for p in SOURCES.rglob("*") if p.is_file() and p.suffix in (".js", ".css", ".html")):
        assert any(fnmatch(path.relative_to(SOURCES).as_posix(), pattern) for pattern in patterns), path
    assert sorted(PROGRAM) == sorted(path.stem for path in (SOURCES / "js").glob("*.js"))


def test_a_curve_of_very_many_steps_is_one_of_some_thousand():
    curve = [[step, 1.0, None] for step in range(1, 100_001)]
    assert 3000 < len(thinned(curve)) <= 4001
    assert thinned(curve)[0][0] == 1
    assert thinned(curve)[-1][0] == 100_000
    assert thinned(curve[:7]) == curve[:7]


# Machado, Oliveira, Fernandes 2009, A physiologically-based model for simulation of color vision deficiency, table 1.
VISION = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TOGETHER = {  # colours that have to be told apart, and how far they stand apart in CIELAB
    "axes": ([f"axis-{n}" for n in range(1, 7)], 12),
    "actions": (["forward", "backward", "weights", "update", "between"], 15),
    "owners": ([f"owner-{n}" for n in range(1, 9)], 10),
}


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def schemes():
    css = (SOURCES / "page.css").read_text(encoding="ascii")
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", css)[:2]
    return [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in blocks]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", TOGETHER)
def test_colours_stay_apart_for_every_kind_of_colour_vision(scheme, name):
    colours, (names, least) = schemes()[scheme], TOGETHER[name]
    for vision, matrix in VISION.items():
        seen = {one: lab(np.clip(np.array(matrix) @ linear(colours[one]), 0, 1)) for one in names}
        for a, b in itertools.combinations(names, 2):
            assert np.linalg.norm(seen[a] - seen[b]) > least, (vision, a, b)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_its_ground(scheme):
    colours = schemes()[scheme]
    pairs = [("text", "back"), ("quiet", "back"), ("quiet", "panel"), ("text", "raised"), ("on", "forward")]
    pairs += [("on", "backward"), ("on", "update"), ("on-weights", "weights"), ("text", "between")]
    pairs += [("text", f"op-{kind}") for kind in ("forward", "backward", "weights", "other")]
    pairs += [("on-axis", f"axis-{n}") for n in range(1, 7)]
    for ink, ground in pairs:
        light = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colours[name])) for name in (ink, ground))
        least = 4.5 if ink in ("text", "quiet") else 3.9  # names of spans stand in the tooltip, too
        assert (light[1] + 0.05) / (light[0] + 0.05) > least, (ink, ground)
