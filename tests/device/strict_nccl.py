"""`cupy.cuda.nccl` on the stand-in, between processes: as strict as NCCL, and with an answer where that would hang.

Ranks meet in a folder that the communicator's name gives.  Each leaves there what it calls and what it brings, and
reads what the others have left: all must call the same things with the same numbers, in the same order, and nobody may
wait longer than `PATIENCE`.  On asynchronous devices a thread plays the device, which works while its host does not
wait; else a call blocks until its partners are there.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from strict_memory import memory_at
from strict_stream import Work, current, launched, stream_at, timeline

available = True
PATIENCE = 20.0
LATE = 0.002  # seconds that the device lets pass before it begins

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
_DTYPES = dict(enumerate(np.dtype(code) for code in "i1 u1 i4 u4 i8 u8 f2 f4 f8".split()))
_OPS = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum}

_group = threading.local()  # calls of this thread since groupStart


class NcclError(RuntimeError):
    """What NCCL refuses."""


def get_version() -> int:
    return 22803


def get_unique_id() -> bytes:
    return os.urandom(128)


def groupStart() -> None:
    _check(getattr(_group, "calls", None) is None, "a group within a group is not played")
    _group.calls = []


def groupEnd() -> None:
    calls, _group.calls = _group.calls, None
    if not calls:
        return
    comm, ptr = calls[0].comm, calls[0].stream
    _check(all(call.comm is comm and call.stream == ptr for call in calls), "one group on several streams")
    comm._put(ptr, calls)


class _Call:
    """One call: what all must agree on, what this rank brings, and what it does with what the others brought."""

    def __init__(
        self, comm: NcclCommunicator, stream: int, kind: str, facts: tuple[int, ...], to: int = -1, of: int = -1
    ) -> None:
        self.comm, self.stream, self.kind, self.facts, self.to, self.of = comm, stream, kind, facts, to, of
        self.brings: np.ndarray | None = None
        self.into: np.ndarray | None = None
        self.finish: Callable[[list[np.ndarray]], np.ndarray] | None = None
        self.name = ""


class NcclCommunicator:
    """cupy.cuda.nccl.NcclCommunicator"""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: None = None) -> None:
        _check(isinstance(commId, bytes) and len(commId) == 128 and any(commId), "invalid argument: commId")
        _check(0 <= rank < ndev, "invalid argument: rank")
        self._size, self._rank, self._device = ndev, rank, current.device
        name = hashlib.blake2b(commId, digest_size=12).hexdigest()
        self._folder = Path(tempfile.gettempdir()) / f"nccl-{name}"
        self._folder.mkdir(exist_ok=True)
        self._numbers: dict[str, int] = defaultdict(int)
        self._write(f"here.{rank}", b"")
        for other in range(ndev):
            self._read(f"here.{other}", "the making of a communicator")
        atexit.register(self.destroy)  # who goes last takes the folder along

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        call = self._call(stream, "allReduce", (count, datatype, op), sendbuf, recvbuf, count, count, datatype)
        call.finish = lambda brought: _sum(brought, op)
        self._add(call)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        into = count if root == self._rank else 0
        call = self._call(stream, "reduce", (count, datatype, op, root), sendbuf, recvbuf, count, into, datatype)
        call.finish = lambda brought: _sum(brought, op)[:into]
        self._add(call)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        brings = count if root == self._rank else 0
        call = self._call(stream, "broadcast", (count, datatype, root), sendbuff, recvbuff, brings, count, datatype)
        call.finish = lambda brought: brought[root]
        self._add(call)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        whole = recvcount * self._size
        facts = recvcount, datatype, op
        call = self._call(stream, "reduceScatter", facts, sendbuf, recvbuf, whole, recvcount, datatype)
        own = slice(self._rank * recvcount, (self._rank + 1) * recvcount)
        call.finish = lambda brought: _sum(brought, op)[own]
        self._add(call)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        facts = count, datatype
        call = self._call(stream, "allGather", facts, sendbuf, recvbuf, count, count * self._size, datatype)
        call.finish = np.concatenate
        self._add(call)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        call = self._call(stream, "send", (count, datatype), sendbuf, 0, count, 0, datatype)
        call.to = self._other(peer)
        self._add(call)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        call = self._call(stream, "recv", (count, datatype), 0, recvbuf, 0, count, datatype)
        call.of = self._other(peer)
        call.finish = lambda brought: brought[0]
        self._add(call)

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def destroy(self) -> None:
        if not self._folder.exists():
            return
        self._write(f"gone.{self._rank}", b"")
        if all((self._folder / f"gone.{rank}").exists() for rank in range(self._size)):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _other(self, peer: int) -> int:
        _check(0 <= peer < self._size and peer != self._rank, "invalid argument: peer")
        return peer

    def _call(
        self, stream: int, kind: str, facts: tuple[int, ...], send: int, recv: int, brings: int, into: int, kind_of: int
    ) -> _Call:
        _check(kind_of in _DTYPES, "invalid argument: datatype")
        _check(facts[0] > 0, f"{kind} of nothing: the library leaves it out")
        _check(stream_at(stream).device_id == self._device, "the stream is of another device")
        _check(stream_at(stream).is_non_blocking, "the rank's own stream would wait for the partners")
        call = _Call(self, stream, kind, facts)
        dtype = _DTYPES[kind_of]
        call.brings = memory_at(send, brings * dtype.itemsize).view(dtype) if brings else np.empty(0, dtype)
        call.into = memory_at(recv, into * dtype.itemsize).view(dtype) if into else None
        return call

    def _add(self, call: _Call) -> None:
        calls = getattr(_group, "calls", None)
        if calls is not None:
            calls.append(call)
            return
        _check(call.kind not in ("send", "recv") or self._size == 2, "a send outside of a group may wait for ever")
        self._put(call.stream, [call])

    def _put(self, ptr: int, calls: list[_Call]) -> None:
        for call in calls:
            pair = f"{self._rank}-{call.to}" if call.to >= 0 else f"{call.of}-{self._rank}" if call.of >= 0 else "all"
            self._numbers[pair] += 1
            call.name = f"{pair}.{self._numbers[pair]}"
            launched(f"nccl.{call.kind}")
        work = timeline.put(stream_at(ptr), lambda: self._work(calls), is_shared=True)
        if not work.done:
            threading.Thread(target=_play, args=(work,), daemon=True).start()

    def _work(self, calls: list[_Call]) -> None:
        """What the device does: first give, then take, so that no two wait for each other."""
        for call in calls:
            if call.of < 0:
                assert call.brings is not None
                head = np.array([len(call.facts), *call.facts], np.int64).tobytes() + call.kind.encode().ljust(16)
                mine = "" if call.to >= 0 else f".{self._rank}"
                self._write(f"{call.name}{mine}", head + call.brings.tobytes())
        made = [self._taken(call) for call in calls if call.finish is not None]
        for into, value in made:
            if into is not None:
                into[...] = value

    def _taken(self, call: _Call) -> tuple[np.ndarray | None, np.ndarray]:
        names = [call.name] if call.of >= 0 else [f"{call.name}.{rank}" for rank in range(self._size)]
        kind, brought = "send" if call.of >= 0 else call.kind, []
        assert call.brings is not None
        assert call.finish is not None
        for name in names:
            data = self._read(name, f"{call.kind} {call.name}")
            count = int(np.frombuffer(data, np.int64, 1)[0])
            facts = tuple(np.frombuffer(data, np.int64, count, 8).tolist())
            theirs = data[8 * (1 + count) :][:16].decode().strip()
            _check((facts, theirs) == (call.facts, kind), f"{call.kind}{call.facts} meets {theirs}{facts}")
            brought.append(np.frombuffer(data[8 * (1 + count) + 16 :], call.brings.dtype))
        return call.into, call.finish(brought)

    def _write(self, name: str, data: bytes) -> None:
        part = self._folder / f"part.{self._rank}.{threading.get_ident()}"
        part.write_bytes(data)
        part.rename(self._folder / name)

    def _read(self, name: str, why: str) -> bytes:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                _check(time.monotonic() < end, f"{why} on rank {self._rank} of {self._size}: no {name} comes")
                time.sleep(0.0005)


def _play(work: Work) -> None:
    time.sleep(LATE)
    work.finish()


def _sum(brought: list[np.ndarray], op: int) -> np.ndarray:
    total = brought[0]
    for other in brought[1:]:
        total = _OPS[op](total, other)
    return total


def _check(holds: bool, words: str) -> None:
    if not holds:
        raise NcclError(f"NCCL_ERROR_INVALID_USAGE: {words}")
