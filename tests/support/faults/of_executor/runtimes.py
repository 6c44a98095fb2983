"""Bugs of released runtimes in a few lines each, and the same lines mended.

Each function trains or copies on the pretended device; with `mended` it is right. Numbers are those
of public issues: PT is pytorch, DS DeepSpeed, MLM Megatron-LM.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

DEVICE = "zsim"
Bug = Callable[[bool], None]
BUGS: dict[str, tuple[str, Bug]] = {}
"""For each bug the kind of its finding, and the code."""


def planted(kind: str) -> Callable[[Bug], Bug]:
    """Enter a bug in the list."""

    def enter(bug: Bug) -> Bug:
        BUGS[bug.__name__] = kind, bug
        return bug

    return enter


def _device() -> Any:
    return torch.get_device_module(DEVICE)


def _ones(count: int = 64) -> torch.Tensor:
    return torch.ones(count, device=DEVICE)


def _pinned(count: int = 64) -> torch.Tensor:
    return torch.empty(count).pin_memory()


@planted("race")
def bucket_refilled_while_copied_to_the_host(mended: bool) -> None:
    """DS #1219: the next reduction writes the bucket that a stream still copies out."""
    copies = _device().Stream()
    bucket, host = _ones(), _pinned()
    for _ in range(2):
        dist.all_reduce(bucket)
        copies.wait_stream(_device().current_stream())
        with _device().stream(copies):
            host.copy_(bucket, non_blocking=True)
        if mended:
            _device().current_stream().wait_stream(copies)


@planted("race")
def parameters_used_while_copied_to_the_device(mended: bool) -> None:
    """DS #3097: updated parameters come back on a stream of their own."""
    copies = _device().Stream()
    master, weight = _pinned(), _ones()
    copies.wait_stream(_device().current_stream())
    with _device().stream(copies):
        weight.copy_(master, non_blocking=True)
    if mended:
        _device().current_stream().wait_stream(copies)
    weight.square()


@planted("host race")
def gradient_hook_reads_pinned_memory(mended: bool) -> None:
    """PT #180666: a hook reads the gradient before its copy has ended."""
    gradient = _ones().to("cpu", non_blocking=True)
    if mended:
        _device().current_stream().synchronize()
    gradient.add_(1)


@planted("host race")
def optimizer_starts_before_its_gradient_came(mended: bool) -> None:
    """DS #7906 and fairscale #496: the update on the host waits for nothing."""
    copies = _device().Stream()
    gradient, host = _ones(), _pinned()
    copies.wait_stream(_device().current_stream())
    with _device().stream(copies):
        host.copy_(gradient, non_blocking=True)
        done = copies.record_event()
    if mended:
        done.synchronize()
    master = torch.zeros(64)
    torch.nn.Parameter(master).detach().add_(host)


@planted("host race")
def host_updates_what_is_being_uploaded(mended: bool) -> None:
    """The next update overwrites pinned parameters that are still copied to the device."""
    master, weight = _pinned(), _ones()
    weight.copy_(master, non_blocking=True)
    if mended:
        _device().synchronize()
    master.add_(1)


@planted("host race")
def staging_buffer_refilled_too_early(mended: bool) -> None:
    """A loader writes the next batch into the pinned buffer of the last one."""
    staging = _pinned()
    for _ in range(2):
        staging.fill_(1)
        staging.to(DEVICE, non_blocking=True)
        if mended:
            _device().current_stream().synchronize()


@planted("reuse")
def activation_freed_while_copied_out(mended: bool) -> None:
    """torchtune #1867: the copy to the host still reads the activation."""
    copies = _device().Stream()
    activation = _ones()
    host = _pinned()
    copies.wait_stream(_device().current_stream())
    with _device().stream(copies):
        host.copy_(activation, non_blocking=True)
    if mended:
        activation.record_stream(copies)
    del activation
    _ones()


@planted("race")
def wait_inside_the_stream_is_for_itself(mended: bool) -> None:
    """Torchtitan #2581: within the context the current stream is the one that waits."""
    copies = _device().Stream()
    slab, host = _ones(), _pinned()
    compute = _device().current_stream()
    with _device().stream(copies):
        copies.wait_stream(compute if mended else _device().current_stream())
        host.copy_(slab, non_blocking=True)


@planted("race")
def reload_reads_a_pinned_buffer_being_filled(mended: bool) -> None:
    """MLM #7398: two streams, one pinned buffer."""
    out, back = _device().Stream(), _device().Stream()
    activation, host = _ones(), _pinned()
    out.wait_stream(_device().current_stream())
    with _device().stream(out):
        host.copy_(activation, non_blocking=True)
    if mended:
        back.wait_stream(out)
    with _device().stream(back):
        host.to(DEVICE, non_blocking=True)


@planted("reuse")
def buffer_of_another_stream(mended: bool) -> None:
    """MLM #6187: memory of the default stream, filled by a stream that did not wait for it."""
    reduce = _device().Stream()
    old = _ones()
    old.square_()
    del old
    bucket = torch.empty(64, device=DEVICE)
    if mended:
        reduce.wait_stream(_device().current_stream())
    with _device().stream(reduce):
        bucket.fill_(0)
    bucket.record_stream(reduce)


@planted("race")
def double_buffer_reused(mended: bool) -> None:
    """MLM #5222: the wait stands under the side stream, and backward writes on its own."""
    reduce = _device().Stream()
    buffer, shard = _ones(), _ones(8)
    for _ in range(2):
        buffer.fill_(1)
        reduce.wait_stream(_device().current_stream())
        with _device().stream(reduce):
            dist.reduce_scatter_single(shard, buffer)
            done = reduce.record_event()
            done.wait()
        if mended:
            done.wait()


@planted("reuse")
def reduced_shard_dropped_while_copied(mended: bool) -> None:
    """PT #180665: the output of a reduce-scatter dies while another stream copies it."""
    reduce, out = _device().Stream(), _device().Stream()
    gradient, host = _ones(), _pinned(8)
    kept: list[torch.Tensor] = []
    for _ in range(2):
        reduce.wait_stream(_device().current_stream())
        with _device().stream(reduce):
            shard = torch.empty(8, device=DEVICE)
            dist.reduce_scatter_single(shard, gradient)
        out.wait_stream(reduce)
        with _device().stream(out):
            host.copy_(shard, non_blocking=True)
        if mended:
            kept.append(shard)
        del shard


@planted("reuse")
def cast_buffer_dropped_before_its_all_reduce(mended: bool) -> None:
    """PT #140044, #180900: all layers alias one block while an all-reduce still runs."""
    reduce, replicate = _device().Stream(), _device().Stream()
    for _ in range(2):
        with _device().stream(reduce):
            shard = torch.zeros(8, device=DEVICE)
        replicate.wait_stream(reduce)
        with _device().stream(replicate):
            dist.all_reduce(shard)
        if mended:
            reduce.wait_stream(replicate)
        del shard


@planted("host race")
def event_on_the_wrong_stream(mended: bool) -> None:
    """PT #160481: the host waits for an event of a stream that does not copy."""
    copies, other = _device().Stream(), _device().Stream()
    gradient = _ones()
    copies.wait_stream(_device().current_stream())
    with _device().stream(copies):
        host = gradient.to("cpu", non_blocking=True)
    (copies if mended else other).record_event().synchronize()
    host.add_(1)


@planted("race")
def gradient_reduced_before_it_is_complete(mended: bool) -> None:
    """DS #5545: communication overlaps with the kernel that writes the gradient."""
    reduce = _device().Stream()
    bucket = _ones()
    bucket.add_(1)
    if mended:
        reduce.wait_stream(_device().current_stream())
    with _device().stream(reduce):
        dist.all_reduce(bucket)
    _device().current_stream().wait_stream(reduce)


@planted("race")
def gathered_parameter_used_before_the_wait(mended: bool) -> None:
    """The work of an all-gather is thrown away."""
    whole, shard = torch.empty(64, device=DEVICE), _ones(8)
    work = dist.all_gather_single(whole, shard, async_op=True)
    assert work is not None
    if mended:
        work.wait()
    whole.square()


@planted("race")
def step_before_gradients_are_reduced(mended: bool) -> None:
    """The optimizer runs beside the last all-reduce."""
    weight = torch.nn.Parameter(_ones())
    weight.grad = _ones()
    work = dist.all_reduce(weight.grad, async_op=True)
    assert work is not None
    if mended:
        work.wait()
    torch.optim.SGD([weight], lr=0.1).step()


@planted("race")
def work_waited_for_on_the_side_stream(mended: bool) -> None:
    """The stream that reads is not the one that waited."""
    side = _device().Stream()
    gradient = _ones()
    work = dist.all_reduce(gradient, async_op=True)
    assert work is not None
    if mended:
        work.wait()
    else:
        with _device().stream(side):
            work.wait()
    gradient.mul_(2)


@planted("race")
def prefetch_overwrites_parameters_in_use(mended: bool) -> None:
    """The next layer is gathered into a buffer that the last one still computes with."""
    gather = _device().Stream()
    buffer, shard = _ones(), _ones(8)
    gather.wait_stream(_device().current_stream())
    buffer.square()
    if mended:
        gather.wait_stream(_device().current_stream())
    with _device().stream(gather):
        dist.all_gather_single(buffer, shard)
    _device().current_stream().wait_stream(gather)


@planted("race")
def event_recorded_too_early(mended: bool) -> None:
    """The kernel that matters comes after the event."""
    side = _device().Stream()
    value = _ones()
    done = _device().current_stream().record_event()
    value.mul_(2)
    if mended:
        done = _device().current_stream().record_event()
    side.wait_event(done)
    with _device().stream(side):
        value.sum()


@planted("race")
def event_never_recorded(mended: bool) -> None:
    """A wait for an event that was not recorded is no wait."""
    side, done = _device().Stream(), _device().Event()
    value = _ones()
    if mended:
        done.record()
    side.wait_event(done)
    with _device().stream(side):
        value.sum()


@planted("race")
def gather_of_parameters_being_updated(mended: bool) -> None:
    """The prefetch of the next step starts before the optimizer has ended."""
    gather = _device().Stream()
    whole, shard = torch.empty(64, device=DEVICE), _ones(8)
    gather.wait_stream(_device().current_stream())
    shard.add_(1)
    if mended:
        gather.wait_stream(_device().current_stream())
    with _device().stream(gather):
        dist.all_gather_single(whole, shard)


@planted("race")
def one_parameter_fetched_twice(mended: bool) -> None:
    """DS #7825: two hooks fetch the same parameter on two streams."""
    first, second = _device().Stream(), _device().Stream()
    whole, shard = torch.empty(64, device=DEVICE), _ones(8)
    for stream in (first, second):
        stream.wait_stream(_device().current_stream())
    with _device().stream(first):
        dist.all_gather_single(whole, shard)
    if mended:
        second.wait_stream(first)
    with _device().stream(second):
        dist.all_gather_single(whole, shard)


@planted("race")
def two_optimizers_share_a_buffer(mended: bool) -> None:
    """MLM #4769: one zeroes what the other copies into."""
    one, other = _device().Stream(), _device().Stream()
    buffer, gradient = _ones(), _ones()
    for stream in (one, other):
        stream.wait_stream(_device().current_stream())
    with _device().stream(one):
        buffer.zero_()
    if mended:
        other.wait_stream(one)
    with _device().stream(other):
        buffer.copy_(gradient)


@planted("reuse")
def weights_freed_before_backward_read_them(mended: bool) -> None:
    """DS #8036: storage is given back while another stream still computes with it."""
    gather = _device().Stream()
    with _device().stream(gather):
        whole = torch.zeros(64, device=DEVICE)
    _device().current_stream().wait_stream(gather)
    whole.square()
    if mended:
        gather.wait_stream(_device().current_stream())
    whole.untyped_storage().resize_(0)
    with _device().stream(gather):
        torch.zeros(64, device=DEVICE)


@planted("reuse")
def storage_recorded_on_the_wrong_stream(mended: bool) -> None:
    """`record_stream` names a stream that does not use the storage."""
    side, other = _device().Stream(), _device().Stream()
    value = _ones()
    side.wait_stream(_device().current_stream())
    with _device().stream(side):
        torch.sum(value)
    value.record_stream(side if mended else other)
    del value
    _ones()
