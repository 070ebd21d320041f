"""The pages of docs/reference/api/, made of the docstrings of what a script may use.

A page is a list of modules, what is reached for most first. It begins with a table of its names. Of each module its
public classes and functions are told, in the order in which the module has them; `ONLY` says where a module has more
than a script needs. What `mpitrain` itself offers must stand somewhere.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple


class Page(NamedTuple):
    """One page: its title, what it is about, and its modules below `mpitrain`."""

    title: str
    about: str
    modules: tuple[str, ...]


PAGES: dict[str, Page] = {
    "autograd": Page(
        "Tensors and the tape",
        "Values that remember how they were made, the list of what was done, and ops of your own"
        " ([write your own layer, op and model](../../tutorials/your-own-layer-op-and-model.md)).",
        ("autograd.tensor", "autograd.tape", "autograd.no_grad", "autograd.function", "autograd.gradcheck"),
    ),
    "ops": Page(
        "Operations",
        "Functions on tensors, `from mpitrain.autograd import ops`; some are methods of `Tensor`, too.",
        ("autograd.ops",),
    ),
    "layers": Page(
        "Layers",
        "The layers that never send, losses, initial values, modules and parameters.",
        (
            "nn.layers",
            "nn.norm",
            "nn.rotary",
            "nn.conv",
            "nn.containers",
            "nn.loss",
            "nn.init",
            "nn.module",
            "nn.parameter",
            "nn.tying",
        ),
    ),
    "parallel": Page(
        "Parallel layers",
        "Layers in which messages stand: on axes of one rank they are the serial ones.",
        (
            "parallel.tensor",
            "parallel.sequence",
            "parallel.grouped",
            "parallel.vocabulary",
            "parallel.context",
            "parallel.expert",
            "parallel.batch_norm",
            "collectives",
        ),
    ),
    "models": Page(
        "Models",
        "Whole models on a mesh, and text from them.",
        (
            "models.gpt",
            "models.llama",
            "models.mlp",
            "models.cnn",
            "models.generate",
            "models.sampling",
            "weights",
            "models.families",
            "models.decoder",
            "models.sizes",
            "models.cache",
        ),
    ),
    "training": Page(
        "Training",
        "The executor, optimizers, schedules, and what sums gradients.",
        (
            "pipeline.executor",
            "optim",
            "pipeline.passes",
            "pipeline.schedules",
            "pipeline.partition",
            "parallel.data",
            "parallel.zero",
            "parallel.powersgd",
        ),
    ),
    "data": Page(
        "Data",
        "Texts, tokens, images, and their order.",
        ("data.corpus", "data.tokens", "data.packing", "data.images", "routing"),
    ),
    "ranks": Page(
        "Ranks and messages",
        "The surrounding world, its mesh of axes, the device of each rank, and a communicator for each axis"
        " ([the verbs](../collectives.md)).",
        ("comm.world", "comm.local", "comm.mesh", "comm.devices", "device", "comm.communicator", "spec"),
    ),
    "looking": Page(
        "Looking at a run",
        "Listeners, traces, recordings and digests, from a script.",
        ("events", "debug.trace.tracing", "debug.recorder", "debug.digests", "debug.states", "debug.compare"),
    ),
    "checkpoints": Page("Checkpoints", "Saving and loading from a script.", ("checkpoint",)),
}

ONLY: dict[str, tuple[str, ...]] = {
    "events": ("listen", "Event"),
    "comm.world": ("World", "world"),
    "debug.recorder": ("record",),
    "debug.states": ("StateChecker",),
    "debug.compare": ("compare",),
    "autograd.tape": ("Tape",),
    "nn.module": ("Module", "Boundary", "mark_recompute"),
    "nn.parameter": ("Parameter",),
}
"""Names of a module that are told, where it has others that a script does not need."""

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes", "Cost", "Source", "Paper")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}): ?(.*)$")
_MARKED = re.compile(r"(`[^`]*`)")
GENERATED = "<!-- made of docstrings by docs/api_reference.py -->\n"


def api_pages() -> dict[str, str]:
    """Path below docs/ -> text, of every page and of their table of contents."""
    texts = {f"reference/api/{name}.md": _page(page) for name, page in PAGES.items()}
    lines = [GENERATED, "# API reference", "", "Made of the docstrings, page by page:", ""]
    for name, page in PAGES.items():
        lines.append(f"- [{page.title}]({name}.md): {page.about[0].lower()}{page.about[1:]}")
    lines += ["", "`from mpitrain import ...` offers", "", "| name | of |", "|---|---|"]
    homes = import_module("mpitrain")._HOMES
    places = {module: name for name, page in PAGES.items() for module in page.modules}
    for public, home in homes.items():
        place = places.get(home) or next(name for module, name in places.items() if module.startswith(f"{home}."))
        lines.append(f"| `{public}` | [{PAGES[place].title}]({place}.md) |")
    texts["reference/api/README.md"] = "\n".join(lines) + "\n"
    return texts


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: its `__all__`, or the public classes and functions that are made in it."""
    short = module.__name__.removeprefix("mpitrain.")
    if short in ONLY:
        return [name for name in ONLY[short] if hasattr(module, name)]
    if hasattr(module, "__all__"):
        names = [
            name
            for name in module.__all__
            if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name))
        ]
        return names
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def _page(page: Page) -> str:
    modules = [import_module(f"mpitrain.{short}") for short in page.modules]
    lines = [GENERATED, f"# {page.title}", "", page.about, "", *_names(page, modules), ""]
    for short, module in zip(page.modules, modules, strict=True):
        text = inspect.getdoc(module) or ""
        lines += [f"## mpitrain.{short}", "", _escaped(" ".join(text.split("\n\n")[0].split())), ""]
        for name in public_names(module):
            lines += _entry(name, getattr(module, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _names(page: Page, modules: list[ModuleType]) -> Iterator[str]:
    """The table at the top of a page: each name, and the first sentence that is said of it."""
    yield "| name | what it is |"
    yield "|---|---|"
    seen = Counter([_anchor(page.title)])
    for short, module in zip(page.modules, modules, strict=True):
        seen[_anchor(f"mpitrain.{short}")] += 1
        for name in public_names(module):
            anchor = _anchor(name)
            place = f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
            seen[anchor] += 1
            yield f"| [`{name}`](#{place}) | {_first(inspect.getdoc(getattr(module, name)) or '')} |"


def _anchor(heading: str) -> str:
    """Where a link to a heading leads; a second heading of that kind has -1 behind it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _first(text: str) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    sentence = re.split(r"(?<=[.?!])\s|:\n", " ".join(text.split("\n\n")[0].split(" ")), maxsplit=1)[0]
    return _escaped(" ".join(sentence.split())).replace("`|`", "`\\|`")


def _entry(name: str, value: Any) -> Iterator[str]:
    is_class = inspect.isclass(value)
    yield f"### {name}"
    yield ""
    yield f"```text\n{'class ' if is_class else ''}{name}{_signature(value)}\n```"
    yield ""
    yield from _prose(inspect.getdoc(value) or "")
    if not is_class:
        return
    for method, member in vars(value).items():
        function = (
            member.fget
            if isinstance(member, property)
            else inspect.unwrap(getattr(member, "__func__", member))
            if callable(getattr(member, "__func__", member))
            else None
        )
        if (
            method.startswith("_")
            or function is None
            or not getattr(member, "__doc__", None)
            or inspect.isclass(member)
        ):
            continue
        if not inspect.isfunction(function):
            continue
        arguments = "" if isinstance(member, property) else _signature(function, method=True)
        yield f"**`{name}.{method}{arguments}`**"
        yield ""
        yield from _prose(inspect.cleandoc(member.__doc__ or ""))


def _signature(value: Any, method: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    if method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = [_default(p) for p in parameters]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


def _default(p: inspect.Parameter) -> inspect.Parameter:
    """Without addresses of objects, which are others in every process."""
    if p.default is p.empty or not re.search(r" at 0x|<", repr(p.default)):
        return p
    return p.replace(default=_Word(getattr(p.default, "__name__", "...")))


class _Word:
    def __init__(self, word: str) -> None:
        self.word = word

    def __repr__(self) -> str:
        return self.word


def _prose(text: str) -> Iterator[str]:
    """A docstring as Markdown: sections become bold words and lists, what is indented stays as it stands."""
    section = ""
    in_block = False
    for line in text.split("\n"):
        found = _SECTION.match(line)
        if found:
            if in_block:
                yield "```"
            section, in_block = found[1], False
            yield ""
            yield f"*{section}:* {_escaped(found[2])}".rstrip()
            if section not in ("Cost", "Source", "Paper", "Returns"):
                yield ""
        elif section in ("Args", "Raises", "Attributes") and re.match(r"^    [^ ]", line):
            what, colon, rest = line.strip().partition(": ")
            yield f"- `{what}`: {_escaped(rest)}" if colon else f"- {_escaped(line.strip())}"
        elif section and line.startswith("    "):
            yield f"  {_escaped(line.strip())}"
        elif line.startswith("    "):
            if not in_block:
                yield "```text"
                in_block = True
            yield line[4:]
        else:
            if in_block and line:
                yield "```"
                yield ""
                in_block = False
            if in_block:
                yield ""
                continue
            if line and not line.startswith(" "):
                section = ""
            yield _escaped(line)
    if in_block:
        yield "```"
    yield ""


def _escaped(text: str) -> str:
    """Signs that Markdown would take for its own, outside of code."""
    parts = _MARKED.split(text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|\[\]])", r"\\\1", part) for part in parts)
