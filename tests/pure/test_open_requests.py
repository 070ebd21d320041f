"""Requests that share arrays, and those that a program ends with."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.comm.open_requests import OpenRequests
from mpitrain.errors import CommError


class Message:
    def __init__(self, done: bool = False, error: bool = False) -> None:
        self.done, self.error = done, error

    def test(self) -> bool:
        if self.error:
            raise CommError("told before")
        return self.done


def add(requests: OpenRequests, words: str, reads=None, writes=None, is_send=False, message=None) -> int:
    return requests.add(words, message or Message(), is_send, reads, writes)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"writes": slice(0, 4)}, {"writes": slice(3, 6)}, "writes"),
        ({"reads": slice(0, 4)}, {"writes": slice(3, 6)}, "writes"),
        ({"writes": slice(0, 4)}, {"reads": slice(3, 6)}, "reads"),
        ({"reads": slice(0, 4)}, {"reads": slice(3, 6)}, ""),
        ({"writes": slice(0, 4)}, {"writes": slice(4, 8)}, ""),
        ({"writes": slice(0, 4)}, {"writes": slice(2, 2)}, ""),
        ({"reads": slice(0, 4), "writes": slice(0, 8)}, {"reads": slice(8, 9)}, ""),
    ],
)
def test_two_share_an_array_only_if_neither_writes_it(first, second, what) -> None:
    x = np.zeros(12)
    requests = OpenRequests()
    number = add(requests, "one", **{way: x[part] for way, part in first.items()})
    if what:
        with pytest.raises(
            CommError, match=f"other: it {what} an array that is in flight already.\n  It belongs to one,"
        ):
            add(requests, "other", **{way: x[part] for way, part in second.items()})
    else:
        requests.close(add(requests, "other", **{way: x[part] for way, part in second.items()}))
    requests.close(number)
    add(requests, "other", **{way: x[part] for way, part in second.items()})


def test_the_memory_of_an_open_request_is_nobody_elses() -> None:
    requests = OpenRequests()
    for n in range(50):  # each array is kept, so none gets the place of another
        add(requests, str(n), writes=np.zeros(1000))


def test_what_is_left_at_the_end() -> None:
    requests = OpenRequests()
    assert requests.left_undone(False) is None
    add(requests, "sent", is_send=True, message=Message(done=True))
    add(requests, "failed", message=Message(error=True))
    assert requests.left_undone(True) is None
    add(requests, "lost", is_send=True)
    assert requests.left_undone(False) is None  # somebody may still come for it
    assert str(requests.left_undone(True)) == "the program ends, and nobody has received what was sent:\n  lost"
    for n in range(5):
        add(requests, f"receive {n}", message=Message(done=True))
    said = str(requests.left_undone(False)).splitlines()
    assert said == [
        "the program ends, and nobody has waited for a request:",
        "  receive 0",
        "  receive 1",
        "  receive 2",
        "  and 2 more",
    ]
    requests.clear()
    assert requests.left_undone(True) is None


def test_sends_that_have_arrived_are_forgotten_when_there_are_many() -> None:
    requests = OpenRequests()
    for n in range(3000):
        add(requests, str(n), is_send=True, message=Message(done=True))
    assert len(requests) <= 256
