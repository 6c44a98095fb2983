"""Figures of a run that is done, for tests that ask for some."""

from zsim.analysis.summary import Rates, Summary

SUMMARY = Summary(
    step_time_s=1.0,
    model_tflops_per_gpu=100.0,
    hardware_tflops_per_gpu=120.0,
    mfu=0.4,
    hfu=0.5,
    causal=Rates(model_tflops_per_gpu=1.0, hardware_tflops_per_gpu=1.0, mfu=0.1, hfu=0.1),
    tokens_per_s=1e6,
    peak_allocated_bytes=1,
    memory_by_kind=(),
    peak_reserved_bytes=2,
    usable_bytes=3,
    exposed_communication_s=0.25,
    exposed_by_group=(("data", 0.25),),
    host_bound_s=0.0,
    fits=True,
)
