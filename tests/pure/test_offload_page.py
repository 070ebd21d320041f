"""docs/explanation/offload.md shows the kept figures."""

import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import offload
import offload_page as page

NAMES = [page.name(what, place, ahead) for place in page.PLACES for what in page.WHAT for ahead in (0, 1)]


def test_the_committed_page_and_pictures_are_what_the_committed_figures_give():
    if not page.KEPT.exists():
        assert page.PAGE.read_text(encoding="utf-8").count("Not measured.") == 2
        return
    for path, text in page.files(json.loads(page.KEPT.read_text())).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/offload.py --write-docs"


def test_times_are_ratios_of_a_round():
    seconds = {page.HERE: [0.25, 0.5, 1.0], **{name: [0.25, 0.75, 2.0] for name in NAMES}}
    about = {"cpu": "A", "time": "2030-01-02 03:04", "versions": {"numpy": "2"}, "kernels": "fast", "commit": "abc"}
    result = {"about": about, "seconds": seconds, "pictures": ["<svg>one</svg>", "<svg>two</svg>"]}
    assert page.ratios(result, NAMES[0]) == [1.0, 1.5, 2.0]
    assert page.lines(result)[0] == "everything here: 500.0 ms a step"
    assert len(page.lines(result)) == 13
    table = page.parts(result)["time"].splitlines()
    assert table[2] == f"| `optimizer` |{' **1.50** (1.00 to 2.00) |' * 4}"
    assert len(table) == 5
    written = page.files(result)
    assert "medians of 3 rounds" in written[page.PAGE]
    assert "Not measured." not in written[page.PAGE]
    assert [written[path] for path in page.PICTURES] == result["pictures"]


def test_a_store_that_is_slowed_down_takes_its_time():
    medium = offload.Slowed([offload.region_of(1, 100)])
    medium.rate = 1e4
    began = time.perf_counter()
    medium.write("activations", 0, np.ones(100, np.uint8))
    assert time.perf_counter() - began >= 0.01
    into = np.empty(100, np.uint8)
    medium.read("activations", 0, into)
    assert into.all()
