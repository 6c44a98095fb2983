"""A scenario with every number determined; it builds model and schedule, the slowest parts.

Runs that differ only in their cluster share one model and one schedule.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, Flaky, Neighbour
from zsim.limits import limits
from zsim.memory import handed_out
from zsim.memory.host_setup import HostSetup
from zsim.model.architecture import GPT, Architecture, Llama, LoRA
from zsim.model.architecture_error import ArchitectureError
from zsim.model.equal_units import equal_units
from zsim.model.experts import Experts, Latent
from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import in_blocks
from zsim.model.transformer import transformer
from zsim.network.link_load import Decision
from zsim.runtimes.registry import make_schedule
from zsim.scenario.expert_counts import EXPERT_COUNTS, ExpertCounts
from zsim.scenario.tables import ModelTable, ScenarioError
from zsim.schedule.bind import bound
from zsim.schedule.binding import BindingError
from zsim.schedule.schedule import Discipline
from zsim.strategy.execution import Execution, Recomputed
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy

SEQUENCE = 1024
"""Tokens of a sequence if only the number of parameters is given (GPT-2's, as in the paper)."""

PARAMETERS_MAX = 10**15
"""Maximum parameters of a model: thirty times the largest published one, to catch a wrong exponent.
"""

FAMILIES: dict[str, type[Architecture]] = {"gpt": GPT, "llama": Llama}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario with every number determined.

    Attributes:
        shape: `[model]`, from which the model is built.
        strategy: how the model is sharded and trained.
        micro_batch_size: sequences per micro-batch and replica.
        allocator: how device memory is allocated.
        cluster: the hardware of the run.
        steps: optimizer steps of a run.
        faults: slow or dead hardware of the cluster.
        neighbours: other jobs on the cluster.
        flaky: probability of the only fault; None if all faults are certain.
        decision: the forced algorithm and settings of collectives; None if nothing is set.
        pinned: how pinned host memory is allocated.
        setup: how the model is built before the first step.
        experts: numbers of copies of tokens for experts.
    """

    shape: ModelTable
    strategy: Strategy
    micro_batch_size: int
    allocator: Discipline
    cluster: Cluster
    steps: int
    faults: tuple[Fault, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    flaky: Flaky | None = None
    decision: Decision | None = None
    pinned: Discipline = Discipline.CACHING
    setup: HostSetup = HostSetup.SHARDED
    experts: ExpertCounts = EXPERT_COUNTS

    @property
    def schedule_key(self) -> Hashable:
        """All inputs of model and schedule: equal keys give equal schedules."""
        memory = self.micro_batch_size, self.allocator, self.pinned
        return self.shape, self.strategy, *memory, self.experts

    def make_model(self) -> Model:
        """Return the model, as one rank of the tensor axis sees it.

        Raises:
            ScenarioError: its fields contradict each other, or the tensor axis.
        """
        try:
            if self.shape.parameters is None:
                return self._transformer()
            return equal_units(
                parameters=self._parameters_alone(self.shape.parameters),
                tokens=SEQUENCE * self.micro_batch_size,
                tensor=self.strategy.parallel.tensor,
                precision=self.strategy.train.precision,
            )
        except (ModelError, ArchitectureError) as error:
            raise ScenarioError(str(error)) from None

    def make_job(self) -> Job:
        """Return the schedule, with everything that is needed to run it.

        Raises:
            ScenarioError: the model cannot exist.
            ModelError: the schedule cannot be made for it.
        """
        model = self.make_model()
        self._need_bounded(model)
        made = make_schedule(model, self.strategy)
        job = Job(
            schedule=handed_out(made, self.allocator, self.pinned),
            model=model,
            cluster=self._cluster_of(model),
            steps=self.steps,
            setup=self.setup,
        )
        return job if not made.counts else self._bound(job)

    def _bound(self, job: Job) -> Job:
        """Return a job whose named counts have the numbers of the binding.

        Raises:
            ScenarioError: the binding does not fit the schedule.
        """
        try:
            found = bound(job.schedule, self.experts.binding)
        except BindingError as error:
            raise ScenarioError(f"experts.{str(error).removeprefix('binding.')}") from None
        return replace(
            job,
            schedule=found.schedule,
            named=job.schedule,
            binding=self.experts.binding,
            excess=found.excess,
        )

    def _cluster_of(self, model: Model) -> Cluster:
        """Return the cluster, whose host launches CUDA graphs if there are any."""
        runtime = self.strategy.zero.emulate
        graphs = None if runtime is None else runtime.cuda_graphs
        if graphs is None:
            return self.cluster
        from zsim.scenario.graphed_work import with_graphs  # noqa: PLC0415 (only with graphs)

        return with_graphs(self.cluster, model, graphs)

    def _need_bounded(self, model: Model) -> None:
        """Raise ScenarioError if the model, or its number of sub-groups on NVMe, is too large."""
        count = model.parameter_count
        if count > PARAMETERS_MAX:
            allowed = f"must be at most {PARAMETERS_MAX:,}"
            raise ScenarioError(f"model: {count:,} parameters {allowed}")
        offload, most = self.strategy.offload, limits().visits
        if offload.optimizer is not MemoryTier.NVME:
            return
        parts = -(-model.trained_count // (model.tensor * self.strategy.parallel.data))
        groups = -(-parts // offload.sub_group_elements)
        if groups > most:
            raise ScenarioError(
                f"offload.sub_group_elements: {offload.sub_group_elements} must be at least "
                f"{-(-parts // most)}: a rank has {parts:,} elements"
            )

    def _transformer(self) -> Model:
        strategy = self.strategy
        model = transformer(
            self._architecture(),
            micro_batch_size=self.micro_batch_size,
            tensor=strategy.parallel.tensor,
            precision=strategy.train.precision,
            sequence=strategy.cuts_tokens,
            keeps_gathered=strategy.keeps_gathered,
            in_place_loss=strategy.in_place_loss,
        )
        if model.routing is not None:
            model = replace(model, routing=model.routing.limited(self.experts.maximum))
        return in_blocks(model) if strategy.parallel.pipeline > 1 else model

    def _architecture(self) -> Architecture:
        """Return the shape that `[model]` gives; the family gives the defaults."""
        table = self.shape
        if table.hf_config is not None:
            raise ScenarioError(f"model.hf_config: {table.hf_config!r} was not read")
        if table.name is not None:
            raise ScenarioError(f"model.name: {table.name!r} was not looked up")
        beside = {"architecture", "name", "hf_config", "parameters"}
        given = table.model_dump(exclude=beside, exclude_none=True)
        if table.lora is not None:
            given["lora"] = LoRA(
                rank=table.lora.rank,
                targets=table.lora.targets or (),
                quantization=table.lora.quantization,
                quantizes_head=table.lora.quantizes_head,
                casts_weights=table.lora.casts_weights,
                keeps_inputs=table.lora.keeps_inputs,
                dropout=table.lora.dropout,
            )
        if table.experts is not None:
            given["experts"] = Experts(**table.experts.model_dump(exclude_none=True))
        if table.latent is not None:
            given["latent"] = Latent(**table.latent.model_dump(exclude_none=True))
        again = Recomputed.ATTENTION in self.strategy.recomputes
        return FAMILIES[table.architecture](
            **given, recompute_attention=again, execution=self._execution()
        )

    def _execution(self) -> Execution:
        """Return the execution of blocks on GPUs of the cluster."""
        any_layout = self.cluster.gpu.fp8_any_layout
        return replace(self.strategy.execution, any_layout=any_layout)

    def _parameters_alone(self, parameters: int) -> int:
        fields = [name for name in ModelTable.model_fields if name != "parameters"]
        given = [name for name in fields if name in self.shape.model_fields_set]
        if given:
            raise ScenarioError(f"model.parameters: {parameters} stands alone, without {given[0]}")
        return parameters
