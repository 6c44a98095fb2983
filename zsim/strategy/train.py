"""Training settings of a step: precision, the optimizer, batches, the loss scale."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, InstanceOf, Strict, model_validator
from pydantic_core import InitErrorDetails

from zsim.config_error import refusal, refuse
from zsim.strategy.config_table import Count, Flag, Positive, Repeat, Table, Whole
from zsim.strategy.execution import RECIPES, Float4, Float8, Loss, Norms, Quantizer, Recipe
from zsim.strategy.learning_rate import LearningRates
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Adam, Optimizer, ParameterGroup, name_of
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions


def quantizer_of(runtime: RuntimeOptions | None) -> Quantizer:
    """Return the library whose narrow GEMMs a runtime runs; torchao's without a runtime."""
    return Quantizer.TORCHAO if runtime is None else runtime.quantizer


class LossScale(Table):
    """`[train.loss_scale]`: the dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2).

    On overflow, the step is skipped and the scale multiplied by `backoff`, down to `minimum`. After
    `interval` steps without overflow, it is multiplied by `growth`.
    """

    initial: Positive = 2.0**16
    growth: Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)] = 2.0
    backoff: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.5
    interval: Count = 2000
    minimum: Positive = 1.0

    @model_validator(mode="after")
    def _start_above_the_minimum(self) -> Self:
        if self.initial < self.minimum:
            if "initial" in self.model_fields_set:
                why = f"must be at least minimum {self.minimum}"
                refuse([refusal("initial", self.initial, why)])
            refuse([refusal("minimum", self.minimum, f"must be at most initial {self.initial}")])
        return self


NAMED_FORMATS = {"mxfp8": "float8", "nvfp4": "float4"}
"""Names of `precision` that are formats of GEMMs, and the keys that they set."""


class TrainKnobs(Table):
    """Keys of `[train]` that files and `Strategy` have in common.

    Attributes:
        precision: precision of forward and backward. The names of two formats of GEMMs are short
            for bf16 with them: "mxfp8" and "nvfp4".
        compile: blocks are compiled (see `zsim.strategy.execution`).
        float8: scaling of 8-bit GEMMs in the linear layers of blocks; None for GEMMs in the
            compute dtype.
        float4: the same of 4-bit GEMMs.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: with either, first and last layers
            whose GEMMs are in the compute dtype.
        loss: implementation of the loss.
        metrics: number of additional cross entropies that the training loop computes to report them
            (see `zsim.strategy.execution`).
        norms: implementation of RMS norms in blocks that are not compiled.
        holds_logits: the training loop holds the logits until backward has computed their gradient.
        clip_norm: largest global gradient norm; None does not clip.
        loss_scale: loss scaling, used only with fp16.
    """

    precision: Precision = Precision.FP32
    compile: Flag = False
    float8: Float8 | None = None
    float4: Float4 | None = None
    num_layers_at_start_in_bf16: Whole = 0
    num_layers_at_end_in_bf16: Whole = 0
    loss: Loss = Loss.TORCH
    metrics: Whole = 0
    norms: Norms = Norms.FUSED
    holds_logits: Flag = False
    clip_norm: Positive | None = None
    loss_scale: LossScale = LossScale()

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_products(cls, given: object) -> object:
        """Replace the name of a format of GEMMs as `precision` by bf16 with that format."""
        if not isinstance(given, dict) or not isinstance(given.get("precision"), str):
            return given
        if given["precision"] in ("fp8", "float8"):
            why = f"is no dtype of parameters; keep bf16 and set float8 = {', '.join(Float8)}"
            refuse([refusal("precision", given["precision"], why)])
        if (key := NAMED_FORMATS.get(given["precision"])) is None:
            return given
        if given.get(key, given["precision"]) != given["precision"]:
            return given
        return {**given, "precision": Precision.BF16, key: given["precision"]}

    @property
    def recipe(self) -> Recipe | None:
        """Scaling of narrow GEMMs; None if all are in the compute dtype."""
        return self.float8 or self.float4

    @property
    def wide_layers(self) -> tuple[int, int]:
        """Numbers of first and of last layers whose GEMMs are in the compute dtype."""
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16


class Train(TrainKnobs):
    """`[train]` of a strategy: the training settings that a schedule depends on.

    Attributes:
        gradient_accumulation_steps: micro-batches per optimizer step.
        optimizer: the update rule, with its constants.
        learning_rates: learning rate of each step, if the optimizer reads it from the host; None
            leaves it to the caller.
        groups: parameters with separate update rules; the first group that matches counts.
    """

    gradient_accumulation_steps: Repeat = 1
    optimizer: InstanceOf[Optimizer] = Adam()
    learning_rates: LearningRates | None = None
    groups: tuple[InstanceOf[ParameterGroup], ...] = ()

    def contradictions(
        self, runtime: RuntimeOptions | None, offload: Offload, stage: int
    ) -> Iterator[InitErrorDetails]:
        """Yield an error if precision or 8-bit states are not modeled for runtime or offload."""
        yield from self._against_recipe(runtime)
        if self.optimizer.quantized:
            yield from self._against_quantized(runtime, offload, stage)
        if self.precision is not Precision.PURE_BF16:
            return
        if runtime is not None and not runtime.trains_narrow:
            why = f"is not modelled for {type(runtime).__name__}"
            yield refusal("train.precision", self.precision, why)
        if runtime is not None and MemoryTier.NVME in runtime.tiers(stage=stage).values():
            why = "is not modelled with states on NVMe"
            yield refusal("train.precision", self.precision, why)
        if offload.optimizer is not MemoryTier.DEVICE:
            why = f"is not modelled for offload.optimizer = {offload.optimizer}"
            yield refusal("train.precision", self.precision, why)

    def _against_recipe(self, runtime: RuntimeOptions | None) -> Iterator[InitErrorDetails]:
        """Yield an error if a narrow GEMM contradicts another key, or the runtime's library."""
        if self.float8 is not None and self.float4 is not None:
            yield refusal("train.float4", self.float4, f"contradicts float8 = {self.float8}")
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if (count := getattr(self, name)) and self.recipe is None:
                yield refusal(f"train.{name}", count, "needs train.float8 or train.float4")
            elif count and self.recipe is Float8.DELAYED:  # TransformerConfig.__post_init__
                yield refusal(f"train.{name}", count, "does not go with train.float8 = delayed")
        library = quantizer_of(runtime)
        if self.recipe is not None and self.recipe not in RECIPES[library]:
            key = "float8" if self.float8 else "float4"
            why = f"is not in {library}; choose {' or '.join(RECIPES[library])}"
            yield refusal(f"train.{key}", self.recipe, why)

    def _against_quantized(
        self, runtime: RuntimeOptions | None, offload: Offload, stage: int
    ) -> Iterator[InitErrorDetails]:
        """Yield an error if 8-bit states are sharded tensors, or leave the device."""
        kind = name_of(self.optimizer)
        if runtime is not None and not runtime.takes_quantized:
            takers = (each.table() for each in RuntimeOptions.kinds() if each.takes_quantized)
            why = f"is not modelled for {type(runtime).__name__}; use {', '.join(takers)} or adam"
            yield refusal("train.optimizer", kind, why)
        moves = runtime is not None and runtime.tiers(stage=stage)
        if moves or offload.optimizer is not MemoryTier.DEVICE:
            why = "keeps its states on the device; remove the offload, or use adam"
            yield refusal("train.optimizer", kind, why)

    @model_validator(mode="after")
    def _rules_fit_together(self) -> Self:
        rule, found = self.optimizer, []
        if self.learning_rates is not None and not isinstance(rule.learning_rate, str):
            why = f"the optimizer has a constant rate, {rule.learning_rate}"
            found.append(refusal("learning_rates", None, why))
        if self.loss is Loss.CHUNKED_HEAD:
            for name in ("metrics", "holds_logits"):
                if value := getattr(self, name):
                    why = "needs whole logits, which chunked_head has not"
                    found.append(refusal(name, value, why))
        for group in self.groups:
            if type(group.rule) is not type(rule) or group.rule.moments != rule.moments:
                why = f"{group.rule} keeps other moments than the optimizer"
                found.append(refusal("groups", None, why))
        refuse(found)
        return self
