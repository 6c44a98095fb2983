"""Times of products on a B200, published by SimuMax: kernels alone, repeated until warm.

Fractions of 2,250 TFLOP/s of products of one sequence of 4,096 tokens, through Transformer Engine
2.11 under PyTorch 2.10 (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json at 4dcaae5; its
docs/b200 names the software). Each is repeated without a pause, so the times are of a GPU at its
power limit: large products reach 1.1 PFLOP/s, while the largest rate of one kernel is 1.7.
"""

from zsim.dtype import DType
from zsim.model.kernel import matmul
from zsim_lab.rows.kernel_rows import CHIPS, KernelRow

FILE = "b200_kernels"
SOURCE = "github:MooreThreads/SimuMax/configs/system/b200_bf16_ceperm.json@4dcaae513ba7"
GPU = "b200"
TOKENS = 4096

# Output and input columns of a linear layer of Llama 3 70B (first part) and 405B over 1, 2, 4 and 8
# tensor ranks: fractions reached by forward, the gradient of its input, and that of its weight.
LAYERS: tuple[tuple[int, int, float, float, float], ...] = (
    (10_240, 8192, 0.6452, 0.4980, 0.5979),
    (8192, 8192, 0.4625, 0.4964, 0.4789),
    (57_344, 8192, 0.4867, 0.4829, 0.4536),
    (8192, 28_672, 0.4847, 0.4742, 0.4594),
    (128_256, 8192, 0.4874, 0.4710, 0.4548),
    (5120, 8192, 0.6275, 0.6428, 0.4732),
    (8192, 4096, 0.4603, 0.3905, 0.5703),
    (28_672, 8192, 0.4943, 0.4819, 0.4535),
    (8192, 14_336, 0.4763, 0.4943, 0.4568),
    (64_128, 8192, 0.4901, 0.4656, 0.4529),
    (2560, 8192, 0.5844, 0.6551, 0.5618),
    (8192, 2048, 0.6222, 0.5530, 0.5159),
    (14_336, 8192, 0.4937, 0.4923, 0.4756),
    (8192, 7168, 0.4759, 0.4687, 0.4076),
    (32_128, 8192, 0.4917, 0.4917, 0.4445),
    (1280, 8192, 0.5938, 0.6310, 0.5215),
    (8192, 1024, 0.6170, 0.6137, 0.5838),
    (7168, 8192, 0.6113, 0.4436, 0.4742),
    (8192, 3584, 0.5034, 0.4982, 0.4044),
    (16_128, 8192, 0.5883, 0.4897, 0.4504),
    (20_480, 16_384, 0.5325, 0.5135, 0.4547),
    (16_384, 16_384, 0.5097, 0.5149, 0.4523),
    (106_496, 16_384, 0.4961, 0.5116, 0.4562),
    (16_384, 53_248, 0.5109, 0.5007, 0.4536),
    (128_256, 16_384, 0.4906, 0.5109, 0.4546),
    (10_240, 16_384, 0.5525, 0.4888, 0.4768),
    (16_384, 8192, 0.4527, 0.4727, 0.4533),
    (53_248, 16_384, 0.4887, 0.5116, 0.4546),
    (16_384, 26_624, 0.5084, 0.4978, 0.4547),
    (64_128, 16_384, 0.4941, 0.5121, 0.4527),
    (5120, 16_384, 0.6291, 0.4668, 0.4801),
    (16_384, 4096, 0.4958, 0.5076, 0.5335),
    (26_624, 16_384, 0.4973, 0.5127, 0.4513),
    (16_384, 13_312, 0.5082, 0.4798, 0.4472),
    (32_128, 16_384, 0.4995, 0.5107, 0.4524),
    (2560, 16_384, 0.6047, 0.5956, 0.4515),
    (16_384, 2048, 0.4871, 0.4325, 0.5358),
    (13_312, 16_384, 0.4954, 0.5024, 0.4438),
    (16_384, 6656, 0.4777, 0.4931, 0.4370),
    (16_128, 16_384, 0.5101, 0.5152, 0.4487),
)


def kernel_rows() -> list[KernelRow]:
    """Return the times, as rows of a table of kernels."""
    rows: list[KernelRow] = []
    for number, (out, inner, *shares) in enumerate(LAYERS, start=1):
        shapes = ((TOKENS, out, inner), (TOKENS, inner, out), (out, inner, TOKENS))
        for (m, n, k), share in zip(shapes, shares, strict=True):
            kernel = matmul(m, n, k, DType.BF16)
            rows.append(
                KernelRow(
                    file=FILE,
                    row=number,
                    gpu=GPU,
                    name="matmul",
                    kernels=(kernel,),
                    seconds=kernel.flops / (share * CHIPS[GPU].peaks.flops),
                    source=SOURCE,
                )
            )
    return rows
