"""Layouts as words, and all of them."""

import math
from itertools import product

import pytest

from mpitrain.errors import ConfigError
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.verify.every import all_layouts
from mpitrain.verify.layouts import AXES, PART_OF, WAYS, Layout, parse

FLUSH = [name for name, kind in SCHEDULES.items() if kind.versions is None]


def test_words_become_flags_in_the_order_of_the_axes():
    layout = parse("tp2,sp,dp2,ulysses,cp2")
    assert str(layout) == "dp2,cp2,tp2,sp,ulysses"
    assert layout.flags == (
        *("--dp", "2", "--cp", "2", "--tp", "2"),
        *("--sequence-parallel", "--cp-attention", "ulysses"),
    )
    assert layout.ranks == 8


def test_a_pipeline_is_the_slowest_axis_and_its_schedule_is_a_way_of_it():
    layout = parse("dp2,tp2,pp2,zb-h1")
    assert str(layout) == "pp2,dp2,tp2,zb-h1"
    assert layout.flags == ("--pp", "2", "--dp", "2", "--tp", "2", "--schedule", "zb-h1")
    assert (layout.ranks, layout.schedule) == (8, "zb-h1")
    assert (parse("pp2").schedule, parse("pp1,gpipe").schedule) == ("", "")  # the script's own; nothing to order


def test_a_word_may_count_stages_of_a_rank_and_slices_of_a_sequence():
    layout = parse("v3,pp2,interleaved")
    assert str(layout) == "pp2,interleaved,v3"
    assert layout.flags == ("--pp", "2", "--schedule", "interleaved", "--chunks", "3")
    assert layout.ranks == 2
    assert parse("pp2,terapipe,s5").flags[-2:] == ("--slices", "5")
    assert parse("pp1,dp2,interleaved,v3").simple == parse("dp2")


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
        ("dp2,none,full", "none and full: only one"),
        ("pp2,gpipe,1f1b", "gpipe and 1f1b: only one"),
        ("pp2,v2", "v2 counts stages a rank of interleaved: name it, too"),
        ("pp2,gpipe,s2", "s2 counts slices a sequence of terapipe: name it, too"),
        ("pp2,interleaved,v2,v3", "v stands twice"),
        ("ep2", "ep2 is a part of dp, whose size it does not divide: dp1.  Say dp2,ep2."),
        ("dp3,ep2", "ep2 is a part of dp, whose size it does not divide: dp3"),
        ("dp2,ep4", "ep4 is a part of dp, whose size it does not divide: dp2"),
        ("dp4,ep2,ep4", "ep stands twice"),
        ("dp2,sp", "sp is a way of tp, of which this layout names no size: tp2"),
        ("tp2,zb-h1", "zb-h1 is a way of pp, of which this layout names no size: pp2"),
        ("pp2,interleaved,v0", "there are from 1 to 1024 stages a rank"),
    ],
)
def test_a_wrong_layout_is_refused(text, said):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_an_unknown_word_is_answered_with_the_list_of_words():
    words = (
        r"(?s)ppN dpN cpN tpN .*, epN \(N of the ranks of dp\);.*gpipe \| 1f1b .*sp \(sequence parallelism, of tp\);"
        r" overlap \(.*, of ep\); ring \| ulysses \| rsa .*vN .*sN"
    )
    with pytest.raises(ConfigError, match=words):
        parse("xp2")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_all_layouts_are_every_factorisation_once_with_every_way_of_its_axes(ranks):
    every = list(all_layouts(ranks))
    assert all(layout.ranks == ranks for layout in every)
    assert len(set(every)) == len(every)
    layouts = [layout for layout in every if is_plain(layout)]
    assert every[: len(layouts)] == layouts
    if ranks == 1:
        return
    expected = 0
    for pp, dp, cp in product(range(1, ranks + 1), repeat=3):
        if ranks % (pp * dp * cp) == 0:
            tp = ranks // (pp * dp * cp)
            ways = (len(FLUSH) if pp > 1 else 1) * (3 if cp > 1 else 1) * (2 if tp > 1 else 1)
            if pp > 1:  # of TeraPipe those alone without cp and without sequence parallelism
                ways -= 3 * (2 if tp > 1 else 1) if cp > 1 else int(tp > 1)
            expected += ways
            sizes = {axis: n for axis, n in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)) if n > 1}
            assert sum(layout.sizes == sizes for layout in layouts) == ways
    assert len(layouts) == expected


OF_MODEL = {word for word, way in WAYS.items() if not way.axis}
ZERO = ("zero1", "zero2", "zero3")


def is_plain(layout):
    return not layout.spreads_experts and not OF_MODEL.intersection(layout.ways)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_a_few_layouts_of_all_spread_experts_over_dp_and_over_a_part_of_it_beside_everything(ranks):
    layouts = list(all_layouts(ranks))
    spread = [layout for layout in layouts if layout.spreads_experts and is_plain(replace_ep(layout))]
    assert all(layout.sizes["dp"] % layout.sizes["ep"] == 0 for layout in spread)
    assert all(replace_ep(layout) in layouts for layout in spread)
    everything = {name for layout in map(replace_ep, spread) for name in (*layout.sizes, *layout.ways)}
    assert everything >= {"dp"} if ranks in (2, 3) else everything == {*AXES, *WAYS} - UNFIT - {"ep"}
    wholes = {layout.sizes["dp"] == layout.sizes["ep"] for layout in spread}
    assert wholes == ({True} if ranks in (2, 3) else {True, False})
    assert {"overlap" in layout.ways for layout in spread} == ({False} if ranks in (2, 3) else {True, False})
    assert ranks < 8 or len(spread) < len(layouts) / 9


UNFIT = {"terapipe", "pipedream", "pipedream-2bw", "overlap", *OF_MODEL}
"""Where experts do not go: sequences that come in slices, weights that are late; what the model does anywhere, and what
only they do."""


def replace_ep(layout):
    """The layout without its experts' axis."""
    ways = tuple(way for way in layout.ways if WAYS[way].axis != "ep")
    return Layout(tuple(pair for pair in layout.axes if pair[0] != "ep"), ways, layout.counts)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_few_layouts_of_all_make_blocks_again_or_keep_scores_and_show_it_beside_everything(ranks):
    layouts = list(all_layouts(ranks))
    for word, unfit in (("full", set()), ("none", {"cp", "ring", "ulysses", "rsa", "terapipe"})):
        some = [layout for layout in layouts if word in layout.ways]
        beside = [{*layout.sizes, *layout.ways} - {word} for layout in some]
        everything = {name for layout in layouts for name in (*layout.sizes, *layout.ways)} - OF_MODEL - unfit
        found = set().union(*beside)
        assert found == everything if ranks > 3 else found >= everything.intersection(AXES)
        assert 1 <= sum(layout.spreads_experts for layout in some) <= 2
        assert len(some) <= len(everything)
    extra = sum(bool({"full", "none"}.intersection(layout.ways)) for layout in layouts)
    assert extra < len(layouts) / 2
    assert ranks < 8 or extra < len(layouts) / 8


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_few_layouts_of_all_deal_out_state_gradients_or_weights_where_there_are_ranks_to_do_so(ranks):
    layouts = list(all_layouts(ranks))
    everything = {name for layout in layouts for name in (*layout.sizes, *layout.ways)} - OF_MODEL
    for word in ZERO:
        some = [layout for layout in layouts if word in layout.ways]
        assert all({"dp", "cp"}.intersection(layout.sizes) for layout in some)
        assert str(some[0]) == f"dp{ranks},{word}"
        found = set().union(*({*layout.sizes, *layout.ways} - {word} for layout in some))
        assert found == everything if ranks > 3 else found >= {"dp", "cp"}
        assert 1 <= sum(layout.spreads_experts for layout in some) <= 2
        assert len(some) <= len(everything)


def test_zero_does_nothing_where_no_two_ranks_hold_the_same():
    assert parse("tp2,pp2,zero3").flags[-2:] == ("--zero", "3")
    assert str(parse("tp2,pp2,zero3").simple) == "pp2,tp2"
    assert str(parse("tp2,cp2,zero1").simple) == "cp2,tp2,zero1"
    with pytest.raises(ConfigError, match="zero1 and zero2"):
        parse("dp2,zero1,zero2")


def test_a_word_may_be_a_way_of_the_model_on_any_ranks():
    layout = parse("full,tp2,pp2,zb-h1")
    assert str(layout) == "pp2,tp2,zb-h1,full"
    assert layout.flags[-4:] == ("--schedule", "zb-h1", "--recompute", "full")
    assert (parse("full").ranks, parse("full").flags) == (1, ("--recompute", "full"))
    assert parse("tp1,dp2,none").simple == parse("dp2,none")


def test_experts_are_spread_over_a_part_of_dp_and_add_no_ranks():
    layout = parse("tp2,ep2,dp4,sp")
    assert str(layout) == "dp4,ep2,tp2,sp"
    assert layout.flags == ("--dp", "4", "--ep", "2", "--tp", "2", "--sequence-parallel")
    assert layout.ranks == 8
    assert layout.spreads_experts
    assert not parse("dp4,ep1").spreads_experts
    assert parse("dp4,ep1").simple == parse("dp4")
    assert {whole in AXES and axis in AXES for axis, whole in PART_OF.items()} == {True}


def test_what_changes_the_mathematics_is_in_no_list_of_all_but_has_a_word():
    assert {layout.schedule for layout in all_layouts(4)} == {"", *FLUSH}
    assert [word for word, way in WAYS.items() if way.stale] == ["pipedream", "pipedream-2bw"]
    assert parse("pp2,pipedream").is_stale
    assert not parse("pp1,pipedream,dp2").is_stale


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
        ("dp2,ep2", ["dp2"]),
        ("dp4,ep2", ["dp4", "dp2,ep2"]),
        ("dp4,ep4", ["dp4"]),
        ("dp2,ep2,overlap", ["dp2", "dp2,ep2"]),
        ("dp4,ep2,tp2,overlap", ["dp4", "dp2,ep2", "dp2,ep2,overlap", "tp2"]),
        ("dp4,ep2,cp2,rsa", ["dp4", "dp2,ep2", "cp2,rsa"]),
        ("pp2", []),
        ("pp2,gpipe", ["pp2"]),
        ("pp2,tp2,interleaved,v3", ["pp2", "pp2,interleaved,v3", "tp2"]),
        ("full", []),
        ("tp2,full", ["tp2", "full"]),
        ("pp2,zb-h1,none", ["pp2", "pp2,zb-h1", "none"]),
        ("dp2,zero2", ["dp2"]),
        ("dp2,pp2,zero2", ["pp2", "dp2", "dp2,zero2"]),
        ("dp4,ep2,cp2,rsa,zero3", ["dp4", "dp4,zero3", "dp2,ep2", "cp2,rsa", "cp2,rsa,zero3"]),
        ("dp2,tp2,full,zero1", ["dp2", "dp2,zero1", "tp2", "full"]),
    ],
)
def test_the_parts_of_a_layout_are_its_axes_alone_and_never_itself(text, parts):
    assert [str(part) for part in parse(text).parts()] == parts


def test_every_way_is_told_by_ops_of_its_own_or_by_its_schedule():
    named = [(way.axis, op) for way in WAYS.values() for op in way.ops]
    assert len(set(named)) == len(named)
    assert all([bool(way.ops), bool(way.seen), word in SCHEDULES].count(True) == 1 for word, way in WAYS.items())
    assert all(bool(way.seen) != bool(way.axis) for way in WAYS.values())


def test_one_rank_is_a_layout_without_words():
    assert (Layout(()).ranks, Layout(()).flags, Layout(()).sizes) == (1, (), {})
    assert math.prod(Layout(()).sizes.values()) == 1
