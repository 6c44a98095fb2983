"""What a scenario says, every number settled; its model, which takes longest, is made from that.

Runs that differ in their cluster alone have one model and one schedule.
"""

from dataclasses import dataclass

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, Neighbour
from zsim.model.architecture import GPT, Architecture, ArchitectureError, Llama, LoRA
from zsim.model.equal_units import equal_units
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks
from zsim.model.transformer import transformer
from zsim.network.link_load import Decision
from zsim.scenario.tables import ModelTable, ScenarioError
from zsim.schedule.schedule import Discipline
from zsim.strategy.strategy import Checkpointing, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences per micro-batch and replica, and micro-batches per step."""

    micro_batch_size: int
    accumulation_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a model and its schedule are made from: equal ones make equal schedules."""

    model: ModelTable
    strategy: Strategy
    batches: Batches
    allocator: Discipline


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a scenario says, every number settled, the model not made yet: that takes longest."""

    model: ModelTable
    cluster: Cluster
    strategy: Strategy
    batches: Batches
    steps: int
    allocator: Discipline
    faults: tuple[Fault, ...]
    neighbours: tuple[Neighbour, ...]
    decision: Decision | None

    @property
    def recipe(self) -> Recipe:
        """What its schedule is made from; the rest is what that runs on."""
        return Recipe(
            model=self.model,
            strategy=self.strategy,
            batches=self.batches,
            allocator=self.allocator,
        )


TABLE_OF = {
    "loss_scale": "train.loss_scale",
    "clip_norm": "train.clip_norm",
    "data": "parallel.data",
    "tensor": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "replicate": "parallel.replicate",
    "partition_checkpoints": "activations.partition",
    "offload_checkpoints": "activations.offload",
    "checkpointing": "activations.checkpointing",
    "micro_batch_size": "train.micro_batch_size",
    "loss": "train.loss",
    "metrics": "train.metrics",
    "holds_logits": "train.holds_logits",
    "frozen": "model.frozen",
    "hidden_groups": "model.hidden_groups",
}
"""Where a scenario has a field of `Strategy` or `Model`, if not in `[zero]` or `[model]`."""


def with_table(message: str, table: str = "zero") -> str:
    """`message`, which starts with a field of `Strategy` or `Model`, with the scenario's name."""
    field, _, rest = message.partition(":")
    name, dot, inner = field.partition(".")
    return f"{TABLE_OF.get(name, f'{table}.{name}')}{dot}{inner}:{rest}"


SEQUENCE = 1024
"""Tokens of a sequence where only the number of parameters is known (GPT-2's, as in the paper)."""


FAMILIES: dict[str, type[Architecture]] = {"gpt": GPT, "llama": Llama}


def model_of(found: Outline | Recipe) -> Model:
    """The model, as one rank of the tensor axis sees it.

    Raises:
        ScenarioError: its fields contradict each other, or the tensor axis.
    """
    table, strategy, batches = found.model, found.strategy, found.batches
    try:
        if table.parameters is None:
            model = transformer(
                _shape(table, strategy),
                micro_batch_size=batches.micro_batch_size,
                tensor=strategy.tensor,
                precision=strategy.precision,
                sequence=strategy.cuts_tokens,
                keeps_whole=strategy.keeps_whole,
                in_place_loss=strategy.in_place_loss,
            )
            return in_blocks(model) if strategy.pipeline > 1 else model
        fields = [name for name in ModelTable.model_fields if name != "parameters"]
        given = [name for name in fields if name in table.model_fields_set]
        if given:
            raise ScenarioError(
                f"model.parameters: {table.parameters} stands alone, without {given[0]}"
            )
        return equal_units(
            parameters=table.parameters,
            tokens=SEQUENCE * batches.micro_batch_size,
            tensor=strategy.tensor,
            precision=strategy.precision,
        )
    except (ModelError, ArchitectureError) as error:
        raise ScenarioError(with_table(str(error), "model")) from None


def _shape(table: ModelTable, strategy: Strategy) -> Architecture:
    """The shape that `[model]` gives; what it does not say is the family's."""
    if table.hf_config is not None:
        raise ScenarioError(f"model.hf_config: {table.hf_config!r} was not read")
    given = table.model_dump(exclude={"architecture", "hf_config", "parameters"}, exclude_none=True)
    again = strategy.checkpointing is Checkpointing.SELECTIVE
    if table.lora is not None:
        given["lora"] = LoRA(rank=table.lora.rank, targets=table.lora.targets or ())
    return FAMILIES[table.architecture](
        **given, recompute_attention=again, execution=strategy.execution
    )
