from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zsim.model.architecture import GPT, Architecture, Attention, Llama
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import BATCH, Model
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch import model_from
from zsim_torch.module.description import BatchSize
from zsim_torch.module.transformer import transformer as plain_transformer
from zsim_torch.module.unit import ModuleUnitError

WIDTH, TOKENS, WORDS = 8, 6, 11


class Encoder(nn.Module):
    """As people write them: the whole forward in one place, blocks of torch's own, tied ends."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(blocks)
        )
        self.between = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scale = places.float().cos()[:, None].to(self.words.weight.dtype)
        hidden = self.words(tokens) * scale
        for block in self.blocks:
            hidden = self.between(block(hidden)) * scale
        logits = functional.linear(self.norm(hidden), self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def inputs(sequences: int = 3) -> tuple[Tensor, Tensor]:
    words = torch.zeros(sequences, TOKENS, dtype=torch.int64)
    return words, words


def described(**options: object) -> Model:
    return model_from(Encoder(), inputs(), **options)  # type: ignore[arg-type]  # as a user gives


@pytest.mark.one_commit_in(6)
def test_blocks_are_found_and_what_stands_around_them_is_start_and_end() -> None:
    model = described()
    assert [unit.name for unit in model.units] == ["start", "blocks.0", "blocks.1", "end"]
    assert [unit.checkpoint for unit in model.units] == [False, True, True, False]
    start, first, second, end = model.units
    assert [each.name for each in start.parameters] == ["words.weight"]
    # What runs between two units belongs to the former, and after the last one to the end.
    between = {"between.weight", "between.bias"}
    assert {each.name for each in first.parameters} >= between
    assert not {each.name for each in second.parameters} & between
    ends = {"words.weight", "norm.weight", "norm.bias"} | between
    assert {each.name for each in end.parameters} == ends
    assert model.parameter_count == sum(each.numel() for each in Encoder().parameters())
    assert (model.name, model.micro_batch_size, model.tokens) == ("Encoder", 3, 3 * TOKENS)


def test_whatever_a_later_unit_reads_flows_there() -> None:
    model = described()
    values = {value.name: value for unit in model.units for value in unit.segments[0].outputs}
    start, first, second, end = (unit.segments[0] for unit in model.units)
    scale, hidden = start.outputs
    assert (scale.elements, scale.requires_gradient) == (TOKENS, False)
    assert (hidden.elements, hidden.requires_gradient) == (3 * TOKENS * WIDTH, True)
    assert set(first.inputs) == {scale.name, hidden.name}
    assert set(second.inputs) == {first.outputs[-1].name}
    assert set(end.inputs) == {scale.name, second.outputs[-1].name, BATCH}
    assert values["end/loss"].elements == 1


def test_flops_count_each_product_forward_and_backward() -> None:
    model = described()
    rows = 3 * TOKENS
    linear = rows * (4 * WIDTH * WIDTH + 2 * WIDTH * 16 + WIDTH * WIDTH)
    attention = 2 * rows * TOKENS * WIDTH
    assert model.forward_flops == 2 * (2 * (linear + attention) + rows * WIDTH * WORDS)
    assert model.backward_flops == 2 * model.forward_flops
    kinds = {kernel.kind for unit in model.units for kernel in unit.segments[0].forward}
    assert kinds >= {
        KernelKind.MATMUL,
        KernelKind.ATTENTION,
        KernelKind.NORM,
        KernelKind.ACTIVATION,
        KernelKind.EMBEDDING,
        KernelKind.CROSS_ENTROPY,
    }


def products(model: Model) -> list[Kernel]:
    (unit,) = model.units
    return [each for each in unit.segments[0].forward if each.kind is KernelKind.MATMUL]


def test_products_carry_their_shape() -> None:
    module = nn.Linear(5, 7)
    (product,) = products(model_from(module, (torch.zeros(3, 5),)))
    assert (product.shape, product.flops) == ((1, 3, 7, 5), 2 * 3 * 7 * 5)


def test_a_module_that_returns_no_loss_is_given_the_mean_of_what_it_returns() -> None:
    model = model_from(nn.Conv2d(2, 3, 3), (torch.zeros(4, 2, 8, 8),), precision=Precision.FP16)
    (unit,) = model.units
    assert unit.segments[0].outputs[-1].elements == 1
    # 4 images of 3 channels and 6 x 6 places, 2 channels of 3 x 3 each.
    assert model.forward_flops == 2 * 4 * 3 * 6 * 6 * 2 * 3 * 3
    # Backward needs the input alone: it makes the gradient of the weight, none of the input.
    assert unit.segments[0].saves_input
    assert model.backward_flops == model.forward_flops


def test_a_unit_that_is_called_twice_is_two_units_with_one_set_of_parameters() -> None:
    shared = nn.Linear(4, 4)
    model = model_from(nn.Sequential(shared, nn.Tanh(), shared), (torch.zeros(2, 4),), units=["0"])
    assert [unit.name for unit in model.units][:2] == ["0", "0@2"]
    assert model.units[0].parameters == model.units[1].parameters
    assert model.parameter_count == 20


@pytest.mark.matrix(9)
@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize("stage", [0, 3])
def test_it_can_be_planned_and_proved(stage: int, checkpointing: Checkpointing) -> None:
    model = described(precision=Precision.BF16)
    strategy = Strategy(
        parallel=Parallel(data=4),
        zero=Zero(stage=stage),
        activations=Activations(checkpointing=checkpointing),
        train=Train(precision=Precision.BF16, gradient_accumulation_steps=2),
    )
    assert check(make_schedule(model, strategy), model) == ()


def test_the_module_and_its_memory_are_not_touched() -> None:
    module = Encoder()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model_from(module, inputs())
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())
    hooks = [vars(each) for each in module.modules()]
    assert not any(each["_forward_hooks"] or each["_forward_pre_hooks"] for each in hooks)


def test_a_large_module_needs_no_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2**17, 2**17) for _ in range(4)))
    model = model_from(module, (torch.empty(2**12, 2**17, device="meta"),), size=BatchSize())
    assert model.parameter_count == 4 * (2**34 + 2**17)
    assert (model.tokens, model.micro_batch_size) == (1, 1)


class Peeks(nn.Linear):
    """Looks at a value."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's own name)
        """What a linear layer makes, if it likes the input."""
        return super().forward(input) if float(input.sum()) > 0 else input


def test_what_cannot_be_described_is_refused_in_one_line() -> None:
    given = (torch.zeros(2, 4),)
    with pytest.raises(ModuleUnitError, match=r"^module: it does not run without data: .*"):
        model_from(Peeks(4, 4), given)
    with pytest.raises(
        ModuleUnitError, match=r"^module: .* no tensor that depends on a parameter$"
    ):
        model_from(nn.Identity(), given)
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(ModuleUnitError, match=r"^unit 7: the module has no such submodule$"):
        model_from(nested, given, units=["7"])
    with pytest.raises(ModuleUnitError, match=r"^unit 0\.0: it lies in unit 0$"):
        model_from(nested, given, units=["0", "0.0"])
    nested[0].requires_grad_(requires_grad=False)
    with pytest.raises(ModuleUnitError, match=r"^parameter 0\.0\.weight: requires_grad is False"):
        model_from(nested, given)


GPT2 = GPT(layers=2, hidden_size=64, attention_heads=2, sequence_length=128, vocab_size=300)
LLAMA = Llama(
    layers=2,
    hidden_size=64,
    attention_heads=4,
    key_value_heads=2,
    intermediate_size=180,
    sequence_length=128,
    vocab_size=300,
)


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    "shape",
    [
        GPT2,
        LLAMA,
        replace(GPT2, attention=Attention.PLAIN),
        replace(GPT2, attention=Attention.PLAIN, recompute_attention=True),
    ],
)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_what_a_unit_holds_while_it_runs_is_what_liveness_over_its_kernels_says(
    shape: Architecture, precision: Precision
) -> None:
    batch = torch.zeros(4, shape.sequence_length + 1, dtype=torch.int64)
    measured = model_from(plain_transformer(shape, seed=None), (batch,), precision=precision)
    written = transformer(shape, micro_batch_size=4, precision=precision)
    flow = 4 * 128 * 64 * precision.compute.size_bytes
    for one, other in zip(measured.units, written.units, strict=True):
        (mine,), (theirs,) = one.segments, other.segments
        pairs = (
            (mine.forward_workspace_bytes, theirs.forward_workspace_bytes),
            (mine.backward_workspace_bytes, theirs.backward_workspace_bytes),
        )
        # Run again, attention holds most after the gradient of the block's output is gone: that is
        # held by the schedule, not by a module that runs as a whole.
        off = 1.05 if shape.recompute_attention else 0.1
        for found, expected in pairs:
            assert found == pytest.approx(expected, abs=off * flow), one.name
