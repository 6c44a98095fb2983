"""Run a function as one of the ranks that torchrun started."""

import atexit
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar, cast

from torch import distributed

from zsim_torch.supervise.process_group import DeviceChoice, Placement, join
from zsim_torch.supervise.progress_record import note
from zsim_torch.supervise.rank_failure import Cause, RankFailedError, failure_of
from zsim_torch.supervise.torchrun_watchdog import Watchdog

Result = TypeVar("Result")

_GRACE_S: Final = 10.0
"""Seconds for which a rank that lost its peer keeps silent, so that the origin is heard first.

On a busy machine the origin needs seconds to leave its interpreter, and torchrun sees it only then.
"""


def run_joined(
    placement: Placement,
    function: Callable[..., Result],
    *arguments: object,
    timeout_s: float,
    device: DeviceChoice,
) -> tuple[Result, ...]:
    """Call `function(*arguments)` here, as all ranks do; returns what each returned, by rank.

    The process group is joined by the first call and left when the process ends. A rank without
    progress for `timeout_s` says what it waits for, and ends (see `torchrun_watchdog`).

    Raises:
        RankFailedError: this rank raised, or lost another one.
    """
    watchdog = Watchdog(placement, timeout_s)
    with watchdog.listening():
        try:
            note("joining the process group")
            if not distributed.is_initialized():
                # The watchdog says more than a collective that gave up: it is given the time.
                join(placement, device, timeout_s=2 * timeout_s + _GRACE_S)
                atexit.register(distributed.destroy_process_group)
            watchdog.meet()
            note("starting a job")
            results: list[Result | None] = [None] * placement.ranks
            distributed.all_gather_object(results, function(*arguments))
        except Exception as error:
            failure = failure_of(placement.rank, error)
            if failure.cause is Cause.LOST_ITS_PEER:
                failure = replace(failure, message=f"{failure.message}; {watchdog.where()}")
                time.sleep(_GRACE_S)  # torchrun ends this process when it sees the origin fail
            raise RankFailedError(failure, [failure.details]) from error
        finally:
            watchdog.end()
    return tuple(cast("list[Result]", results))
