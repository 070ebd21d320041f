"""A module as a tree: its parts, their parameters, how these are cut, and what is tied or frozen.

    GPT gpt: 42,880 parameters, 21,920 of them frozen
      table       VocabularyEmbedding  weight (256, 32) [tp: Shard(0); frozen]
      blocks.0-3  4 x Block
        norm1      LayerNorm  weight (32,), bias (32,)

Parts that stand in a list and are alike are told once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.nn.buffer import Buffer
from mpitrain.nn.parameter import Parameter

if TYPE_CHECKING:
    from mpitrain.nn.module import Module

INDENT = "  "


class _Part(NamedTuple):
    """One part, or several that are alike: what it is called, what it is, and the lines of its own parts."""

    names: tuple[str, ...]
    kind: str
    about: str
    lines: tuple[str, ...]


def tree(module: Module) -> str:
    """The text; a part that stands in several places is told where it is met first."""
    parameters = module.parameters()
    count = module.num_parameters
    fixed = sum(_size(p) for p in parameters if p.frozen)
    here = sum(p.data.size if p.is_laid else 0 for p in parameters) if any(p.is_laid for p in parameters) else count
    head = f"{type(module).__name__} {module.name}".rstrip()
    facts = [f"{count:,} parameters", f"{here:,} elements here" * (here != count), f"{fixed:,} frozen" * (fixed > 0)]
    if module.num_stages > 1:
        facts.append(f"stages {' '.join(map(str, module.stages))} of {module.num_stages}")
    met: dict[int, str] = {}
    own = _own(module, met)
    lines = [f"{head}: {', '.join(filter(None, facts))}", *([INDENT + own] if own else [])]
    return "\n".join([*lines, *_below(module, met)])


def _below(module: Module, met: dict[int, str]) -> Iterator[str]:
    """Lines of the parts of a module."""
    parts: list[_Part] = []
    for name, child in _children(module):
        if id(child) in met:
            parts.append(_Part((name,), type(child).__name__, f"the same as {met[id(child)]}", ()))
            continue
        met[id(child)] = child.name or name
        part = _Part((name,), type(child).__name__, _own(child, met), tuple(_below(child, met)))
        before = parts[-1] if parts else None
        if before is not None and "." in name and part[1:] == before[1:]:
            parts[-1] = before._replace(names=(*before.names, name))
        else:
            parts.append(part)
    titles = [_title(part.names) for part in parts]
    width = max(map(len, titles), default=0)
    for title, part in zip(titles, parts, strict=True):
        many = f"{len(part.names)} x " if len(part.names) > 1 else ""
        yield f"{INDENT}{title:{width}}  {many}{part.kind}  {part.about}".rstrip()
        yield from (INDENT + line for line in part.lines)


def _children(module: Module) -> Iterator[tuple[str, Any]]:
    """Direct parts, by what they are called in it."""
    from mpitrain.nn.module import Module

    listed = module.holds_a_list
    for attribute, value in vars(module).items():
        if isinstance(value, Module):
            yield attribute, value
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                if isinstance(item, Module):
                    of_its_name = item.name.rpartition(".")[2]  # a stage holds some of the blocks alone
                    place = of_its_name if of_its_name.isdigit() else str(number)
                    yield (f".{place}" if listed else f"{attribute}.{place}"), item


def _title(names: tuple[str, ...]) -> str:
    """`blocks.0-3` of blocks that are alike."""
    if len(names) == 1:
        return names[0].removeprefix(".")
    first, last = names[0], names[-1].rpartition(".")[2]
    return f"{first}-{last}".removeprefix(".")


def _own(module: Module, met: dict[int, str]) -> str:
    """What a module is, and its parameters."""
    told = []
    for attribute, value in vars(module).items():
        if isinstance(value, Parameter):
            told.append(f"{attribute} is {met[id(value)]}" if id(value) in met else _parameter(attribute, value))
            met.setdefault(id(value), value.name)
        elif isinstance(value, Buffer):
            told.append(f"{attribute} {tuple(value.full_shape)} [kept]")
    about = module.about()
    again = "made again in backward" if module.recompute else ""
    return ", ".join(filter(None, (about, again, *told)))


def _parameter(attribute: str, p: Parameter) -> str:
    spec = repr(p.spec).removeprefix("Spec(").removesuffix(")")
    here = f"here {tuple(p.data.shape)}" if p.is_laid and p.data.shape != p.full_shape else ""
    notes = "; ".join(filter(None, (spec, here, "frozen" * p.frozen)))
    return f"{attribute} {p.full_shape}" + (f" [{notes}]" if notes else "")


def _size(p: Parameter) -> int:
    count = 1
    for length in p.full_shape:
        count *= length
    return count
