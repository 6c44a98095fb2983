"""Dispatchers of tokens of experts, by Megatron-LM's names (`TransformerConfig`, 2026-08)."""

from enum import StrEnum

from zsim.strategy.token_dispatch import DispatchLibrary, TokenDispatch

DEEPEP_SMS, HYBRIDEP_SMS = 20, 16
"""Defaults of `moe_deepep_num_sms` and `moe_hybridep_num_sms`."""


class DispatcherType(StrEnum):
    """Choices of `--moe-token-dispatcher-type`."""

    ALLGATHER = "allgather"
    """Every rank gathers all tokens, and keeps those of its experts."""
    ALLTOALL = "alltoall"
    """Copies of tokens are exchanged by NCCL's send and receive."""
    FLEX = "flex"
    """The library of `--moe-flex-dispatcher-backend` exchanges them."""


def dispatch_of(
    dispatcher: DispatcherType, backend: DispatchLibrary, *, deepep_sms: int, hybridep_sms: int
) -> TokenDispatch | None:
    """Return the library that exchanges tokens; None if NCCL does."""
    if dispatcher is not DispatcherType.FLEX:
        return None
    sms = deepep_sms if backend is DispatchLibrary.DEEPEP else hybridep_sms
    return TokenDispatch(library=backend, num_sms=sms)


def dispatcher_fault(
    dispatcher: DispatcherType, backend: DispatchLibrary, *, deepep_sms: int, hybridep_sms: int
) -> tuple[str, object, str] | None:
    """Return the option, value and reason if an option has no effect; None if all have one."""
    flex = dispatcher is DispatcherType.FLEX
    if backend is DispatchLibrary.HYBRIDEP and not flex:
        return "moe_flex_dispatcher_backend", backend, "needs moe_token_dispatcher_type = flex"
    for name, value, default, library in (
        ("moe_deepep_num_sms", deepep_sms, DEEPEP_SMS, DispatchLibrary.DEEPEP),
        ("moe_hybridep_num_sms", hybridep_sms, HYBRIDEP_SMS, DispatchLibrary.HYBRIDEP),
    ):
        if value != default and not (flex and backend is library):
            why = f"needs moe_token_dispatcher_type = flex, with backend {library}"
            return name, value, why
    return None
