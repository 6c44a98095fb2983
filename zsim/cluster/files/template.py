"""Template files of a GPU and of a node."""

from typing import Final

GPU: Final = """\
# A GPU of your own: replace the name and six numbers, which are of its data sheet, and save the
# file, for example as mine.toml. Then: zsim best MODEL --gpus 8xmine.toml
# zsim's rules for what a data sheet lacks are in docs/topology.md; `zsim topology` shows them.

name = "Mine"
memory = "80 GB"
memory_bandwidth = "3350 GB/s"
link = "450 GB/s"               # to the other GPUs of its node, all links, in each direction
power = "700 W"                 # at most; no time depends on it

[rates.bf16]                    # [rates.fp16] for a GPU without bf16
peak = "989 TFLOP/s"            # dense: half of what is printed with sparsity

[rates.fp8]                     # remove both lines for a GPU without fp8
peak = "1979 TFLOP/s"
"""

NODE: Final = """\
# A node of your own: replace the GPU and five numbers, and save the file, for example as
# node.toml. Then: zsim best MODEL --gpus 4xnode.toml (four such nodes).

gpu = "h100_sxm5_80gb"          # one that ships (zsim list gpus), or a file such as mine.toml

[node]
gpus = 8
nics = 8
# nvswitch = false              # if each GPU has links to each other GPU instead of a switch
# pcie_only = true              # if GPUs reach each other over PCIe alone

[switch]
bandwidth_per_direction = "450 GB/s"    # of all links of a GPU to the others

[nic]
bandwidth_per_direction = "50 GB/s"     # bytes: 400 Gb/s are 50 GB/s

[pcie]
bandwidth_per_direction = "63 GB/s"     # of a GPU's slot: PCIe 5 with 16 lanes
"""

TEMPLATES: Final = {"gpu": GPU, "node": NODE}
"""Templates by the kind of object that they describe."""
