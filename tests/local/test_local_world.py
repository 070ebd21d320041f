"""Ranks as threads: turns, reports, failures, scripts."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from delay import delayed

from mpitrain.comm.local import LocalWorld, run_script
from mpitrain.comm.world import world
from mpitrain.errors import CollectiveMismatch, CommError, LaunchError, MeshError, UserError
from mpitrain.events import Event, listen

HERE = Path(__file__).name


def test_results_come_back_in_rank_order() -> None:
    assert LocalWorld(4).run(lambda a, b: (world().rank, a + b), 1, 2) == [(rank, 3) for rank in range(4)]


def test_the_world_of_a_rank_is_its_own_and_the_same_each_time() -> None:
    def main() -> tuple[int, int, str, bool]:
        return world().rank, world().size, world().kind, world() is world()

    assert LocalWorld(3).run(main) == [(rank, 3, "local", True) for rank in range(3)]
    assert LocalWorld(1).run(main) == [(0, 1, "local", True)]
    assert world().kind == "alone"


def test_one_rank_runs_at_a_time_and_the_course_is_always_the_same() -> None:
    def course() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        running: list[int] = []

        def main() -> None:
            w = world()
            for i in range(4):
                running.append(w.rank)
                time.sleep(0.001)
                assert running == [w.rank]
                seen.append((w.rank, i))
                running.pop()
                if i % 2:
                    w.all_reduce(np.ones(2))
                elif w.rank < 2:
                    request = w.irecv((1,), "f8", 1 - w.rank)
                    w.isend(np.ones(1), 1 - w.rank).wait()
                    while not request.test():
                        pass

        LocalWorld(3).run(main)
        return seen

    first = course()
    assert len(first) == 12
    assert course() == first


def test_a_deadlock_is_reported_at_once_with_where_every_rank_stands() -> None:
    def main() -> None:
        w = world()
        if w.rank == 0:
            w.recv((3,), "f4", 1)
        else:
            w.recv((2, 2), "f8", 0, tag=4)

    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        LocalWorld(2).run(main)
    assert time.monotonic() - began < 2
    text = str(caught.value)
    assert f"  rank 0 waits in recv on world from rank 1 of it, call 1, (3,) float32, at {HERE}:" in text
    assert f"  rank 1 waits in recv on world from rank 0 of it, tag 4, call 1, (2, 2) float64, at {HERE}:" in text
    assert len(text.splitlines()) <= 5


def test_crossed_blocking_sends_are_a_deadlock_for_any_size() -> None:
    def main() -> None:
        w = world()
        w.send(np.ones(1), 1 - w.rank)
        w.recv((1,), "f8", 1 - w.rank)

    with pytest.raises(CommError, match=r"deadlock: no rank can go on\.\n  rank 0 waits in send"):
        LocalWorld(2).run(main)


def test_a_chain_of_blocking_messages_is_none() -> None:
    def main() -> float:
        w = world()
        x = np.ones(1)
        if w.rank:
            x = w.recv((1,), "f8", w.rank - 1)
        if w.rank < w.size - 1:
            w.send(x + 1, w.rank + 1)
        return float(x[0])

    assert LocalWorld(5).run(main) == [1, 2, 3, 4, 5]


def test_ranks_in_different_collectives_are_told_apart() -> None:
    def main() -> None:
        w = world()
        w.barrier()
        if w.rank == 2:
            w.reduce_scatter(np.zeros((8, 4), "f4"))
        else:
            w.all_gather(np.zeros((4, 2), "f4"))

    with pytest.raises(CollectiveMismatch) as caught:
        LocalWorld(4).run(main)
    text = str(caught.value)
    assert text.startswith("on axis world, call 2: ranks 0,1,3 all_gather (4, 2) float32 at " + HERE)
    assert "; rank 2 reduce_scatter (8, 4) float32 at " + HERE in text


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.all_reduce(np.zeros(3), "max" if w.rank else "sum"),
        lambda w: w.broadcast(np.zeros(3), w.rank),
        lambda w: w.all_reduce(np.zeros(3 + w.rank)),
        lambda w: w.all_reduce(np.zeros(3, "f4" if w.rank else "f8")),
        lambda w: w.broadcast(np.zeros(3)) if w.rank else w.all_reduce(np.zeros(3)),
        lambda w: w.all_gather(np.zeros((2, 3) if w.rank else (3, 2))),
        lambda w: w.barrier() if w.rank else w.all_reduce(np.zeros(3)),
        lambda w: w.iall_reduce(np.zeros(3)).wait() if w.rank else w.all_reduce(np.zeros(3)),
    ],
    ids=["op", "root", "count", "dtype", "verb", "shape", "barrier", "blocking"],
)
def test_every_difference_between_collectives_is_a_mismatch(call) -> None:
    """C73."""
    with pytest.raises(CollectiveMismatch, match=r"rank 0 .*; rank 1 "):
        LocalWorld(2).run(lambda: call(world()))


def test_counts_that_do_not_fit_are_refused() -> None:
    def main() -> None:
        w = world()
        w.all_to_all(np.zeros(5), 0, 0, ([3, 2] if w.rank == 0 else [2, 3], [3, 3] if w.rank == 0 else [2, 3]))

    with pytest.raises(CommError, match="rank 1 of it sends 2 elements to rank 0, which expects 3"):
        LocalWorld(2).run(main)

    def pair() -> None:
        w = world()
        w.send(np.zeros(3), 1) if w.rank == 0 else w.recv((4,), "f8", 0)

    with pytest.raises(CommError, match="has 24 bytes, its receiver expects 32"):
        LocalWorld(2).run(pair)


def test_a_rank_that_leaves_while_others_wait_for_it_ends_them() -> None:
    def main() -> None:
        w = world()
        if w.rank == 1:
            return
        w.all_reduce(np.zeros(3))

    with pytest.raises(CommError, match=rf"ranks 0,2 wait in all_reduce .*, at {HERE}:\d+\n  rank 1 left"):
        LocalWorld(3).run(main)


def test_a_rank_may_leave_when_nobody_waits_for_it() -> None:
    def main() -> int:
        w = world()
        w.barrier()
        if w.rank == 0:
            sys.exit(0)
        pair = w.group([1, 2], "pair")
        return int(pair.all_reduce(np.array(1)))

    assert LocalWorld(3).run(main) == [None, 2, 2]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), MemoryError(), KeyboardInterrupt(), MeshError("bad")])
def test_the_first_failure_ends_all_and_they_unwind(error: BaseException, failing: int) -> None:
    unwound = []

    def main() -> None:
        w = world()
        w.barrier()
        try:
            if w.rank == failing:
                raise error
            w.all_reduce(np.zeros(1))
        finally:
            unwound.append(w.rank)

    local = LocalWorld(3)
    with pytest.raises(type(error)) as caught:
        local.run(main)
    assert caught.value is error
    assert local.failed == failing
    assert failing in unwound
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_rank_that_swallows_its_error_does_not_go_on() -> None:
    went_on = []

    def main() -> None:
        w = world()
        try:
            w.recv((1,), "f8", (w.rank + 1) % 2)
        except CommError:
            went_on.append(w.rank)
            w.barrier()
            went_on.append(9)

    with pytest.raises(CommError, match="deadlock"):
        LocalWorld(2).run(main)
    assert went_on in ([0], [1])


def test_polling_for_what_never_comes_ends_after_the_timeout() -> None:
    def main() -> None:
        w = world()
        if w.rank == 0:
            request = w.irecv((1,), "f8", 1)
            while not request.test():
                pass
        else:
            w.recv((1,), "f8", 0)

    with pytest.raises(CommError, match=r"rank 0 polls in vain for 0\.2 s at .*; rank 1 waits in recv"):
        LocalWorld(2, timeout=0.2).run(main)


def test_a_thread_of_a_rank_sends_no_messages_but_may_know_its_world() -> None:
    def main() -> list[object]:
        told: list[object] = []

        def inside() -> None:
            told.append(world().rank)
            try:
                world().barrier()
            except CommError as error:
                told.append(str(error))

        def outside() -> None:
            try:
                world()
            except CommError as error:
                told.append(str(error))

        context = contextvars.copy_context()
        for thread in (threading.Thread(target=context.run, args=(inside,)), threading.Thread(target=outside)):
            thread.start()
            thread.join()
        return told

    for rank, said in enumerate(LocalWorld(2).run(main)):
        assert said[0] == rank
        assert "only the rank's own thread may" in said[1]
        assert "copy_context().run" in said[2]


def test_context_variables_belong_to_a_rank() -> None:
    var: contextvars.ContextVar[int] = contextvars.ContextVar("var", default=-1)
    var.set(7)

    def main() -> tuple[int, int]:
        before = var.get()
        var.set(world().rank)
        world().barrier()
        return before, var.get()

    assert LocalWorld(3).run(main) == [(7, 0), (7, 1), (7, 2)]
    assert var.get() == 7


def test_a_listener_hears_only_its_own_rank() -> None:
    def main() -> list[str]:
        heard: list[Event] = []
        w = world()
        pair = w.group([0, 1], "pair")
        with listen(heard.append):
            if w.rank == 0:
                pair.send(np.ones(1), 1)
            else:
                pair.recv((1,), "f8", 0)
        return [event.name for event in heard]

    assert LocalWorld(2).run(main) == [["send", "send"], ["recv", "recv"]]


def test_a_group_of_which_a_member_stays_away_is_a_deadlock() -> None:
    def main() -> None:
        w = world()
        pair = w.group([0, 1], "pair")
        if w.rank == 1:
            pair.barrier()
        w.barrier()

    with pytest.raises(CommError, match=r"rank 0 waits in barrier on world, .*\n  rank 1 waits in barrier on pair, "):
        LocalWorld(2).run(main)


def test_a_run_inside_a_rank_is_a_world_of_its_own() -> None:
    def outer() -> tuple[list[int], int]:
        inner = LocalWorld(3).run(lambda: int(world().all_reduce(np.array(world().rank))))
        world().barrier()
        return inner, world().size

    assert LocalWorld(2).run(outer) == [([3, 3, 3], 2)] * 2


def test_ctrl_c_ends_all_ranks() -> None:
    code = """
        import os, signal, threading, time
        import numpy as np
        from mpitrain.comm.local import LocalWorld
        from mpitrain.comm.world import world
        def main():
            if world().rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            while True:
                world().all_reduce(np.ones(1))
                time.sleep(0.01)
        LocalWorld(2).run(main)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=20)
    assert run.returncode != 0
    assert "KeyboardInterrupt" in run.stderr


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(LaunchError, match="0 ranks"):
        LocalWorld(0)


# -- scripts


def script(folder: Path, text: str) -> str:
    path = folder / "job.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script_runs_as_main_on_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_job.py").write_text("value = 41\n")
    path = script(
        tmp_path,
        """
        from __future__ import annotations
        import dataclasses, pickle, sys, typing
        import numpy as np
        import beside_job
        from mpitrain.comm.world import world

        count = 0

        @dataclasses.dataclass
        class Thing:
            x: int
            y: typing.ClassVar[int] = 3

        if __name__ == "__main__":
            w = world()
            for _ in range(w.rank + 1):
                count += 1
            w.barrier()
            assert count == w.rank + 1
            here = sys.modules["__main__"]
            assert here.count == count and here.Thing is Thing
            assert pickle.loads(pickle.dumps(Thing(w.rank))) == Thing(w.rank)
            assert typing.get_type_hints(Thing)["x"] is int
            print(w.rank, sys.argv[1:], __file__ == sys.argv[0], beside_job.value, flush=True)
        """,
    )
    argv, modules, folders = sys.argv, sys.modules["__main__"], list(sys.path)
    assert run_script(3, path, ["--dp", "3"]) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"{rank} ['--dp', '3'] True 41" for rank in range(3)]
    assert err == ""
    assert (sys.argv, sys.modules["__main__"], sys.path) == (argv, modules, folders)
    del sys.modules["beside_job"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(0)", 1, "CommError: deadlock: no rank can go on.  Rank 1 left the path: it has ended."),
        ("sys.exit(3)", 3, "rank 1 of 3 ended all ranks with exit code 3, at job.py:"),
        ("raise SystemExit(4)", 4, ""),
        ("sys.exit('no luck')", 1, "no luck"),
        ("raise KeyError('lost')", 1, "rank 1 of 3: KeyError ended all ranks"),
        ("raise MemoryError", 1, "rank 1 of 3: MemoryError ended all ranks"),
        ("raise mpitrain.errors.MeshError('does not fit')", 2, "MeshError: does not fit"),
    ],
)
def test_exit_codes_and_words_are_those_of_mpirun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, said: str
) -> None:
    path = script(
        tmp_path,
        f"""
        import sys
        import mpitrain.errors
        from mpitrain.comm.world import world
        w = world()
        w.barrier()
        if w.rank == 1:
            {line}
        w.barrier()
        """,
    )
    assert run_script(3, path, []) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("Traceback") == (1 if "Error ended all" in said else 0)
    assert "local.py" not in err
    if "KeyError" in said:
        assert "job.py" in err


def test_a_script_that_is_missing_or_wrong_is_told_without_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(2, str(tmp_path / "nowhere.py"), []) == 1
    assert "LaunchError: cannot read the script" in capsys.readouterr().err
    assert run_script(2, script(tmp_path, "def ("), []) == 1
    assert "SyntaxError" in capsys.readouterr().err


# -- a slow network


def test_a_delayed_message_is_late_by_the_delay_and_ranks_do_not_add_up() -> None:
    def main() -> float:
        w = world()
        w.barrier()
        began = time.monotonic()
        assert w.all_reduce(np.ones(3)).sum() == 3 * w.size
        return time.monotonic() - began

    for seconds in LocalWorld(4, wrap=delayed(0.2)).run(main):
        assert 0.19 < seconds < 0.6  # one after the other it would be 0.8


def test_work_hides_the_delay_of_a_message_in_flight() -> None:
    def main(deterministic: bool) -> tuple[float, float]:
        w = world()
        w.mode.deterministic = deterministic
        x = np.ones(30_000)
        w.iall_reduce(x).wait()  # makes the second group
        w.barrier()

        began = time.monotonic()
        for _ in range(6):
            w.all_reduce(x)
        blocking = time.monotonic() - began
        w.barrier()
        began = time.monotonic()
        requests = [w.iall_reduce(x) for _ in range(6)]
        for request in requests:
            assert request.wait()[0] == w.size
        return blocking, time.monotonic() - began

    for deterministic, halves in ((False, 1), (True, 2)):
        for blocking, overlapped in LocalWorld(2, wrap=delayed(0.05)).run(main, deterministic):
            assert blocking > 6 * halves * 0.049
            assert overlapped < 0.6 * blocking  # 1/6 without load


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(CollectiveMismatch, CommError)
    assert issubclass(UserError, ValueError)
