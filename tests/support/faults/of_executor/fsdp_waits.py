"""Lines of FSDP2 that wait: those that are missed when dropped, and those that others imply."""

from faults.of_executor.dropped_waits import WaitSite

COLLECTIVES, GROUP, STATE = (
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
    "_fsdp_state.py",
)
CURRENT = "self.device_handle.current_stream().wait_event"
FOUND = {
    WaitSite(
        COLLECTIVES,
        "foreach_all_gather",
        "all_gather_stream.wait_stream(all_gather_copy_in_stream)",
    ): "fsdp",
    WaitSite(
        COLLECTIVES,
        "foreach_all_gather_copy_out",
        "device_handle.current_stream().wait_event(all_gather_event)",
    ): "fsdp",
    WaitSite(
        COLLECTIVES, "foreach_reduce", "all_reduce_stream.wait_stream(reduce_scatter_stream)"
    ): "hsdp",
    WaitSite(
        COLLECTIVES, "foreach_reduce", "reduce_scatter_stream.wait_stream(current_stream)"
    ): "fsdp",
    WaitSite(
        GROUP,
        "_wait_all_gather_streams_on_event",
        "self.comm_ctx.all_gather_copy_in_stream.wait_event(event)",
    ): "fsdp",
    WaitSite(
        GROUP, "finalize_backward", "fsdp_param.grad_offload_event.synchronize()"
    ): "fsdp, offload",
    WaitSite(
        GROUP, "finalize_backward", f"{CURRENT}(event)"
    ): "fsdp, accumulation, reduced each time",
    WaitSite(
        GROUP,
        "finalize_backward",
        "torch.accelerator.current_stream().wait_event(event)",
    ): "fsdp, frozen",
    WaitSite(GROUP, "post_backward", f"{CURRENT}(oldest.event)"): "fsdp",
    WaitSite(
        STATE,
        "_post_forward",
        "self._comm_ctx.all_gather_copy_in_stream.wait_event(all_gather_state.event",
    ): "fsdp",
    WaitSite(
        STATE,
        "_root_pre_forward",
        "self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)",
    ): "fsdp",
}
"""Waits that are missed when they are dropped, each with a run that shows it."""
IMPLIED = {
    WaitSite(
        GROUP,
        "_wait_all_gather_streams_on_event",
        "self.comm_ctx.all_gather_stream.wait_event(event)",
    ): "all_gather_stream waits for the copy-in stream before each use, which waited already",
    WaitSite(
        STATE,
        "_post_forward",
        "self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)",
    ): "the same",
    WaitSite(
        STATE,
        "_root_pre_forward",
        "self._comm_ctx.all_gather_stream.wait_stream(current_stream)",
    ): "the same",
    WaitSite(
        STATE,
        "_root_post_backward_final_callback",
        "self._device_handle.current_stream().wait_event(rs_state.event)",
    ): "finalize_backward made the stream wait for the post-reduce event, which comes later",
}
"""Waits without which these runs are in order all the same, and why."""
