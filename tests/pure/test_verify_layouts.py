"""Layouts as words, and all of them."""

import math

import pytest

from mpitrain.errors import ConfigError
from mpitrain.verify.layouts import WAYS, Layout, all_layouts, parse


def test_words_become_flags_in_the_order_of_the_axes():
    layout = parse("tp2,sp,dp2,ulysses,cp2")
    assert str(layout) == "dp2,cp2,tp2,sp,ulysses"
    assert layout.flags == (
        *("--dp", "2", "--cp", "2", "--tp", "2"),
        *("--sequence-parallel", "--cp-attention", "ulysses"),
    )
    assert layout.ranks == 8


def test_an_axis_of_one_rank_is_passed_on_but_has_no_size():
    layout = parse("dp2,tp1,sp")
    assert layout.flags == ("--dp", "2", "--tp", "1", "--sequence-parallel")
    assert layout.sizes == {"dp": 2}
    assert layout.simple == parse("dp2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dq2", "'dq2' is no word of a layout"),
        ("dp", "'dp' is no word of a layout"),
        ("2", "'2' is no word of a layout"),
        ("", "'' is no word of a layout"),
        ("dp2,", "'' is no word of a layout"),
        ("spp", "Did you mean sp?"),
        ("dp2,dp4", "dp stands twice"),
        ("dp0", "an axis has from 1 to 1024 ranks"),
        ("tp9999999999", "an axis has from 1 to 1024 ranks"),
        ("dp64,tp64", "needs 4096 ranks"),
        ("cp2,ring,rsa", "ring and rsa: only one"),
        ("tp2,sp,sp", "sp and sp: only one"),
    ],
)
def test_a_wrong_layout_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_an_unknown_word_is_answered_with_the_list_of_words():
    with pytest.raises(ConfigError, match=r"dpN cpN tpN .*sp \(sequence parallelism, of tp\), ring .*ulysses .*rsa"):
        parse("pp2")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_all_layouts_are_every_factorisation_once_with_every_way_of_its_axes(ranks):
    layouts = list(all_layouts(ranks))
    assert all(layout.ranks == ranks for layout in layouts)
    assert len(set(layouts)) == len(layouts)
    if ranks == 1:
        return
    expected = 0
    for dp in range(1, ranks + 1):
        for cp in range(1, ranks + 1):
            if ranks % (dp * cp) == 0:
                tp = ranks // (dp * cp)
                ways = (3 if cp > 1 else 1) * (2 if tp > 1 else 1)
                expected += ways
                sizes = {axis: n for axis, n in (("dp", dp), ("cp", cp), ("tp", tp)) if n > 1}
                assert sum(layout.sizes == sizes for layout in layouts) == ways
    assert len(layouts) == expected


def test_every_layout_of_all_can_be_given_by_name():
    assert all(parse(str(layout)) == layout for layout in all_layouts(8))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp2", []),
        ("dp4,tp1", []),
        ("tp2,sp", ["tp2"]),
        ("dp2,tp2", ["dp2", "tp2"]),
        ("dp2,cp2,tp2,sp,rsa", ["dp2", "cp2,rsa", "tp2", "tp2,sp"]),
    ],
)
def test_the_parts_of_a_layout_are_its_axes_alone_and_never_itself(text, parts):
    assert [str(part) for part in parse(text).parts()] == parts


def test_every_way_names_ops_of_its_own():
    named = [(way.axis, op) for way in WAYS.values() for op in way.ops]
    assert len(set(named)) == len(named)
    assert all(way.ops for way in WAYS.values())


def test_one_rank_is_a_layout_without_words():
    assert (Layout(()).ranks, Layout(()).flags, Layout(()).sizes) == (1, (), {})
    assert math.prod(Layout(()).sizes.values()) == 1
