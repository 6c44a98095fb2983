"""Configuration of Transformer Engine's userbuffers (`ub_cfgs` of `initialize_ub`, 2.20).

Files given to `--tp-comm-overlap-cfg` have these tables, and more keys in each. Defaults are those
of `get_default_config` (transformer_engine/pytorch/module/base.py). Before 2.1, GEMMs left no SMs
free by default.
"""

from zsim.strategy.config_table import Count, Flag, Table


class RingExchange(Table):
    """A gather around a ring that overlaps GEMMs of the tokens that have arrived.

    Attributes:
        aggregate: multiply the tokens of two ranks at a time.
    """

    aggregate: Flag = False


class ByKernel(Table):
    """A collective whose kernel overlaps whole GEMMs (bulk) or parts of them (pipeline).

    Attributes:
        num_sm: SMs of that kernel.
        set_sm_margin: GEMMs leave it that many SMs; if False, both compete for SMs.
    """

    num_sm: Count = 16
    set_sm_margin: Flag = True

    @property
    def spared(self) -> int:
        """Return the number of SMs that GEMMs leave free."""
        return self.num_sm if self.set_sm_margin else 0


class OverlapMethods(Table):
    """How each GEMM of a block overlaps a collective, by Transformer Engine's names."""

    qkv_fprop: RingExchange = RingExchange()
    qkv_dgrad: ByKernel = ByKernel()
    qkv_wgrad: ByKernel = ByKernel()
    proj_fprop: ByKernel = ByKernel()
    proj_dgrad: RingExchange = RingExchange()
    fc1_fprop: RingExchange = RingExchange()
    fc1_dgrad: ByKernel = ByKernel()
    fc1_wgrad: ByKernel = ByKernel()
    fc2_fprop: ByKernel = ByKernel()
    fc2_dgrad: RingExchange = RingExchange()


DEFAULT_METHODS = OverlapMethods()
