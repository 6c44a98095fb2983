"""Streams around backward: the engine orders the one that called it, and no other."""

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest
import torch
from fsdp_matrix import WORLD, FsdpRun, train
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from zsim_record import recording
from zsim_record.record.device_module import DEVICE_MODULE as DEVICE
from zsim_record.record.pretended_streams import PretendedStream
from zsim_record.record.tape import Tape


def streams() -> list[PretendedStream]:
    """Return the default stream and two others, each after all that was done so far."""
    DEVICE.synchronize()
    return [DEVICE.default_stream(), DEVICE.Stream(), DEVICE.Stream()]


def kinds(tape: Tape) -> list[str]:
    return [hazard.kind.value for hazard in tape.findings]


@pytest.mark.one_commit_in(9)
def test_a_stream_reads_gradients_in_order_if_it_called_backward_or_waits_for_the_caller() -> None:
    with recording(world=2) as tape:
        used = streams()
        for forward, caller, reader, waits in product(range(3), range(3), range(3), (None, 0, 1)):
            before = sum(hazard.count for hazard in tape.findings)
            weight = nn.Parameter(torch.ones(4, device="zsim"))
            DEVICE.synchronize()
            with DEVICE.stream(used[forward]):
                loss: Any = (weight * weight).sum()
            with DEVICE.stream(used[caller]):
                loss.backward()
            if waits is not None:
                used[reader].wait_stream(used[waits])
            assert weight.grad is not None
            with DEVICE.stream(used[reader]):
                weight.grad.sum()
            # Nodes run on the stream of forward, so waiting for that one orders as well.
            ordered = reader in (caller, forward) or waits in (caller, forward)
            found = sum(hazard.count for hazard in tape.findings) - before
            assert (found == 0) == ordered, (forward, caller, reader, waits)
    assert set(kinds(tape)) == {"race"}


def test_an_initial_gradient_of_another_stream_is_found() -> None:
    for waits in (False, True):
        with recording(world=2) as tape:
            weight = nn.Parameter(torch.ones(4, device="zsim"))
            _, side, maker = streams()
            output: Any = weight * weight
            with DEVICE.stream(maker):
                initial = torch.ones(4, device="zsim")
            if waits:
                side.wait_stream(maker)
            with DEVICE.stream(side):
                output.backward(gradient=initial)
        assert kinds(tape) == ([] if waits else ["race"])


def test_a_callback_at_the_end_of_backward_runs_on_the_stream_that_called_it() -> None:
    ran: list[object] = []
    with recording(world=2) as tape:
        weight = nn.Parameter(torch.ones(4, device="zsim"))
        _, forward, caller = streams()
        with DEVICE.stream(forward):
            loss: Any = (weight * weight).sum()

        def at_end() -> None:
            ran.append(DEVICE.current_stream())
            assert weight.grad is not None
            weight.grad.add_(1)

        engine: Any = vars(torch.autograd.Variable)["_execution_engine"]
        hooked: Any = weight
        hooked.register_hook(lambda _: engine.queue_callback(at_end))
        with DEVICE.stream(caller):
            loss.backward()
    assert ran == [caller]
    assert tape.findings == []


def test_a_backward_inside_of_backward_orders_the_node_that_called_it() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, *grad_outputs: torch.Tensor) -> torch.Tensor:
            (gradient,) = grad_outputs
            with torch.enable_grad():
                loss: Any = inner * inner
            loss.backward(gradient)
            assert inner.grad is not None
            return gradient * inner.grad

    with recording(world=2) as tape:
        inner = nn.Parameter(torch.ones(4, device="zsim"))
        weight = nn.Parameter(torch.ones(4, device="zsim"))
        _, forward, reader = streams()
        with DEVICE.stream(forward):
            apply: Any = Inner.apply
            loss = apply(weight).sum()
        loss.backward()
        assert weight.grad is not None
        weight.grad.sum()
        assert tape.findings == []
        with DEVICE.stream(reader):
            weight.grad.sum()
    assert kinds(tape) == ["race"]


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(_: object, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        raise MistakenError(ctx, gradients)


class MistakenError(Exception):
    pass


def fail(_: object) -> None:
    raise MistakenError


FAILING: dict[str, Callable[[torch.Tensor], object]] = {
    "of a tensor": lambda value: cast("Any", value).register_hook(fail),
    "of several tensors": lambda value: register_multi_grad_hook((value,), fail, mode="any"),
    "of a node": lambda value: cast("Any", value.grad_fn).register_prehook(fail),
}


@pytest.mark.parametrize("hook", FAILING.values(), ids=FAILING.keys())
def test_an_exception_of_a_hook_leaves_backward_and_the_next_backward_runs(
    hook: Callable[[torch.Tensor], object],
) -> None:
    with recording(world=2):
        weight = nn.Parameter(torch.ones(4, device="zsim"))
        for _ in range(10):  # CPython specializes a function after eight calls
            value: Any = weight * 2
            hook(value)
            with pytest.raises(MistakenError):
                value.sum().backward()
            with pytest.raises(MistakenError):
                cast("Any", _Failing).apply(weight).sum().backward()
        assert weight.grad is None
        cast("Any", weight * 2).sum().backward()
        assert weight.grad is not None


def test_parameters_along_their_second_dimension_resharded_to_2_fail_as_on_real_ranks() -> None:
    # torch 2.13, `foreach_all_gather_copy_out`: the shard of the smaller mesh is flat.
    with recording(world=WORLD), pytest.raises(IndexError, match="list index out of range"):
        train(FsdpRun(second_dimension=True, reshard=2, layers=1, steps=1))
