"""Threads that call MPI beside the rank's own make its device theirs before, once each."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.comm.in_flight import InFlight
from mpitrain.comm.lifeline import Lifeline


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_device_is_used_once_in_each_thread() -> None:
    flight, used = InFlight(ModuleType("mpi")), []
    in_thread(flight.enter)
    flight.use_device = lambda: used.append(threading.get_ident())
    in_thread(lambda: [flight.enter() for _ in range(3)])
    in_thread(flight.enter)
    assert len(used) == 2


def test_the_thread_that_drives_messages_has_the_device_before_it_looks() -> None:
    seen: list[str] = []
    flight = InFlight(SimpleNamespace(ANY_SOURCE=-1, ANY_TAG=-1))  # type: ignore[arg-type]
    looked = threading.Event()

    def probe(*args: Any) -> None:
        seen.append("look")
        looked.set()

    flight.use_device = lambda: seen.append("use")
    flight.drive(SimpleNamespace(Iprobe=probe))
    flight.add(object())  # type: ignore[arg-type]
    assert looked.wait(5)
    flight.stop()
    assert seen[:2] == ["use", "look"]
    assert seen.count("use") == 1


def test_the_look_has_the_device_before_it_listens() -> None:
    said: list[str] = []
    comm = SimpleNamespace(Iprobe=lambda *args: said.append("look"))
    mpi: Any = SimpleNamespace(Status=object, ANY_SOURCE=-1, INT64_T=np.int64)
    lifeline = Lifeline(
        comm,
        mpi,
        can_listen=True,
        keeps_codes=True,
        before_end=lambda: None,
        before_look=lambda: said.append("use"),
    )
    assert lifeline.hear() == []
    assert said == ["use", "look"]
