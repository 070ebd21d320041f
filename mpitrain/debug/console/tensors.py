"""A parameter by name on all ranks: its weights, its master, its gradient, and what the optimizer keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from mpitrain.backend import Array
from mpitrain.debug.console.asked import near
from mpitrain.debug.console.found import Found, group_of, of_spec, part_text, states_text
from mpitrain.debug.console.gradients import ADDING, USED
from mpitrain.debug.console.watch import Watch
from mpitrain.errors import ConsoleError
from mpitrain.nn.parameter import Parameter
from mpitrain.nn.share import Share, is_absent
from mpitrain.spec import ATOMIC_AXES, MERGED_AXES, REPLICATE, dual

WEIGHT, GRAD, MASTER, MOMENTS = "", "grad", "master", "moments"
NOT_HERE = "of another stage"


def names(views: Sequence[Watch]) -> list[str]:
    """The names of all parameters of all ranks, in the order of the first rank that has each."""
    return list(dict.fromkeys(name for view in views for name in view.parameters))


def kinds(views: Sequence[Watch]) -> list[str]:
    """What can follow a parameter's name behind a point."""
    return [GRAD, MASTER, MOMENTS, *dict.fromkeys(kind for view in views for kind in view.moments)]


def split(views: Sequence[Watch], word: str) -> tuple[str, str] | None:
    """A word as (name, what of it); None where it names no parameter.

    The end of a name is enough where only one has it: `up.weight`.

    Raises:
        ConsoleError: several parameters have it, or there is nothing of that kind.
    """
    known = names(views)
    name, kind = word, WEIGHT
    for end in [each for each in kinds(views) if word.endswith(f".{each}")]:
        name, kind = word.removesuffix(f".{end}"), end
    meant = [each for each in known if each == name] or [each for each in known if each.endswith(f".{name}")]
    if len(meant) > 1:
        shown = f"{', '.join(meant[:4])}{', ...' * (len(meant) > 4)}"
        raise ConsoleError(f"{name} is the end of {len(meant)} names: {shown}")
    if not meant:
        owner = next((each for each in known if word.startswith(f"{each}.")), None)
        if owner is None:
            return None
        raise ConsoleError(f"{owner} has no {word.removeprefix(owner + '.')}; it has {', '.join(kinds(views))}")
    return meant[0], kind


def one(views: Sequence[Watch], word: str) -> str:
    """The one parameter that a word names.

    Raises:
        ConsoleError: none, or several.
    """
    found = split(views, word)
    if found is None or found[1]:
        known = names(views)
        more = f"; near: {close}" if (close := near(word, known)) else "" if known else "; no model has run yet"
        raise ConsoleError(f"no parameter {word!r}{more}")
    return found[0]


def matching(views: Sequence[Watch], pattern: str) -> list[tuple[str, str]]:
    """The parameters that a pattern with * and ? means, each with what of it is meant.

    Raises:
        ConsoleError: none.
    """
    kind = next((each for each in kinds(views) if pattern.endswith(f".{each}")), WEIGHT)
    plain = pattern.removesuffix(f".{kind}") if kind else pattern
    known = names(views)
    if not known:
        raise ConsoleError("there are no parameters yet: no model has run; go on to the first action (next action)")
    found = [name for name in known if fnmatchcase(name, plain)]
    if not found:
        raise ConsoleError(f"no parameter is like {plain!r}; all of them: show *")
    return [(name, kind) for name in found]


def find(views: Sequence[Watch], name: str, kind: str) -> list[tuple[str, list[Found]]]:
    """A parameter, or what there is of it, on every rank: (title, what each rank has) of each tensor.

    Args:
        views: of the ranks.
        name: of the parameter.
        kind: WEIGHT, GRAD, MASTER, MOMENTS, or the name of one of the moments.
    """
    if kind == MOMENTS:
        found = dict.fromkeys(each for view in views for each, of in view.moments.items() if name in of)
        if not found:
            raise ConsoleError(f"no optimizer keeps anything of {name}, or none has run yet")
        return [(f"{name}.{each}", [_moment(view, name, each) for view in views]) for each in found]
    if kind == GRAD:
        return [(f"{name}.{kind}", [_gradient(view, name) for view in views])]
    if kind == MASTER:
        return [(f"{name}.{kind}", [_master(view, name) for view in views])]
    if kind == WEIGHT:
        return [(name, [_weight(view, name) for view in views])]
    return [(f"{name}.{kind}", [_moment(view, name, kind) for view in views])]


def _weight(view: Watch, name: str) -> Found:
    p = view.parameters.get(name)
    if p is None:
        return Found(view.rank, None, NOT_HERE)
    note = ""
    if is_absent(p.data):  # rows of it are here, and the whole only while its part works
        note, p = "whole while its part works", view.shares[name]
    return _held(view, p, p.data, _apart(view), note)


def _master(view: Watch, name: str) -> Found:
    p = view.shares.get(name)
    if p is None:
        return Found(view.rank, None, NOT_HERE)
    own = p.frozen or p.master is p.data
    return _held(view, p, p.master, _apart(view), "the weights themselves" if own else "")


def _apart(view: Watch) -> tuple[str, ...]:
    """Axes along which weights may differ just now: workers learn apart."""
    reducer = None if view.executor is None else view.executor.reducer
    return () if reducer is None or reducer.at_rest else reducer.apart


def _held(view: Watch, p: Parameter, array: Array, apart: Sequence[str], note: str) -> Found:
    """Weights of any kind: they change with each update, so that is when they are compared."""
    stashes = view.executor is not None and view.executor.versions is not None
    moment: object = (view.updates, p.version) if stashes else view.updates if view.updates >= 0 else p.version
    if view.in_update:
        moment = view.rank, view.updates  # of no other rank
    when = f"version {p.version}" if stashes or view.updates < 0 else _updates(view)
    return _found(view, p, array, apart, moment, when, note, states_text(view.mesh, of_spec(view.mesh, p.spec)))


def _updates(view: Watch) -> str:
    if view.in_update:
        return f"in the middle of update {view.updates}"
    return f"after {view.updates} update{'s' * (view.updates != 1)}"


def _found(
    view: Watch, p: Parameter, array: Array, apart: Sequence[str], moment: object, when: str, note: str, state: str
) -> Found:
    part = part_text(p.rectangle, p.full_shape)
    here, why = _seen(array)
    group = group_of(view.mesh, p.rectangle, p.spec, apart)
    return Found(view.rank, here, why, p.full_shape, part, state, group, moment, when, note)


def _seen(array: Array | None) -> tuple[Array | None, str]:
    """An array that can be looked at, or why not."""
    if array is None:
        return None, "sent already, or not made yet"
    return (None, "lives in the store") if hasattr(array, "here") else (array, "")


def _gradient(view: Watch, name: str) -> Found:
    p, share = view.parameters.get(name), view.shares.get(name)
    if p is None or share is None:
        return Found(view.rank, None, NOT_HERE)
    if p.frozen:
        return Found(view.rank, None, "none: it is frozen", p.full_shape)
    is_rows = isinstance(share, Share) and (p.grad is None or _past(view))
    held = share if is_rows else p
    if not held.touched:
        state = states_text(view.mesh, of_spec(view.mesh, held.spec))
        return Found(view.rank, None, "none in this step yet", p.full_shape, state=state)
    progress = view.gradients
    summed = {atom for axis in progress.summed_over(p) for atom in _atoms(axis)} & set(p.spec.replicate_axes())
    reducer = None if view.executor is None else view.executor.reducer
    if _past(view) or is_rows:
        summed = set(p.spec.replicate_axes()) - set(() if reducer is None else reducer.apart)
    states = {}
    for axis, state in of_spec(view.mesh, held.spec).items():
        is_own = axis in p.spec.replicate_axes() and state.dim is None
        states[axis] = state if not is_own else "summed" if axis in summed else dual(state)
    apart = [axis for axis in p.spec.replicate_axes() if axis not in summed]
    if p.spec.tied and not _past(view):  # the two ends are summed last
        apart.append("pp")
        states["pp"] = dual(REPLICATE)
    adds = 0 if _past(view) or summed else progress.adds(p)
    moment = view.step, progress.state, bool(summed), adds
    when = f"step {view.step}, {_how_far(view, adds, bool(summed))}"
    return _found(view, held, held.grad, apart, moment, when, "", states_text(view.mesh, states))


def _past(view: Watch) -> bool:
    return view.executor is not None and view.gradients.state != ADDING


def _how_far(view: Watch, adds: int, summed: bool) -> str:
    if _past(view):
        return "as it was used" if view.gradients.state == USED else "summed"
    return "summed" if summed else f"{adds} time{'s' * (adds != 1)} added to"


def _atoms(axis: str) -> list[str]:
    if axis == "world":
        return list(ATOMIC_AXES)
    return [atom for part in axis.split("+") for atom in MERGED_AXES.get(part, (part,))]


def _moment(view: Watch, name: str, kind: str) -> Found:
    tensor = view.moments.get(kind, {}).get(name)
    if tensor is None:
        return Found(view.rank, None, NOT_HERE if name not in view.parameters else "other ranks keep it")
    here, why = _seen(tensor.array)
    apart = view.executor.reducer.apart
    group = group_of(view.mesh, tensor.rectangle, tensor.spec, apart)
    state = states_text(view.mesh, of_spec(view.mesh, tensor.spec))
    part = part_text(tensor.rectangle, tensor.full_shape)
    moment = (view.rank, view.updates) if view.in_update else view.updates
    return Found(view.rank, here, why, tensor.full_shape, part, state, group, moment, _updates(view))
