"""The page of a trace in a real browser: what it draws and says, what pointer and keys do, that nothing leaves it.

It takes playwright and a Chromium that is installed (`apt-get install chromium`); elsewhere these tests are skipped.
"""

import os
import shutil
import time
from importlib.util import find_spec

import numpy as np
import pytest
from synthetic_trace import synthetic
from test_trace_page import hostile_trace

from mpitrain.debug.trace.clocks import aligned
from mpitrain.debug.trace.matches import matched
from mpitrain.debug.trace.page.html import write_page
from mpitrain.debug.trace.records import KIND, Trace
from mpitrain.debug.trace.waits import waits

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "microsoft-edge"))), None
)
if find_spec("playwright") is None or BROWSER is None:
    missing = "playwright" if find_spec("playwright") is None else "a Chromium"
    pytest.skip(f"the page is tried in a browser where there is {missing}", allow_module_level=True)

from playwright.sync_api import sync_playwright  # noqa: E402  (may be missing)

MOST_SECONDS = 2.0  # from the address to the picture; the bound
RECORDS = [{"step": step, "loss": 1.5 + 4 / step, "val_loss": 2.0 if step % 10 == 0 else None} for step in range(1, 41)]


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses to work for root; the pages here are our own.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=BROWSER, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def trace():
    return synthetic(steps=11)


@pytest.fixture(scope="module")
def page_file(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "trace.html"
    write_page(path, trace, aligned(trace), RECORDS, title="runs/a")
    return path


class Opener:
    """Opens pages, drawn; notes what they complain of or ask the network for."""

    def __init__(self, browser):
        self._browser = browser
        self.trouble = []

    def __call__(self, path, width=1100, height=700, scheme="light", anchor=""):
        page = self._browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.on("console", lambda message: self.trouble.append(message.text))
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        page.on("request", lambda request: self.trouble.append(request.url) if ".html" not in request.url else None)
        page.goto(path.as_uri() + anchor)
        page.wait_for_function("performance.getEntriesByName('drawn').length")
        return page


@pytest.fixture(scope="module")
def opener(chromium):
    return Opener(chromium)


@pytest.fixture
def opened(opener):
    """`opened(path, ...)` -> a page of its own."""
    pages = []

    def opened(*args, **how):
        pages.append(opener(*args, **how))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
    assert opener.trouble == []


@pytest.fixture(scope="module")
def shared_page(opener, page_file):
    return opener(page_file)


@pytest.fixture
def page(shared_page, opener):
    """The page that all share, as it was when it was opened."""
    shared_page.evaluate(
        """() => {
            scrollTo(0, 0); document.activeElement.blur(); byId("search").value = ""; byId("lanes").scrollTop = 0;
            view.hidden.clear(); showAxes(); setGroup(""); search(""); select(-1);
            if (!view.ops) toggle("ops");
            view.cursor = null; view.hovered = -1; pickStep(usualStep()); drawAll();
        }"""
    )
    yield shared_page
    assert opener.trouble == []


def box_of(page, span):
    """Where the middle of a span is drawn, in pixels of the window."""
    return page.evaluate(
        """(i) => {
            const box = boxOf(i, byId("lanes").scrollTop), lanes = byId("lanes").getBoundingClientRect();
            return [lanes.left + box.x + box.wide / 2, lanes.top + box.y + box.height / 2];
        }""",
        span,
    )


def spans_where(page, test):
    return page.evaluate(
        f"[...Array(model.count).keys()].filter((i) => {{ const l = model.labels[model.label[i]]; return {test}; }})"
    )


def test_eight_ranks_and_twenty_steps_are_drawn_within_two_seconds(opened, page, tmp_path):
    path = tmp_path / "long.html"
    trace = synthetic()
    write_page(path, trace, aligned(trace))
    assert path.stat().st_size < 5e6
    began = time.monotonic()
    page = opened(path, width=1400, height=1000)
    seconds = time.monotonic() - began
    assert page.evaluate("model.count") == 40_160
    assert seconds < MOST_SECONDS * (1 + os.getloadavg()[0] / (os.cpu_count() or 1))


def test_the_browser_reads_every_span_as_it_was(page, trace):
    clocks = aligned(trace)
    offset = page.evaluate("[model.start[0], model.stop.reduce((a, b) => a + b, 0)]")
    first = int(trace.ranks[0].steps[0]["start"])
    assert abs(offset[0] - (int(trace.ranks[0].spans["start"][0]) - first)) < 200
    stops = sum(int((clocks.shared(r.rank, r.spans["stop"]) - first).sum()) for r in trace.ranks)
    assert abs(offset[1] - stops) < 200 * 22_000
    by_kind = page.evaluate("model.labels.map((l) => l.kind)")
    label = page.evaluate("Array.from(model.label)")
    found = np.unique([by_kind[n] for n in label], return_counts=True)
    spans = np.concatenate([rank.spans for rank in trace.ranks])
    assert dict(zip(*found, strict=True)) == {
        kind: n for kind, number in KIND.items() if (n := int((spans["kind"] == number).sum()))
    }
    whole = waits(trace, clocks, matched(trace))
    assert (
        abs(page.evaluate("model.waited.reduce((a, b) => a + b, 0)") - sum(int(w.ns.sum()) for w in whole.values()))
        < 100 * 22_000
    )


def test_it_begins_with_a_usual_step_and_steps_are_picked_by_list_keys_and_curve(page):
    lengths = page.evaluate("facts.steps.map((step) => step.stop - step.start)")
    begun = page.evaluate("view.step")
    assert sorted(lengths).index(lengths[begun - 1]) == 5
    page.keyboard.press("]")
    assert page.evaluate("view.step") == begun + 1
    assert page.locator("#step").input_value() == str(begun + 1)
    page.locator("#step").select_option("7")
    assert page.evaluate("view.step") == 7
    begin, end = page.evaluate("[facts.steps[6].start, facts.steps[6].stop]")
    shown = page.evaluate("[view.from, view.to]")
    assert shown[0] < begin < end < shown[1]
    assert end - begin > 0.9 * (shown[1] - shown[0])
    page.locator("#loss").click(position={"x": 47, "y": 40})
    assert page.evaluate("view.step") == 1
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("0")
    assert page.evaluate("view.step") == 0
    assert "#" in page.url


def test_the_wheel_zooms_around_the_pointer_and_dragging_moves(page):
    box = page.locator("#lanes").bounding_box()
    x, y = box["x"] + 500, box["y"] + 30
    page.mouse.move(x, y)
    before = page.evaluate("[timeAt(500), view.to - view.from]")
    page.mouse.wheel(0, -240)
    page.wait_for_function(f"view.to - view.from < {0.7 * before[1]}")
    assert page.evaluate("timeAt(500)") == pytest.approx(before[0], rel=1e-6)
    page.mouse.down()
    page.mouse.move(x + 100, y)
    page.mouse.up()
    assert page.evaluate("timeAt(600)") == pytest.approx(before[0], rel=1e-6)
    length = page.evaluate("view.to - view.from")
    ruler = page.locator("#ruler").bounding_box()
    page.mouse.move(ruler["x"] + 400, ruler["y"] + 10)
    wanted = page.evaluate("[timeAt(400), timeAt(600)]")
    page.mouse.down()
    page.mouse.move(ruler["x"] + 600, ruler["y"] + 10)
    page.mouse.up()
    assert page.evaluate("[view.from, view.to]") == pytest.approx(wanted, rel=1e-6)
    page.mouse.wheel(0, 20_000)
    page.wait_for_function(f"view.to - view.from > {1.05 * (wanted[1] - wanted[0])}")
    assert wanted[1] - wanted[0] < length


def test_a_span_under_the_pointer_says_what_it_is(page):
    span = spans_where(
        page, "l.name === 'attention' && model.step[i] === view.step && model.ranks[model.rankOf[i]].rank === 6"
    )[1]
    page.evaluate("(i) => { view.selected = i; fit(); view.selected = -1; }", span)
    height, left = box_of(page, span)[1], page.locator("#lanes").bounding_box()["x"]
    for x in page.evaluate("(i) => [xOf(model.start[i]) + 3, xOf(model.stop[i]) - 3]", span):
        page.mouse.move(left + x, height)
        assert page.evaluate("view.hovered") == span
    tip = page.locator("#tip").inner_text()
    assert tip.startswith("attention")
    assert "rank 6" in tip
    assert "blocks.1.attention" in tip
    assert "(4, 64, 64) float32" in tip
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_a_message_between_two_shows_who_was_waited_for_and_leads_to_its_other_end(page, trace):
    pairs = matched(trace).pairs
    starts = page.evaluate("model.ranks.map((rank) => rank.from)")
    pair = pairs[(pairs["source"] == 1) & (pairs["dest"] == 5)][11]
    got, sent = starts[5] + int(pair["got"]), starts[1] + int(pair["sent"])
    page.evaluate("goTo", got)
    page.evaluate("fit()")
    page.mouse.click(*box_of(page, got))
    assert page.evaluate("view.selected") == got
    details = page.locator("#details").inner_text()
    assert "wait for irecv" in details
    assert "pp: ranks 1 5" in details
    assert "for rank 1" in details or page.evaluate("(i) => model.waited[i]", got) < 1000
    page.keyboard.press("m")
    assert page.evaluate("view.selected") == sent
    assert "RECV" not in page.locator("#details h3").inner_text()
    assert "131 kB" in page.locator("#details").inner_text()
    page.locator("#details button", has_text="where it came, rank 5").click()
    assert page.evaluate("view.selected") == got
    page.keyboard.press("Escape")
    assert page.evaluate("view.selected") == -1


def test_of_a_collective_everybody_is_named_and_who_came_last(page):
    spans = spans_where(
        page, "l.name === 'all_reduce' && l.kind === 'message' && l.axis === 'world' && model.step[i] === 4"
    )
    assert len(spans) == 8
    page.evaluate("goTo", spans[0])
    rows = page.locator("#details table tr").all_inner_texts()[1:]
    assert len(rows) == 8
    late = max(spans, key=lambda i: page.evaluate("(i) => model.start[i]", i))
    rank = page.evaluate("(i) => model.ranks[model.rankOf[i]].rank", late)
    (last,) = [row for row in rows if "came last" in row]
    assert last.startswith(f"rank {rank}")
    waited = page.evaluate("(i) => waitedText(i)", spans[0])
    assert waited == "" or waited.endswith(f"for rank {rank}") or spans[0] == late


def test_filters_of_axes_change_the_matrix_and_what_is_dim(page, trace):
    def total():
        return page.evaluate("trafficOf().reduce((a, b) => a + b, 0)")

    step = page.evaluate("view.step")
    sent = {}
    for rank in trace.ranks:
        spans = rank.spans[(rank.spans["kind"] == KIND["message"]) & (rank.spans["step"] == step)]
        for axis in np.unique(spans["axis"]):
            sent[rank.text(axis)] = sent.get(rank.text(axis), 0) + float(spans["bytes"][spans["axis"] == axis].sum())
    assert total() == pytest.approx(sum(sent.values()))
    page.locator("#axes button[data-axis=tp]").click()
    assert total() == pytest.approx(sum(sent.values()) - sent["tp"])
    assert page.locator("#axes button[data-axis=tp]").get_attribute("aria-pressed") == "false"
    assert page.evaluate("model.labels.filter(isMessage).every((l) => isLit(l) === (l.axis !== 'tp'))")
    page.locator("#axes button[data-axis=pp]").dblclick()
    assert total() == pytest.approx(sent["pp"])
    cells = page.locator("#traffic tr").nth(1).locator("td")
    assert cells.nth(4).get_attribute("title") == "rank 0 to rank 4: 524 kB"
    assert cells.nth(1).get_attribute("title") == "rank 0 to rank 1: 0 B"


def test_a_collectives_bytes_go_in_equal_parts_to_the_others_of_its_axis(page):
    page.locator("#axes button[data-axis=dp]").dblclick()
    matrix = np.array(page.evaluate("Array.from(trafficOf())")).reshape(8, 8)
    assert (np.flatnonzero(matrix[1]) == [3]).all()
    assert matrix[1, 3] == 941056 + 8
    page.locator("#axes button[data-axis=world]").dblclick()
    matrix = np.array(page.evaluate("Array.from(trafficOf())")).reshape(8, 8)
    assert np.allclose(matrix[~np.eye(8, dtype=bool)], 24 * 2 / 8)
    assert (np.diag(matrix) == 0).all()


def test_what_is_searched_for_is_counted_found_in_turn_and_left_lit(page, trace):
    page.keyboard.press("/")
    page.keyboard.type("MLP.up")
    expected = sum(
        int(np.isin(r.spans["path"], [n for n, t in enumerate(r.strings) if "mlp.up" in t]).sum()) for r in trace.ranks
    )
    assert page.locator("#found").inner_text() == f"{expected:,} spans"
    page.keyboard.press("Enter")
    first = page.evaluate("view.selected")
    page.keyboard.press("Enter")
    second = page.evaluate("view.selected")
    assert page.evaluate("(i) => model.labels[model.label[i]].path", second).endswith("mlp.up")
    assert page.evaluate("([a, b]) => model.start[a] <= model.start[b]", [first, second])
    page.keyboard.press("Shift+Enter")
    assert page.evaluate("view.selected") == first
    page.locator("#search").fill("")
    assert page.evaluate("model.labels.every(isLit)")


def test_all_of_it_can_be_done_with_the_keyboard_alone(page):
    page.locator("#lanes").focus()
    before = page.evaluate("[view.from, view.to]")
    for key, test in (
        ("w", "view.to - view.from < {1} - {0}"),
        ("s", "Math.abs((view.to - view.from) / ({1} - {0}) - 1) < 0.01"),
        ("d", "view.from > {0}"),
    ):
        page.keyboard.press(key)
        assert page.evaluate(test.format(*before)), key
    page.keyboard.press("Shift+ArrowRight")
    selected = page.evaluate("view.selected")
    assert selected >= 0
    assert page.evaluate("model.labels[model.label[view.selected]].kind") == "action"
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate("view.selected") > selected
    page.keyboard.press("Shift+ArrowDown")
    assert page.evaluate("model.labels[model.label[view.selected]].kind") == "op"
    assert page.locator("#said").inner_text().startswith(page.evaluate("titleOf(view.selected)"))
    page.keyboard.press("o")
    assert page.evaluate("lanes.every((lane) => lane.rows.every((row) => row.kind !== 'op'))")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.axis"))
    assert {"step", "zoom-in", "show-ops", "tp", "group", "search", "lanes", "memory-rank", "traffic-box"} <= reached


def test_ranks_of_one_axis_can_be_shown_alone(page):
    page.locator("#group").select_option("1 5")
    assert page.evaluate("lanes.map((lane) => lane.rank.rank)") == [1, 5]
    other = spans_where(page, "model.ranks[model.rankOf[i]].rank === 2")[0]
    page.evaluate("goTo", other)
    assert len(page.evaluate("lanes.map((lane) => lane.rank.rank)")) == 8


def test_memory_is_told_at_the_cursor_and_its_owners_add_up_to_the_peak(page, trace):
    rank = trace.ranks[0]
    page.locator("#memory-rank").select_option("0")
    at = len(rank.memory) // 2
    time_of = int(rank.memory["time"][at])
    now = {rank.text(row["owner"]): int(row["bytes"]) for row in rank.memory if row["time"] <= time_of}
    page.evaluate("(t) => { view.cursor = t; drawMemory(); }", time_of - int(rank.steps[0]["start"]) + 150)
    told = page.locator("#owners li").all_inner_texts()
    assert f"activations {page.evaluate('bytesText', now['activations'])}" in told
    assert f"weights {page.evaluate('bytesText', now['weights'])}" in told
    held, peak = {}, 0
    for moment in np.unique(rank.memory["time"]):
        held |= {row["owner"]: int(row["bytes"]) for row in rank.memory[rank.memory["time"] == moment]}
        peak = max(peak, sum(held.values()))
    assert page.evaluate("model.held.ranks[0].peak") == peak
    assert len(told) == 7
    assert told[-1].startswith("activations")  # what changes most lies on top


def test_memory_has_a_gap_where_steps_were_not_looked_at(page):
    moments = "[[1, 5], [1, 6], [2, 7], [11, 8], [11, 9]].map(([step, time]) => ({ step, time: 1e6 * time }))"
    page.evaluate("show(0, 2e7)")
    assert page.evaluate(f"stretchesOf({moments}).map((stretch) => stretch.length)") == [3, 2]
    page.evaluate("show(6.5e6, 8.5e6)")
    assert page.evaluate(f"stretchesOf({moments}).map((stretch) => stretch.map(({{ time }}) => time / 1e6))") == [
        [6, 7],
        [8, 9],
    ]


def test_memory_is_drawn_on_lighter_where_steps_were_not_looked_at(page):
    moments = "[[1, 5], [1, 6], [11, 8]].map(([step, time]) => ({ step, time: 1e6 * time }))"
    page.evaluate("show(0, 2e7)")
    drawn = page.evaluate(f"betweenStretches(stretchesOf({moments})).map((two) => two.map(({{ time }}) => time / 1e6))")
    assert drawn[0] == [6, 8]
    assert drawn[1] == [8, page.evaluate("Math.max(8, model.end / 1e6)")]


def test_without_a_cursor_the_memory_of_owners_is_that_of_the_peak(page):
    page.locator("#memory-rank").select_option("0")
    page.evaluate("view.cursor = null; drawMemory()")
    assert page.locator("#owners-at").inner_text() == "at its peak:"
    moment = "model.held.ranks[0].moments.find((one) => one.total === model.held.ranks[0].peak)"
    held = page.evaluate(f"model.held.named.map((owner) => bytesText({moment}.bytes.get(owner) || 0))")
    assert page.locator("#owners b").all_inner_texts() == held


def test_owners_have_one_colour_in_all_pages(page):
    for names in (["weights", "activations"], ["activations", "x", "optimizer state", "weights", "constructor"]):
        numbers = dict(zip(names, page.evaluate("(names) => ownerColours(names, true)", names), strict=True))
        assert (numbers["weights"], numbers["activations"]) == (1, 5)
        assert len(set(numbers.values()) - {8}) == len(names)
    eight = ["gradients", *"abcdefg"]
    assert sorted(page.evaluate("(names) => ownerColours(names, false)", eight)) == list(range(1, 9))


def test_the_losses_are_those_of_the_metrics(page):
    assert page.locator("#loss").get_attribute("aria-label") == "Loss from 5.500 at step 1 to 1.600 at step 40"
    assert "validation (dots) 2.0000" in page.locator("#loss-said").inner_text()


def test_shares_of_a_step_add_up_and_the_slow_rank_is_seen(page):
    shares = page.evaluate("model.ranks.map((rank) => rank.share)")
    for share in shares:
        assert 0.9 < share["compute"] + share["moving"] + share["waiting"] <= 1.01
    assert max(range(8), key=lambda n: shares[n]["compute"]) == 5
    assert min(range(8), key=lambda n: shares[n]["waiting"]) == 5


def test_lanes_and_strips_are_painted_in_both_schemes(opened, page_file):
    backs = []
    for scheme in ("light", "dark"):
        page = opened(page_file, scheme=scheme)
        backs.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        seen = page.evaluate(
            """() => Object.fromEntries(["base", "overview", "ruler", "memory", "loss"].map((id) => {
                const canvas = byId(id), pen = canvas.getContext("2d");
                const words = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
                const ink = [...new Set(words)].map((word) => "#" + [0, 8, 16].map((n) =>
                    ((word >> n) & 255).toString(16).padStart(2, "0")).join(""));
                return [id, ink];
            }))"""
        )
        for canvas, least in (("base", 12), ("overview", 5), ("ruler", 2), ("memory", 5), ("loss", 3)):
            assert len(seen[canvas]) >= least, canvas
        for name in ("forward", "backward", "update", "between", "op-forward", "op-backward", "axis-1", "axis-3"):
            assert page.evaluate("(name) => colours[name]", name) in seen["base"], name
        for action, name in (("F", "forward"), ("B", "backward"), ("STEP", "update"), ("SEND_F", "between")):
            test = "([action, name]) => model.labels.filter((l) => l.kind === 'action' && l.action === action)"
            assert page.evaluate(test + ".every((l) => l.fill === colours[name])", [action, name]), action
    assert backs == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
    page.locator("#theme-button").click()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == backs[0]


def test_a_narrow_window_needs_no_scrolling_sideways(opened, page_file):
    page = opened(page_file, width=400, height=700)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.locator("#details").is_visible()


def test_an_address_leads_back_to_its_place(opened, page_file):
    page = opened(page_file, anchor="#step=3&span=1234&rank=<b>")
    assert page.evaluate("[view.step, view.selected]") == [3, 1234]
    assert page.url.endswith("#step=3&span=1234")
    assert opened(page_file, anchor="#step=999&span=99999999").evaluate("[view.step, view.selected]") == [0, -1]


def test_whatever_a_trace_is_called_nothing_of_it_runs(opened, opener, tmp_path):
    path = tmp_path / "hostile.html"
    trace = hostile_trace()
    write_page(path, trace, aligned(trace), [], title="<img src=x onerror=alert(1)>")
    page = opened(path)
    assert page.locator("h1").inner_text() == "<img src=x onerror=alert(1)>"
    for span in spans_where(page, "l.name.includes('alert') || l.name === 'constructor' || l.name === '__proto__'")[
        :40
    ]:
        page.evaluate("(i) => { goTo(i); showTip(i, 10, 10); }", span)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3
    page.evaluate("drawAll()")
    assert opener.trouble == []
    # The policy itself holds: the browser refuses what a hole in the escaping would have let in.
    page.evaluate(
        """() => {
            globalThis.refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
            const script = document.createElement("script");
            script.textContent = "globalThis.ran = true";
            document.body.append(script);
        }"""
    )
    page.wait_for_function("refused.length")
    assert page.evaluate("globalThis.ran") is None
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    assert opener.trouble
    assert all("Content Security Policy" in text for text in opener.trouble)
    opener.trouble.clear()


def test_a_page_without_spans_says_what_is_missing(opened, tmp_path):
    for ranks in ([], synthetic(steps=1).ranks[:3]):
        path = tmp_path / f"{len(ranks)}.html"
        write_page(path, Trace(ranks), aligned(Trace(ranks)))
        page = opened(path)
        if ranks:
            assert page.locator("#notice").inner_text() == "The traces of 5 ranks are missing."
        assert page.evaluate("model.ranks.length") == len(ranks)


def test_two_hosts_state_how_far_their_clocks_agree(opened, tmp_path):
    trace = synthetic(steps=3, clocks_apart=3_000_000_000)
    path = tmp_path / "hosts.html"
    write_page(path, trace, aligned(trace))
    page = opened(path)
    assert "2 clocks" in page.locator("#summary").inner_text()
    assert "on 2 hosts" in page.locator("#summary").inner_text()
    sent = page.evaluate("model.sent[0]")
    page.evaluate("goTo", sent)
    assert "by clocks that agree to" in page.locator("#details").inner_text()
    assert page.evaluate("model.sent.every((s, n) => model.stop[model.got[n]] > model.start[s] - 1e6)")
