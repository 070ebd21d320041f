"""The loss curve: valid XML, the right places, the right ticks, whatever the run."""

import math
import re
from xml.dom.minidom import parseString

import pytest

from mpitrain.curve import _COLUMNS, linear_ticks, log_ticks, loss_curve, moving_mean


def records(count, **more):
    return [{"step": step, "loss": 1.3 + 4 / step, **more} for step in range(1, count + 1)]


def paths(svg, css):
    return [
        node.getAttribute("d")
        for node in parseString(svg).getElementsByTagName("path")
        if node.getAttribute("class") == css
    ]


def points(path):
    return [tuple(map(float, pair.split(","))) for pair in path[1:].split("L")]


def words(svg):
    nodes = parseString(svg).getElementsByTagName("text")
    return [
        "".join(child.data if child.nodeType == child.TEXT_NODE else child.firstChild.data for child in node.childNodes)
        for node in nodes
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 59, 61, 5000])
@pytest.mark.parametrize("log", [True, False, None])
def test_a_run_of_any_length_is_valid_xml(count, log):
    svg = loss_curve(records(count), "title", "caption", log=log, unit="nats/byte")
    root = parseString(svg).documentElement
    assert root.getAttribute("xmlns") == "http://www.w3.org/2000/svg"
    assert "nan" not in svg
    assert "inf" not in svg
    assert "prefers-color-scheme: dark" in svg


def test_text_from_outside_cannot_leave_its_element():
    svg = loss_curve(records(3), '<script>&"\x00\x1b\ud800', "]]>", unit="<b>")
    assert parseString(svg).getElementsByTagName("script") == []
    svg.encode()


def test_a_line_runs_from_the_first_step_to_the_last_and_downwards():
    (raw,) = paths(loss_curve(records(100), ""), "raw")
    xs, ys = zip(*points(raw), strict=True)
    assert (xs[0], xs[-1], len(xs)) == (64, 708, 100)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys)


def test_on_a_linear_axis_a_loss_stands_where_its_value_says():
    svg = loss_curve([{"step": s, "loss": loss} for s, loss in ((1, 3.0), (2, 2.0), (3, 1.0))], "", log=False)
    (raw,) = paths(svg, "raw")
    (_, high), (_, middle), (_, low) = points(raw)
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert low > high


def test_on_a_logarithmic_axis_equal_factors_are_equal_distances():
    svg = loss_curve([{"step": s, "loss": loss} for s, loss in ((1, 4.0), (2, 2.0), (3, 1.0))], "")
    (raw,) = paths(svg, "raw")
    (_, high), (_, middle), (_, low) = points(raw)
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert "loss, logarithmic" in words(svg)


def test_the_validation_loss_has_its_dots_and_its_last_value():
    run = records(50)
    for record in run[9::10]:
        record["val_loss"] = 1.5 + record["step"] / 1000
    svg = loss_curve(run, "")
    assert len(parseString(svg).getElementsByTagName("circle")) == 5
    assert "validation1.5500" in words(svg)


def test_steps_that_were_not_finite_are_ticks_on_the_axis():
    run = records(50)
    for i in (20, 30):
        run[i]["loss"] = None
    svg = loss_curve(run, "")
    assert len(paths(svg, "bad")) == 2
    assert "step 21: not finite" in svg


def test_a_long_run_keeps_every_spike_in_a_small_file():
    run = [{"step": step, "loss": 2.0} for step in range(1, 200_001)]
    for i in (777, 123_456):
        run[i]["loss"] = 1.0
    svg = loss_curve(run, "")
    assert len(svg) < 60_000
    (raw,) = paths(svg, "raw")
    lowest = max(y for _, y in points(raw))
    assert sum(y == lowest for _, y in points(raw)) == 2
    assert len(points(raw)) <= 4 * (_COLUMNS + 1)


def test_the_mean_of_a_constant_is_that_constant_and_of_noise_is_smooth():
    assert moving_mean([]) == []
    assert {loss for _, loss in moving_mean([(s, 2.5) for s in range(1000)])} == {2.5}
    noisy = moving_mean([(s, 2.0 + (-1) ** s) for s in range(6000)])
    assert max(abs(loss - 2.0) for _, loss in noisy[40:]) < 0.02
    assert noisy[-1][0] == 5999
    assert len(noisy) <= 402


def test_ticks_are_round_and_a_handful_and_inside():
    for low, high in [(0, 1), (1, 3563), (1.26, 1.31), (-3, 1e6), (0.3, 0.9), (1, 2)]:
        ticks = linear_ticks(low, high)
        assert 3 <= len(ticks) <= 9
        assert all(low <= tick <= high for tick in ticks)
    assert linear_ticks(0, 0.7) == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert linear_ticks(1, 3, whole=True) == [1, 2, 3]
    for low, high in [(1, 6), (1.2, 5.6), (0.001, 900), (1.3, 1.4), (1e-9, 1e9), (2, 8)]:
        ticks = log_ticks(low, high)
        assert 3 <= len(ticks) <= 9, ticks
        assert ticks == sorted(ticks)
        assert all(low <= tick <= high for tick in ticks)


def test_labels_of_curves_that_end_together_do_not_cover_one_another():
    svg = loss_curve(records(20, val_loss=1.5), "")
    places = [
        float(node.getAttribute("y"))
        for node in parseString(svg).getElementsByTagName("text")
        if re.match("train|val", node.getAttribute("class"))
    ]
    assert abs(places[0] - places[1]) >= 34
    assert max(places) + 17 < 430


def test_a_loss_of_zero_has_a_linear_axis():
    svg = loss_curve([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.0}], "", log=True)
    assert "loss, logarithmic" not in words(svg)
    assert math.isfinite(points(paths(svg, "raw")[0])[1][1])


@pytest.mark.parametrize("spike", [4.6e18, 1e300, 1e308, 10**400, -1e308, 1e-320])
@pytest.mark.parametrize("log", [True, False, None])
def test_one_loss_of_any_size_leaves_a_curve(spike, log):
    """After 4.6e18 a difference of running sums is noise; 1e308 has no room around it and is drawn as not finite."""
    measured = [{"step": step, "loss": spike if step == 2 else 5.0, "val_loss": 4.5} for step in range(1, 100)]
    parseString(loss_curve(measured, "title", "caption", log=log))
    assert moving_mean([(step, 4.6e18 if step == 2 else 5.0) for step in range(1, 100)])[-1][1] == 5.0
