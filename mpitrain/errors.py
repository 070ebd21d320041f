"""What can go wrong through a user's doing, one class a kind.

Every mistake that a user can make ends in a `UserError`: one message of at most five lines that says what is wrong,
where, with which numbers, and the way out.  It is raised on every rank before the first message that it would spoil,
and whoever runs the ranks prints it once and without a traceback.  What only we can get wrong is an `assert`.
"""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """A mistake that the user can mend; its text is all that is printed.

    Attributes:
        exit_code: with which the program ends; 2 says that starting it again would be of no use.
    """

    exit_code: int = 2


class ConfigError(UserError):
    """An option, a value or a configuration file is wrong."""


class LaunchError(UserError):
    """The job was started in a way that cannot work: wrong mpirun, missing ranks."""


class DeviceError(UserError):
    """The device that was asked for is not here, or cannot be used."""


class MeshError(UserError):
    """The layout does not fit the ranks."""


class ShapeError(UserError):
    """A size does not divide, or two shapes do not go together."""


class ScheduleError(UserError):
    """A list of actions that cannot run."""


class StateError(UserError):
    """A value across an axis is used in a state in which it must not be."""


class GraphError(UserError):
    """The tape was asked for something that it does not hold."""


class NumericsError(UserError):
    """A value that must be finite is not.

    Attributes:
        autopsy: what is known of it (an `mpitrain.pipeline.autopsy.Autopsy`); None: nobody looked.
    """

    autopsy: Any = None


class CommError(UserError):
    """A message cannot be sent or was never answered."""


class CollectiveMismatch(CommError):
    """Ranks of one axis made different calls."""


class DataError(UserError):
    """A corpus or token file is missing, too short or not what it should be."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class CheckpointDamaged(CheckpointError):
    """The files of a checkpoint are not what was written."""


class ReplicaError(UserError):
    """Ranks that share a value hold other bits of it, in a run that began well.

    Maybe a memory's doing and nobody's mistake: whoever starts jobs again may do so, from the last checkpoint.
    """

    exit_code = 1


class StoreError(UserError):
    """What was offloaded has no place, or its place cannot be read or written any more."""


class ConsoleError(UserError):
    """A command of the debugging console that cannot be done, or is none."""


class RecordingError(UserError):
    """A recording cannot be made, is missing, or is not what was written."""


class ReplayDivergence(UserError):
    """A rank that is run again from a recording does something else than it did then."""
