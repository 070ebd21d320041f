"""Work that nobody will go back through: nothing inside is recorded.

    with no_grad():
        scores = model.logits(tokens)                # no tape grows, whatever records outside

    @no_grad
    def accuracy(model, batch): ...

What is made inside is a constant for whoever uses it outside: it wants no gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, overload

from mpitrain.autograd.tape import TAPE, Tape
from mpitrain.errors import GraphError

P = ParamSpec("P")
R = TypeVar("R")

_OUTSIDE: ContextVar[tuple[Tape | None, ...]] = ContextVar("mpitrain.outside", default=())
"""The tapes that recorded before each `no_grad` that one is in, one tuple a rank: so an object of it can be shared."""


class NoGrad:
    """What `no_grad()` gives: a context manager and a decorator, which may be used again, also within itself."""

    __slots__ = ()

    def __enter__(self) -> None:
        _OUTSIDE.set((*_OUTSIDE.get(), TAPE.get()))
        TAPE.set(None)

    def __exit__(self, *_: object) -> None:
        *others, before = _OUTSIDE.get()
        TAPE.set(before)
        _OUTSIDE.set(tuple(others))

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """A function whose calls record nothing.

        Raises:
            GraphError: it is a generator or a coroutine, whose body runs after its call.
        """
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise GraphError(
                f"no_grad around {fn.__name__}: the body of a generator or coroutine runs when its call is over.\n"
                "Put `with no_grad():` inside of it, around what must not be recorded."
            )

        @functools.wraps(fn)
        def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return quiet


@overload
def no_grad() -> NoGrad: ...
@overload
def no_grad(fn: Callable[P, R], /) -> Callable[P, R]: ...
def no_grad(fn: Any = None, /) -> Any:
    """Have nothing recorded, inside of a `with` or in the calls of a function that it decorates.

    Args:
        fn: a function, whose calls record nothing from now on.

    Returns:
        A context manager that is a decorator too; with a function, that function made quiet.
    """
    return NoGrad() if fn is None else NoGrad()(fn)
