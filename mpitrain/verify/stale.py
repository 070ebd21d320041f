"""What a pipeline that never drains should equal: one rank that computes with the weights that its stages use.

    micro-batch j of a row, on stage q of n, m to a batch, uses weights that have seen so many updates of the row:

    pipedream       max(0, j - (n - 1 - q)) // m        the later a stage, the newer its weights
    pipedream-2bw   max(0, j // m - 1)                  one batch late, on every stage

A listener on an executor of one rank does it, without pipeline, schedule or pool of weights: before each forward every
parameter is given the version that its stage would use, and before each update its newest one again.  Every version is
a copy.  Where a row ends the pipeline is empty, and the next one begins with the newest weights on all stages; how long
rows are, and which parameter is on which stage, is read off what the pipeline's ranks have recorded.

Source: the update rules of Harlap et al. 2018, arXiv:1806.03377 (weight stashing), and of Narayanan et al. 2020,
arXiv:2006.09503 (2BW); stages there count from 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from weakref import WeakKeyDictionary

from mpitrain.backend import Array
from mpitrain.comm.world import World
from mpitrain.debug.capture import Record
from mpitrain.errors import ConfigError
from mpitrain.events import Event
from mpitrain.nn.parameter import Parameter
from mpitrain.pipeline.action import parse_row
from mpitrain.pipeline.executor import Executor

Rule = Callable[[int, int, int, int], int]
"""(stage, stages, micro-batch of the row, micro-batches of a batch) -> updates of the row that its weights saw."""


def _stashing(stage: int, stages: int, micro: int, micros: int) -> int:
    return max(0, micro - (stages - 1 - stage)) // micros


def _double_buffered(stage: int, stages: int, micro: int, micros: int) -> int:
    return max(0, micro // micros - 1)


RULES: Mapping[str, Rule] = MappingProxyType({"pipedream": _stashing, "pipedream-2bw": _double_buffered})


@dataclass(frozen=True)
class Course:
    """What has to be known of an executor's run on a pipeline.

    Attributes:
        schedule: by name.
        stages: how many.
        micros: micro-batches of a batch.
        rows: batches of each row.
        stage_of: parameter -> stage; of a tied one the first, since rules that allow it are the same on all.
    """

    schedule: str
    stages: int
    micros: int
    rows: tuple[int, ...]
    stage_of: dict[str, int]

    def start_of_row(self, step: int) -> int:
        """The first step of the row that a step is in; behind the last row every step is a row."""
        start = 0
        for length in self.rows:
            if step < start + length:
                return start
            start += length
        return step

    def version(self, name: str, step: int, micro: int) -> int:
        """How many updates a parameter has seen when it computes micro-batch `micro` of a step, counted from 0."""
        start = self.start_of_row(step)
        place = (step - start) * self.micros + micro
        return start + RULES[self.schedule](self.stage_of[name], self.stages, place, self.micros)


def courses_of(schedule: str, ranks: Sequence[Sequence[Record]]) -> list[Course]:
    """The courses of all executors of a pipeline, from the records of its ranks."""
    found = []
    begins = [[record.facts for record in records if record.facts["is"] == "begin"] for records in ranks]
    for number in range(min(map(len, begins), default=0)):
        stage_of: dict[str, int] = {}
        for begin in (each[number] for each in begins):
            for name, *_ in begin["parameters"]:
                stage_of[name] = min(begin["coords"]["pp"], stage_of.get(name, begin["coords"]["pp"]))
        steps = [r.facts for r in ranks[0] if r.facts["is"] == "step" and r.facts["executor"] == number]
        rows: list[int] = []
        for facts in steps:
            if facts.get("batch", 0) == 0:
                rows.append(0)
            rows[-1] += 1
        if not rows:
            continue
        row = parse_row(" ".join(facts["compute"] for facts in steps[: rows[0]]))
        micros = len({action.micro for action in row}) // rows[0]
        found.append(Course(schedule, begins[0][number]["sizes"]["pp"], max(1, micros), tuple(rows), stage_of))
    return found


class Replay:
    """The listener.

    Args:
        world: of one rank.
        courses: of each executor that it will see, in order.

    Raises:
        ConfigError: (out of a step) one rank cuts its batches into other micro-batches, or its own steps overlap.
    """

    def __init__(self, world: World, courses: Sequence[Course]) -> None:
        self._world = world
        self._waiting = list(courses)
        self._running: WeakKeyDictionary[Executor, _Weights] = WeakKeyDictionary()

    def __call__(self, event: Event) -> None:
        if event.kind != "action" or event.info["executor"].mesh.world is not self._world:
            return
        executor: Executor = event.info["executor"]
        if executor not in self._running:
            if not self._waiting:
                return
            self._running[executor] = _Weights(executor, self._waiting.pop(0))
        weights, action = self._running[executor], event.info["action"]
        if action.kind == "F" and event.phase == "begin":
            weights.go_back(action.micro)
        elif action.kind == "STEP" and event.phase == "begin":
            weights.come_home()
        elif action.kind == "STEP":
            weights.keep()


class _Weights:
    """All versions of one executor's weights that may still be asked for."""

    def __init__(self, executor: Executor, course: Course) -> None:
        micros = sum(action.kind == "LOAD" for action in executor.row)
        if executor.versions is not None or micros != course.micros:
            raise ConfigError(
                f"{course.schedule} on {course.stages} stages is proven against one rank that makes step after step of"
                f" {course.micros} micro-batches,\nbut here it makes "
                + ("several at once." if executor.versions is not None else f"steps of {micros}.")
            )
        self._course = course
        self._parameters: list[Parameter] = executor.model.parameters()
        self._home: list[Array] = [p.data for p in self._parameters]
        self._step = 0
        self._kept: dict[int, list[Array]] = {}
        self._copy()

    def go_back(self, micro: int) -> None:
        """Bind each parameter to the version of its stage."""
        for i, p in enumerate(self._parameters):
            p.data = self._kept[self._course.version(p.name, self._step, micro)][i]

    def come_home(self) -> None:
        """Bind the parameters to the arrays that the optimizer writes."""
        for p, array in zip(self._parameters, self._home, strict=True):
            p.data = array

    def keep(self) -> None:
        """The update is done."""
        self._step += 1
        self._copy()

    def _copy(self) -> None:
        self._kept[self._step] = [array.copy() for array in self._home]
        self._kept.pop(self._step - self._course.stages - 1, None)  # no stage is further behind


# ------------------------------------------------------------------------------------------------------------- in files


def write(path: Path, courses: Sequence[Course]) -> None:
    """Leave courses for the run that replays them."""
    path.write_text(json.dumps([asdict(course) for course in courses]), encoding="utf-8")


def read(path: Path) -> list[Course]:
    """The courses of a file; none where there is no file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Course(**{**course, "rows": tuple(course["rows"])}) for course in found]
