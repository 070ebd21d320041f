"""Changes of bytes and of JSON values, as a fuzzer and as an attacker makes them."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    31,
    32,
    64,
    127,
    128,
    255,
    256,
    1 << 15,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 62,
]
NUMBERS += [(1 << bits) - 1 for bits in (8, 16, 31, 32, 63, 64)]
TEXTS = [
    "",
    ".",
    "..",
    "/",
    "../x",
    "/etc/passwd",
    "x",
    "weight/x",
    "rank-00000.h5",
    "\x1b[2J",
    "\0",
    "\u0445",
    "x" * 2000,
    "float32",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e308,
    1 << 62,
    10**30,
    -(10**400),
    *TEXTS,
    [],
    {},
    [[]],
    [0] * 40,
]


def mangled(draw: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """Bytes with a few changes; `other` gives pieces."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        if not changed:
            changed = bytearray(other[:1])
        at = draw.randrange(len(changed) or 1)
        match draw.randrange(8):
            case 0:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << draw.randrange(8)]) if changed else b""
            case 1:
                changed[at : at + 1] = draw.randbytes(1)
            case 2:
                width = draw.choice((1, 2, 4, 8))
                changed[at : at + width] = (draw.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
            case 3:
                length = draw.choice((1, 4, 16, 200))
                changed[at : at + length] = bytes([draw.choice((0, 255, 32, 48))]) * length
            case 4:
                del changed[at : at + draw.choice((1, 2, 8, 100))]
            case 5:
                changed[at:at] = draw.randbytes(draw.choice((1, 2, 8, 100)))
            case 6:
                start = draw.randrange(len(other) or 1)
                changed[at : at + 64] = other[start : start + 64]
            case 7 if draw.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


def changed(draw: random.Random, value: Any) -> Any:
    """A JSON value with a few changes: of a value, a key, or the order."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        found = places(value)
        if not found:
            return draw.choice(VALUES)
        container, key = draw.choice(found)
        match draw.randrange(7):
            case 0:
                container[key] = copy.deepcopy(draw.choice(VALUES))
            case 1:
                del container[key]
            case 2 if isinstance(container, dict):
                container[draw.choice(TEXTS)] = container.pop(key)
            case 3 if isinstance(container, list):
                container.insert(key, copy.deepcopy(draw.choice(container)))
            case 4:
                container[key] = copy.deepcopy(draw.choice([inner[at] for inner, at in found]))
            case 5 if type(container[key]) is int:
                container[key] += draw.choice((1, -1, 2, -2, 1 << 32))
            case _:
                container[key] = draw.choice(NUMBERS)
    return value
