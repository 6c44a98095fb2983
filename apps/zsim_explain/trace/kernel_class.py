"""Classes of kernels by their names, and kinds of collectives.

The names come from PyTorch, cuBLAS, cuDNN, CUTLASS, Triton, ROCm and FlashAttention; the first
pattern that fits decides. Attention comes before matrix products, whose names it contains.
"""

import re
from typing import Final

OTHER: Final = "other kernels"

CLASSES: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("attention", r"flash|fmha|attention|attn|mha_|sdpa"),
        (
            "matrix products",
            r"gemm|cutlass|nvjet|cijk_|matmul|xmma|cublas|wgrad|dgrad|conv|winograd|splitk|fprop"
            r"|gemv|scudnn",
        ),
        ("optimizer", r"multi_tensor_apply|adam|adagrad|sgd|lamb|foreach"),
        ("embedding", r"embedding|fbgemm|jagged|index_?select|gather|scatter|permute"),
        ("norms and losses", r"norm|bn_|rms|softmax|nll_loss|cross_entropy"),
        ("sorting", r"sort|scan|cub::|radix|topk"),
        (
            "element-wise",
            r"elementwise|vectorized|unrolled|fused|triton|cat|copy|cast|fill|dropout|gelu|relu|silu"
            r"|swiglu|nchw|nhwc|packed|rotary|transpose|reduce|distribution|arange|where|mul|add"
            r"|pool",
        ),
    )
)

NETWORK: Final = re.compile(
    r"nccl|rccl|deep_?ep|\bep::|internode::|intranode::|nvshmem|all_?reduce_(?:one|two)shot"
)

COLLECTIVES: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("all-gather", r"all_?gather"),
        ("reduce-scatter", r"reduce_?scatter"),
        ("all-reduce", r"all_?reduce"),
        ("all-to-all", r"all_?to_?all|dispatch|combine"),
        ("send and receive", r"send_?recv|\bsend\b|\brecv\b"),
        ("broadcast", r"broadcast"),
        ("reduce", r"reduce"),
    )
)


def kernel_class(name: str) -> str:
    """Return the class of the kernel `name`, `other kernels` if no pattern fits."""
    low = name.lower()
    return next((kind for kind, pattern in CLASSES if pattern.search(low)), OTHER)


def is_network(name: str) -> bool:
    """Return True if the kernel `name` communicates with other GPUs."""
    return NETWORK.search(name.lower()) is not None


def collective_kind(text: str) -> str:
    """Return the kind of collective that the name of a kernel, or of the collective, denotes."""
    low = text.lower()
    return next((kind for kind, pattern in COLLECTIVES if pattern.search(low)), "other collective")
