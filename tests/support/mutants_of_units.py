"""Mutants of the executor: units under autograd, what it saves, operands that stay, views."""

from executor_mutant import (
    DROPPED,
    FLYING,
    RANKS_1,
    RANKS_3,
    SHARED,
    SLICED,
    STAGE_0,
    STAGE_3,
    STAGES,
    STAYING,
    TENSOR,
    VALUES,
    Mutant,
)

from zsim_torch.execute import copying, operands, shard_compute
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.cut_parts import CutParts
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.operands import Operands
from zsim_torch.execute.shard_compute import ShardComputer
from zsim_torch.module import autograd
from zsim_torch.module.entered import Leaves
from zsim_torch.module.saving import Saving

MUTANTS_OF_UNITS = (
    # Views.
    Mutant(
        "a view begins one element late",
        FLYING,
        LiveMemory,
        "flat",
        "flat[start : start + size]",
        "flat[start + 1 : start + 1 + size]",
    ),
    Mutant(
        "a piece of a buffer begins one element early",
        FLYING,
        LiveMemory,
        "pieces",
        "self._flat[view.buffer][start : start + size]",
        "self._flat[view.buffer][max(start - 1, 0) : max(start - 1, 0) + size]",
    ),
    Mutant(
        "a part of a produced buffer ends where it begins in it",
        SHARED,
        LiveMemory,
        "pieces",
        "yield low - start, part.tensor.reshape(-1)[low - part.start : high - part.start]",
        "yield low - start, part.tensor.reshape(-1)[: high - low]",
    ),
    Mutant(
        "a gradient is bound at the start of its buffer",
        RANKS_3,
        Computer,
        "_bind_gradient",
        "ProducedPart(view.start, gradient)",
        "ProducedPart(0, gradient)",
    ),
    Mutant(
        "parts of buffers that go are kept",
        VALUES,
        CutParts,
        "keep",
        "if view.buffer in self.staying:",
        "if True:",
        same="a buffer's parts are forgotten before its memory goes, whether it stays or not",
    ),
    Mutant(
        "joined pieces are not divided",
        RANKS_1,
        copying,
        "_join",
        "target.div_(_divisor(copy.divisor, target))",
        "pass",
    ),
    # Operands that stay from step to step.
    Mutant(
        "an operand of the last step is used again",
        STAGE_3,
        Operands,
        "of",
        "SteadyParameters() if is_steady else None",
        "SteadyParameters()",
    ),
    Mutant(
        "micro-batches share the record of a unit",
        STAGES,
        operands,
        "visit_of",
        "compute.micro_batch)",
        "0)",
    ),
    Mutant(
        "leaves are used where inputs may be given away",
        TENSOR,
        Computer,
        "_differentiate",
        " and not known.stored",
        "",
    ),
    Mutant(
        "a leaf of autograd is a copy of its parameter",
        STAYING,
        Leaves,
        "of",
        "view.detach() for view in views",
        "view.detach().clone() for view in views",
    ),
    Mutant(
        "a leaf of autograd adds its gradients up",
        STAYING,
        autograd,
        "backward",
        "count = len(trained)",
        "own = [each.node.name().endswith('AccumulateGrad') for each in trained]\n"
        "    sums = [each.node.metadata if leaf else {} for each, leaf in zip(trained, own)]\n"
        "    for each, one in zip(sums, found):\n"
        "        each['sum'] = one + each['sum'] if 'sum' in each else one\n"
        "    count = len(trained)\n"
        "    found = (*(each['sum'] for each in sums), *found[count:])",
    ),
    Mutant(
        "a leaf of autograd keeps its gradient",
        STAGE_0,
        autograd,
        "backward",
        "count = len(trained)",
        "for each, one in zip(trained, found):\n"
        "        each.node.metadata['kept'] = one\n"
        "    count = len(trained)",
    ),
    Mutant(
        "the gradient of a leaf is that of another",
        STAYING,
        Leaves,
        "of",
        "edges[place] = get_gradient_edge(tensor)",
        "edges[place - 1] = get_gradient_edge(tensor)",
    ),
    Mutant(
        "a shard begins with the first values of its parameter",
        RANKS_3,
        ShardComputer,
        "_initialize",
        "first = part.offset + low - part.position",
        "first = 0",
    ),
    Mutant(
        "an update has one moment for both",
        STAYING,
        shard_compute,
        "_state",
        "*known.views[Role.MOMENT])",
        "*known.views[Role.MOMENT][:1] * 2)",
    ),
    # What autograd saves.
    Mutant(
        "a parameter is saved as it is in forward",
        VALUES,
        Saving,
        "pack",
        "return _Handle(index, start - low, tensor.shape, tensor.stride())",
        "return _Kept(tensor.detach(), version(tensor))",
    ),
    Mutant(
        "a saved tensor is dropped before its backward",
        VALUES,
        Saving,
        "pack",
        "return _Kept(tensor.detach(), version(tensor))",
        "return _Kept(torch.empty_like(tensor), 0)",
    ),
    Mutant(
        "a saved part of a parameter begins where the parameter does",
        SLICED,
        Saving,
        "unpack",
        "view.storage_offset() + packed.offset",
        "view.storage_offset()",
    ),
    Mutant(
        "a saved part of a parameter begins where its bucket does",
        RANKS_3,
        Saving,
        "unpack",
        "view.storage_offset() + packed.offset",
        "packed.offset",
    ),
    Mutant(
        "what was gathered for forward alone is saved without a copy",
        TENSOR,
        Saving,
        "_kept_copy",
        "value.detach().clone()",
        "value.detach()",
    ),
    Mutant(
        "what is gathered for each pass is copied",
        SHARED,
        Computer,
        "_entries",
        "InputEntry.BOUND if again else InputEntry.COPIED",
        "InputEntry.COPIED",
    ),
    Mutant(
        "inputs are kept though their memory is given away",
        SHARED,
        Computer,
        "_entries",
        "if self.work.memory.is_allocated(view.buffer)",
        "if False",
    ),
    Mutant(
        "inputs of a forward outlive it",
        TENSOR,
        Saving,
        "end_forward",
        "self._copied.clear()",
        "pass",
    ),
    Mutant(
        "the graph of a forward outlives its backward",
        STAGE_3,
        autograd,
        "_gradients",
        "tuple(seeds),\n        keeps_graph,",
        "tuple(seeds),\n        True,",
    ),
    Mutant(
        "gradients of parameters are in another order",
        VALUES,
        autograd,
        "_enter_all",
        "parameters[place], record.parameters[place] = parameter, edge",
        "parameters[place], record.parameters[len(trained) - 1 - place] = parameter, edge",
    ),
    Mutant(
        "a recompute draws other numbers than its forward",
        DROPPED,
        Computer,
        "_recompute",
        "with state.restored():",
        "if True:",
    ),
)
