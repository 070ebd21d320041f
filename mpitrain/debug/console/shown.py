"""`show`: a value on all ranks, its state on each axis, and where ranks differ that should hold the same.

    blocks.0.mlp.up.weight  (24, 96) float64   dp Replicate, tp Shard(1)   after 3 updates

    ranks  part           shape         min     max     mean   norm
    0,2    [:, 0:48]   (24, 48)     -0.0612  0.0598  0.00012  1.023
    1      [:, 48:96]  (24, 48)      -0.059  0.0607  0.00034  1.041
    3      [:, 48:96]  (24, 48)      -0.059   1.061  0.00121  1.475
    ! rank 3 differs from rank 1 in 1 of 1,152 elements, first at [3, 17]: 1.06125 against 0.0612, |d| 1

Ranks that hold the same bits share a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from mpitrain.backend import Array
from mpitrain.comm.places import listed, named
from mpitrain.debug.columns import aligned
from mpitrain.debug.console import current, tensors
from mpitrain.debug.console.apart import Alike, agreements, classes, differences, elsewhere
from mpitrain.debug.console.asked import Asked, near, parse
from mpitrain.debug.console.found import Found
from mpitrain.debug.console.numbers import cut, elements, short, summary
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError

HELP_SHOW = """\
show NAME[SLICE]      a value on all ranks, its states, and where ranks differ that should not
  NAME is a parameter (the end of its name is enough), or NAME.grad, NAME.master, NAME.moments,
  NAME.first_moment; with * a list of them: show *.bias.grad
  input, output, grad, input_grad (input.1 of several): of the op, message or action that ranks
  are in, or that ended last;  %7: a value of the tape;  batch, batch.targets: the micro-batch.
  Indexes count in what a rank holds: show up.weight[0:2, -1].  Ranks that hold the same bits
  share a line.  Ranks are compared where their states say that they hold the same, and at the
  same moment only: weights after as many updates, gradients as far summed."""

HELP_KEEP = """\
keep [on | off]      keep the values of tapes from now on, so that show %7 finds each of them
  Without it a value is gone as soon as nobody needs it, as in any run.  It takes the memory of
  all that ops make, until their tape goes; memory tells that it is kept."""

SHORTEST = 8
"""Columns to which words of a table are shortened at most."""
INLINE = 8
"""Elements up to which they are shown without being asked for."""


def names(views: Sequence[Watch]) -> list[str]:
    """What can be shown by name just now, for completion."""
    return [*tensors.names(views), *current.WORDS]


def keep(views: Sequence[Watch], words: str, focus: int = 0, width: int = 100) -> str:
    """Switch on or off that values of tapes are kept; see `HELP_KEEP`.

    Args:
        views: of the ranks.
        words: "on", "off", or nothing, which only asks.
        focus: the rank that the prompt is about.
        width: columns of the terminal.

    Raises:
        ConsoleError: it is neither on nor off.
    """
    if words.strip() not in ("", "on", "off"):
        raise ConsoleError(f"keep {words.strip()!r}: it is keep on, or keep off")
    for view in views:
        view.slots.keep = words.strip() == "on" if words.strip() else view.slots.keep
    kept = any(view.slots.keep for view in views)
    return "values of tapes are kept from now on" if kept else "values of tapes go when nobody needs them"


def show(views: Sequence[Watch], words: str, focus: int, width: int = 100) -> str:
    """A value on all ranks.

    Args:
        views: of the ranks.
        words: what to show, see `HELP_SHOW`.
        focus: the rank that the prompt is about.
        width: columns of the terminal.

    Raises:
        ConsoleError: there is no such value.
    """
    asked = parse(words)
    if "*" in asked.name or "?" in asked.name:
        return _list(views, asked.name, width)
    found = _find(views, asked.name)
    return "\n\n".join(_shown(title, each, asked, width) for title, each in found)


def _find(views: Sequence[Watch], name: str) -> list[tuple[str, list[Found]]]:
    if current.is_current(name):
        return current.find(views, name)
    meant = tensors.split(views, name)
    if meant is not None:
        return tensors.find(views, *meant)
    known = names(views)
    close = near(name, known)
    if not tensors.names(views):
        raise ConsoleError(f"there is no {name!r} yet: no model has run; go on to the first action (next action)")
    raise ConsoleError(f"no parameter {name!r}" + (f"; near: {close}" if close else "; all of them: show *"))


def _shown(title: str, found: Sequence[Found], asked: Asked, width: int) -> str:
    """One value."""
    parts = [each._replace(array=_part(each, asked)) for each in found]
    seen = [each for each in parts if each.array is not None]
    alike = classes(parts)
    head = _head(title + asked.text, found, seen)
    lines = [*wrapped(head, width, "    "), "", *_table(alike, seen, width)]
    bad = [each for each in alike if each.found.array is not None and summary(each.found.array).bad]
    for each in bad:
        lines += wrapped(f"! {_not_finite(each)}", width)
    for text in differences(parts):
        lines += wrapped(f"! {text}", width)
    if title.startswith("batch.") and differences(parts):
        lines += wrapped(
            "! these ranks work on one micro-batch together, and were given other rows of the batch", width
        )
    for text in elsewhere(parts):
        lines += wrapped(text, width)
    if not differences(parts) and (groups := agreements(parts)):
        lines += wrapped(f"the same on {_and(groups)}, as it should be", width)
    if asked.part is not None or (seen and all(each.array is not None and each.array.size <= INLINE for each in seen)):
        for each in alike:
            if each.found.array is not None:
                lines += ["", f"{named(each.ranks)}:", *elements(each.found.array, width).splitlines()]
    return "\n".join(line.rstrip() for line in lines)


def _part(found: Found, asked: Asked) -> Array | None:
    return None if found.array is None else asked.of(found.array)


def _head(title: str, found: Sequence[Found], seen: Sequence[Found]) -> str:
    """What holds of all ranks."""
    parts = [title]
    full = next((each.full for each in found if each.full), ())
    dtypes = {str(each.array.dtype) for each in seen if each.array is not None}
    kind = " ".join([str(full)] * bool(full) + sorted(dtypes))
    for of in (kind, _common(found, "state"), _common(found, "when"), _common(found, "note")):
        parts += [of] if of else []
    return "   ".join(parts)


def _common(found: Sequence[Found], field: str) -> str:
    """A field that all ranks have alike; "" where it differs."""
    values = {text for each in found if (text := getattr(each, field)) or each.array is not None}
    return values.pop() if len(values) == 1 else ""


def _table(alike: Sequence[Alike], seen: Sequence[Found], width: int) -> list[str]:
    """A line for each class of ranks."""
    own = [
        field
        for field in ("part", "state", "when", "note")
        if len({getattr(e.found, field) for e in alike if e.found.array is not None}) > 1
    ]
    own = ["part"] * ("part" not in own and any(each.found.part for each in alike)) + own
    rows = [["ranks", *({"part": "part", "state": "states", "when": "when", "note": ""}[f] for f in own)]]
    rows[0] += ["shape", "min", "max", "mean", "norm"]
    for each in alike:
        found = each.found
        if found.array is None:
            rows.append([listed(each.ranks), found.why])
            continue
        s = summary(found.array)
        numbers = [short(x) for x in (s.least, s.largest, s.mean, s.norm)] if found.array.size else ["-"] * 4
        rows.append([listed(each.ranks), *(getattr(found, f) for f in own), str(tuple(found.array.shape)), *numbers])
    whys = [row for row in rows if len(row) == 2 and row is not rows[0]]
    _fit([row for row in rows if row not in whys], range(1, len(own) + 1), width)
    table = aligned([row for row in rows if row not in whys], words=range(len(own) + 2)).splitlines() if seen else []
    return [*table, *(f"{'rank' if ',' not in ranks else 'ranks'} {ranks}: {why}" for ranks, why in whys)]


def _fit(rows: Sequence[list[str]], words: Sequence[int], width: int) -> None:
    """Shorten the longest of these columns until a table is no wider than that."""
    while words:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        over = sum(widths) + 2 * (len(widths) - 1) - width
        longest = max(words, key=widths.__getitem__)
        if over <= 0 or widths[longest] <= SHORTEST:
            return
        for row in rows:
            row[longest] = cut(row[longest], max(widths[longest] - over, SHORTEST))


def _not_finite(alike: Alike) -> str:
    array = alike.found.array
    assert array is not None
    s = summary(array)
    verb = "holds" if len(alike.ranks) == 1 else "hold"
    where = f", first at {list(s.first_bad)}" if s.first_bad else ""
    return f"{named(alike.ranks)} {verb} {s.bad:,} of {array.size:,} elements that are not finite{where}"


def _list(views: Sequence[Watch], pattern: str, width: int) -> str:
    """Parameters, a line each."""
    rows = [["parameter", "shape", "states", "norm by rank", ""]]
    odd = 0
    for name, kind in tensors.matching(views, pattern):
        for title, found in tensors.find(views, name, kind):
            trouble = differences(found)
            odd += bool(trouble)
            alike = [each for each in classes(found) if each.found.array is not None]
            norms = list(dict.fromkeys(short(summary(each.found.array).norm) for each in alike))
            bad = sum(summary(each.found.array).bad for each in alike)
            mark = "! differs" if trouble else "! not finite" if bad else ""
            state = next((each.state for each in found if each.state), "")
            full = next((each.full for each in found if each.full), ())
            many = norms if len(norms) <= 3 else [*norms[:2], "..."]
            rows.append([title, str(full), state, " ".join(many), mark])
    lines = aligned(rows, words=range(5)).splitlines()
    return "\n".join(_marked(line, width) for line in lines) + (
        f"\n! {odd} of {len(rows) - 1} differ between ranks that should hold the same" if odd else ""
    )


def _marked(line: str, width: int) -> str:
    """A line with its mark in front."""
    text, mark, what = line.partition("! ")
    return f"! {text.rstrip()}  {what}" if mark else f"  {line}"[:width]


def wrapped(text: str, width: int, indent: str = "    ") -> list[str]:
    """Lines of at most so many columns."""
    return wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True) or [""]


def _and(groups: Sequence[tuple[int, ...]]) -> str:
    texts = [named(ranks) for ranks in groups]
    if len(texts) > 6:
        texts = [*texts[:5], f"{len(texts) - 5} more groups"]
    return " and on ".join([", on ".join(texts[:-1])] * bool(texts[:-1]) + texts[-1:])
