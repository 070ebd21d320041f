"""What stands where an array will be, until a model is given its memory.

An empty array would meet the shapes of others somewhere, and the message would be about those.
"""

from __future__ import annotations

from typing import Any, NoReturn

from mpitrain.errors import ConfigError


class NoValues:
    """In the place of the array of a parameter or a buffer: whoever asks anything of it is told what is missing.

    Args:
        name: of the parameter or buffer.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):  # Python asks whether it can be copied, and such things
            raise AttributeError(attribute)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{self._name} has no values yet.\n"
            "Call self.materialize(mesh) at the end of __init__ of the outermost module, once all of its parts are"
            " there: it gives memory to all parameters and buffers of them."
        )

    __array__ = __array_ufunc__ = __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = _refuse

    def __repr__(self) -> str:
        return f"NoValues({self._name})"
