"""Refuse actions that units must not take while they run; the message names the unit."""

from typing import Final, Never

from torch.utils.checkpoint import CheckpointFunction

from zsim_torch.module.absent import AbsentParameterError
from zsim_torch.module.saving import CHANGED, changed_in_place
from zsim_torch.module.unit import TorchUnit, UnitRunError

RECOMPUTE_INSTEAD: Final = "let the schedule recompute (checkpointing full)"
_FORWARD: Final = "forward"


class ForwardRefusals:
    """Context manager that refuses forbidden actions in a forward of a unit.

    A forward must not read parameters that the schedule does not pass to it. It must not use a
    reentrant checkpoint of torch, which calls a backward inside the unit's backward. Autograd
    refuses that, too, but not if no input of the checkpoint has a gradient: then its parameters
    would get none.

    Raises:
        UnitRunError: the forward does so.
    """

    __slots__ = ("_own", "_unit")

    def __init__(self, unit: TorchUnit) -> None:
        self._unit = unit.name
        self._own = vars(CheckpointFunction)[_FORWARD]

    def __enter__(self) -> None:
        setattr(CheckpointFunction, _FORWARD, self._refuse)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        setattr(CheckpointFunction, _FORWARD, self._own)
        if isinstance(error, AbsentParameterError):
            raise UnitRunError(
                f"unit {self._unit}: its forward reads {error.what}, which is not given to it: "
                "another unit's, or one that a function kept?"
            ) from error

    def _refuse(self, *_: object) -> Never:
        raise UnitRunError(
            f"unit {self._unit}: torch.utils.checkpoint runs part of it again at backward; "
            f"{RECOMPUTE_INSTEAD}"
        )


class BackwardRefusals:
    """Context manager that explains a forbidden action in a backward of a unit.

    Raises:
        UnitRunError: it reads parameters that it was not given, or a saved tensor was changed in
            place.
    """

    __slots__ = ("_unit",)

    def __init__(self, unit: TorchUnit) -> None:
        self._unit = unit.name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AbsentParameterError):
            raise UnitRunError(
                f"unit {self._unit}: its backward reads {error.what}, which is elsewhere by then "
                f"(torch.utils.checkpoint? a hook?); {RECOMPUTE_INSTEAD}, save tensors with "
                "ctx.save_for_backward"
            ) from error
        if isinstance(error, RuntimeError) and CHANGED in str(error):
            raise UnitRunError(changed_in_place(self._unit)) from error
