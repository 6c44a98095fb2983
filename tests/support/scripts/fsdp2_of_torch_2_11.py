"""FSDP2 of torch 2.11.0 recorded over the installed torch: `FOLDER [hook]`; prints findings."""

import copy
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "torch.distributed.fsdp._fully_shard"
FOLDER, *OPTIONS = sys.argv[1:]


class OlderFsdp(MetaPathFinder):
    """Finds the modules of FSDP2 in the folder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not name.startswith(PACKAGE):
            return None
        file = Path(FOLDER, *name.split("."))
        if name != PACKAGE:
            return spec_from_file_location(name, file.with_suffix(".py"))
        spec = spec_from_file_location(
            name, file / "__init__.py", submodule_search_locations=[str(file)]
        )
        loader: Any = spec.loader if spec else None
        execute = loader.exec_module

        def with_newer_name(module: Any) -> None:
            execute(module)
            module.DataParallelMeshDims = type("DataParallelMeshDims", (), {})

        loader.exec_module = with_newer_name
        return spec


sys.meta_path.insert(0, OlderFsdp())

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from zsim_record import recording
from zsim_record.record.finding_report import document_of

settings: Any = torch._dynamo.config
settings._config["skip_fsdp_hooks"] = copy.copy(settings._config["suppress_errors"])
with recording(world=4) as tape:
    dist.init_process_group("nccl")
    mesh = init_device_mesh("zsim", (4,))
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    for module in (*net, net):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
    if "hook" in OPTIONS:
        for parameter in net.parameters():
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(lambda each: each.grad.add_(1))
    for _ in range(2):
        loss: Any = net(torch.ones(4, 32, device="zsim")).sum()
        loss.backward()
        net.zero_grad()
print(json.dumps(document_of(tape)["findings"]))
