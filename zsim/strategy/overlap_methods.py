"""Configuration of Transformer Engine's userbuffers (`ub_cfgs` of `initialize_ub`, 2.20).

Files that `--tp-comm-overlap-cfg` names have these tables, and more keys in each. Defaults are
those of `get_default_config` (transformer_engine/pytorch/module/base.py); before 2.1 no product
spared multiprocessors unless it was said.
"""

from zsim.strategy.config_table import Count, Flag, Table


class RingExchange(Table):
    """A gather around a ring, beside products of what has come.

    Attributes:
        aggregate: two ranks' tokens are multiplied at a time.
    """

    aggregate: Flag = False


class ByKernel(Table):
    """A collective whose kernel runs beside products, which are whole (bulk) or parts (pipeline).

    Attributes:
        num_sm: multiprocessors of that kernel.
        set_sm_margin: products leave it so many; without, both compete for them.
    """

    num_sm: Count = 16
    set_sm_margin: Flag = True

    @property
    def spared(self) -> int:
        """Return the multiprocessors that products leave."""
        return self.num_sm if self.set_sm_margin else 0


class OverlapMethods(Table):
    """Ways of each product of a block to run beside a collective, by Transformer Engine's names."""

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
