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
"""Seconds for which a rank that lost its peer delays its report, so that the cause comes first.

On a busy machine the failed rank takes seconds to exit, and torchrun sees its failure only then.
"""


def run_joined(
    placement: Placement,
    function: Callable[..., Result],
    *arguments: object,
    timeout_s: float,
    device: DeviceChoice,
) -> tuple[Result, ...]:
    """Call `function(*arguments)` here, as all ranks do, and return all results by rank.

    The first call joins the process group, which is left when the process ends. A rank without
    progress for `timeout_s` seconds reports the operation that it waits for, and exits (see
    `torchrun_watchdog`).

    Raises:
        RankFailedError: this rank raised, or lost another one.
    """
    watchdog = Watchdog(placement, timeout_s)
    with watchdog.listening():
        try:
            note("joining the process group")
            if not distributed.is_initialized():
                # Longer than the watchdog's timeout, whose report says more than a failed
                # collective.
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
                time.sleep(_GRACE_S)  # torchrun ends this process when it sees the cause
            raise RankFailedError(failure, [failure.details]) from error
        finally:
            watchdog.end()
    return tuple(cast("list[Result]", results))
