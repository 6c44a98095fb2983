"""Kernel constants from publications, which are not fitted, and similar GPUs, by profile."""

from collections.abc import Mapping

from zsim.cluster.profile.fused_attention import FusedAttention
from zsim.cluster.profile.row_alignment import Alignment

FLASH2_HOPPER = FusedAttention(
    # Shah et al. 2024, "FlashAttention-3" (arXiv 2407.08608), the bars of FlashAttention-2 on an
    # H100 SXM5, heads of 128 elements. Figure 5, forward with mask: 191, 260, 298, 319, 333 and 335
    # TFLOP/s at 512 to 16,384 tokens, which is 353 x keys / (keys + 204) within 3 %, a row seeing
    # half of all keys. Of 989.4:
    forward=0.357,
    forward_fill=204,
    # Figure 6, backward without mask: 214, 260, 291, 310, 318 and 322, which is 329 x keys / (keys
    # + 272) within 1 %. With a mask, backward is assumed to slow down as forward does in figure 5:
    # 0.933 times the rate, and 100 keys more. Forward without mask is 378 x keys / (keys + 104).
    backward=0.310,
    backward_fill=372,
)

FLASH2_AMPERE = FusedAttention(
    # Dao 2023, "FlashAttention-2" (arXiv 2307.08691), section 4.1, A100 SXM4: up to 73 % of the
    # peak forward and 63 % backward, without mask; with a mask 0.933 times that, as above.
    forward=0.681,
    forward_fill=204,
    backward=0.588,
    backward_fill=372,
)

CUDNN_HOPPER = FusedAttention(
    # The bars of cuDNN in the same figures. Forward with mask: 315, 410, 484, 518, 529 and 539
    # TFLOP/s, which is 561 x keys / (keys + 194) within 3 %.
    forward=0.567,
    forward_fill=194,
    # Backward without mask: 305, 408, 465, 499, 518 and 516, which is 542 x keys / (keys + 377)
    # within 3 %. With a mask 0.905 times the rate and 83 keys more, as forward, which without mask
    # is 619 x keys / (keys + 111) within 5 %.
    backward=0.496,
    backward_fill=460,
)

CUDNN_BLACKWELL = FusedAttention(
    # MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json at 4dcaae5: cuDNN through
    # Transformer Engine 2.11 on a B200, heads of 128 elements, shares of 2,250 TFLOP/s that count
    # masked scores: forward 0.835 and 0.946 (64 and 128 heads, 4,096 tokens), 1.165 and 1.202 (16
    # and 8 heads, 32,768), 0.989 and 1.003 (131,072). Half of the scores are computed: 0.56 x keys
    # / (keys + 530) within 12 %. That is too high for the longest, which the power limit slows.
    forward=0.56,
    forward_fill=530,
    # Backward, recomputed scores included: 0.725 and 0.825, 0.872 and 0.955, 0.827 and 0.826. Half
    # of that is 0.44 x keys / (keys + 280) within 10 %.
    backward=0.44,
    backward_fill=280,
)

HOPPERS = (
    "h100",
    "h100_2025",
    "h100_2026",
    "h100_nemo_2025",
    "h100_hbm2e",
    "h100_hbm2e_2025",
    "h200",
    "gh200",
)

FLASH2: Mapping[str, FusedAttention] = {
    "a100": FLASH2_AMPERE,
    **dict.fromkeys(HOPPERS, FLASH2_HOPPER),
}
"""FlashAttention-2, by profile. It does not run on V100; for B200 no rates with mask are published.
"""

CUDNN: Mapping[str, FusedAttention] = {
    **dict.fromkeys(HOPPERS, CUDNN_HOPPER),
    "b200": CUDNN_BLACKWELL,
    "gb200": CUDNN_BLACKWELL,
    "gb300": CUDNN_BLACKWELL,
}
"""cuDNN's attention, by profile."""

AMPERE = Alignment(
    # Logs of Anthony et al. 2024, "The Case for Co-Designing Model Architectures with Hardware"
    # (arXiv 2401.14489), github.com/jahatef/TransformerSizing at 81d67396, results: A100, fp16,
    # PyTorch 1.13.1. Rates relative to sizes that are multiples of 32 bytes; medians of 129
    # products of 8,192 rows. Inner extents of 14,272 to 14,400 (vocab.out) and of 51,136 to 51,264
    # (vocab_v_sweep.out): 0.283 and 0.290, 0.551 and 0.541, 0.556 and 0.548, 0.899 and 0.887.
    inner_2=0.287,
    inner_4=0.546,
    inner_8=0.552,
    inner_16=0.893,
    # Columns of 51,136 to 51,264 (vocab.out) and 14,272 to 14,400 (vocab_h_sweep.out): 0.275 and
    # 0.278, 0.687 and 0.672 twice, 0.998 and 0.995.
    outer_2=0.277,
    outer_4=0.68,
    outer_8=0.68,
    outer_16=1.0,
)

VOLTA = Alignment(
    # The same on V100, products of plain attention (V100_h_sweep.out, heads of 64 elements or
    # more). Even sizes run at full rate; odd sizes reach 3.9 and 5.0 TFLOP/s, which these
    # fractions reproduce with zsim's constants.
    inner_2=0.034,
    inner_4=1.0,
    inner_8=1.0,
    inner_16=1.0,
    outer_2=0.1,
    outer_4=1.0,
    outer_8=1.0,
    outer_16=1.0,
)

OF_AMPERE = (
    "a100",
    "h100",
    "h100_2025",
    "h100_2026",
    "h100_nemo_2025",
    "h100_hbm2e",
    "h100_hbm2e_2025",
    "h200",
    "gh200",
    "b200",
    "gb200",
    "gb300",
)
"""Profiles that use the published rates of A100. On later GPUs only rows of 16 bytes were timed:
on GH200, products of plain attention take 1 to 1.25 times as long as aligned ones
(github.com/DebarghaG/estimate-train-time at 1ac4d5e4, bmm and baddbmm). Copy instructions of these
GPUs need 16 bytes, too (`cp.async.bulk` of the PTX ISA); other rows use kernels as on A100."""

ALIGNMENT: Mapping[str, Alignment] = {
    **dict.fromkeys(OF_AMPERE, AMPERE),
    **dict.fromkeys(("v100", "v100_timed"), VOLTA),
}
"""Fractions of the full rate that unaligned rows reach, by profile."""

TRAINING_SIBLINGS = {
    "v100": "a100",
    "h100_hbm2e": "h100",
    "h100_hbm2e_2025": "h100_hbm2e",
    "h200": "h100",
    "h100_2026": "h200",
    "h100_nemo_2025": "h100",
    "gh200": "h100",
    "b200": "h100",
    "gb200": "b200",
    "gb300": "gb200",
}
"""GPU whose training constants are used for a profile with few or no measured runs. It is at most
one generation away, and has the same matrix units if such a GPU exists."""

TIMED_WARM = ("b200",)
"""Profiles whose kernels were timed back to back, as in training. So training reaches the same
rates (`zsim_lab.fit.b200_kernels`)."""
