"""Fitted constants of kernels: fractions of a GPU's peaks, by kind of kernel and shape.

`zsim calibrate` fits these constants and writes them to a file. They are fractions of the peaks
of each GPU, so constants of one GPU are also estimates for similar GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from zsim.cluster.profile import fused_attention, in_training, row_alignment
from zsim.cluster.profile.fused_attention import FusedAttention, FusedAttentionError
from zsim.cluster.profile.host_launch import (
    FREE,
    LaunchCosts,
    LaunchError,
    launch_costs,
    seconds_of,
)
from zsim.cluster.profile.in_training import ALONE, InTraining, InTrainingError
from zsim.cluster.profile.row_alignment import Alignment, AlignmentError
from zsim.model.kernel import CUDNN, KernelKind


class KernelProfileError(ValueError):
    """Invalid constants; the message names the constant, or the file and the constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """Constants of one kind of GPU: fractions of its peak or of its memory bandwidth.

    Attributes:
        processors: streaming multiprocessors, which share the tiles of a product.
        fixed_s: seconds of every kernel in addition to its work.
        product: fraction of the peak of matrix products in large tiles.
        product_fill: steps of the inner extent to fill the pipeline of a tile.
        tile_128x128, tile_128x64, tile_64x64: fractions of `product` in smaller tiles.
        product_memory: fraction of the bandwidth of memory-bound products.
        attention_forward, attention_backward: fractions of the peak of fused attention.
        launch: host time to issue operations.
        flash2, cudnn: constants of these attention kernels; None uses earlier kernels'.
        alignment: slowdown of products with unaligned rows; None for none.
        training: factors of the same kernels in training.
        gpu: kind of GPU that they were fitted to, or scaled for.
        vintage: software and date of the measurements; empty if unknown.
        The others: fractions of the bandwidth of kinds of memory-bound kernels, by direction.
    """

    processors: float
    fixed_s: float
    product: float
    product_fill: float
    tile_128x128: float
    tile_128x64: float
    tile_64x64: float
    product_memory: float
    attention_forward: float
    attention_backward: float
    elementwise_forward: float
    elementwise_backward: float
    norm_forward: float
    norm_backward: float
    activation_forward: float
    activation_backward: float
    softmax_forward: float
    softmax_backward: float
    rotary_forward: float
    rotary_backward: float
    embedding_forward: float
    embedding_backward: float
    cross_entropy_forward: float
    cross_entropy_backward: float
    launch: LaunchCosts = FREE
    flash2: FusedAttention | None = None
    cudnn: FusedAttention | None = None
    alignment: Alignment | None = None
    training: InTraining = ALONE
    gpu: str = ""
    vintage: str = ""

    def __post_init__(self) -> None:
        for name in NAMES:
            if getattr(self, name) <= 0:
                raise KernelProfileError(f"{name}: {getattr(self, name)} must be more than 0")

    @property
    def copying(self) -> float:
        """Fraction of the bandwidth of a copy or a fill: that of any elementwise kernel."""
        return self.elementwise_forward * self.training.memory

    def published_attention(self, version: int) -> FusedAttention | None:
        """Return the published constants of attention kernels of `version`; None if unpublished.

        Without constants of cuDNN, FlashAttention-2 gives them.
        """
        if version == 1:
            return None
        return self.flash2 if version != CUDNN or self.cudnn is None else self.cudnn

    def with_matrix_share(self, share: float) -> "KernelProfile":
        """Return a copy whose products and attention have `share` of their speed."""
        product, forward, backward = (
            share * each for each in (self.product, self.attention_forward, self.attention_backward)
        )
        return replace(
            self,
            product=product,
            attention_forward=forward,
            attention_backward=backward,
            flash2=None if self.flash2 is None else self.flash2.with_share(share),
            cudnn=None if self.cudnn is None else self.cudnn.with_share(share),
        )

    def share(self, kind: KernelKind, *, backward: bool) -> float:
        """Return the fraction of the bandwidth of a kernel, or of the peak for attention."""
        found: float = getattr(self, f"{kind}_{'backward' if backward else 'forward'}")
        return found


NAMES = tuple(
    field.name
    for field in fields(KernelProfile)
    if field.name not in ("launch", "flash2", "cudnn", "alignment", "training", "gpu", "vintage")
)
"""Names of all constants of kernels, in the order of a file."""


ASSUMED = "assumed"
"""Name in place of a sibling when no GPU was fitted: the start values of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedKernels:
    """Content of a file: constants of the kernels of one GPU, and their evidence.

    Attributes:
        gpu: kind of GPU, such as "h100".
        sibling: the GPU whose constants replace those without rows, "assumed" if there is no fitted
            GPU, or empty if all constants have rows.
        rows: number of rows for each kind of kernel.
        publications: sources of the rows.
        errors: median errors by name, of fitted and of held-out rows.
    """

    gpu: str
    constants: KernelProfile
    rows: Mapping[str, int]
    errors: Mapping[str, float]
    publications: tuple[str, ...] = ()
    sibling: str = ""


def text(fitted: FittedKernels) -> str:
    """Return the file, in TOML."""
    lines = [
        "# Written by `zsim calibrate --from DIR`. Do not edit: calibrate again.",
        f'gpu = "{fitted.gpu}"',
        *([f'vintage = "{fitted.constants.vintage}"'] if fitted.constants.vintage else []),
        f'sibling = "{fitted.sibling}"',
        "publications = [",
        *(f'    "{each}",' for each in fitted.publications),
        "]",
        "",
        "[rows]",
        *(f"{name} = {count}" for name, count in sorted(fitted.rows.items())),
        "",
        "[errors]",
        *(f"{name} = {value:.4f}" for name, value in sorted(fitted.errors.items())),
        "",
        "[constants]",
        *(f"{name} = {getattr(fitted.constants, name):.4g}" for name in NAMES),
        "",
        "[launch]  # not fitted: as published, see zsim/cluster/profile/host_launch.py",
        *(f"{name} = {each:.4g}" for name, each in seconds_of(fitted.constants.launch).items()),
        *_attention_text("flash2", fitted.constants.flash2),
        *_attention_text("cudnn", fitted.constants.cudnn),
        *_alignment_text(fitted.constants.alignment),
        *in_training.text(fitted.constants.training),
    ]
    return "\n".join(lines) + "\n"


def _attention_text(kernels: str, published: FusedAttention | None) -> list[str]:
    if published is None:
        return []
    lines = [
        "",
        f"[{kernels}]  # not fitted: as published, see apps/zsim_lab/rows/gpu_kinds.py",
    ]
    return [*lines, *(f"{name} = {getattr(published, name):.4g}" for name in fused_attention.NAMES)]


def _alignment_text(published: Alignment | None) -> list[str]:
    if published is None:
        return []
    head = "[alignment]  # not fitted: as published, see apps/zsim_lab/rows/gpu_kinds.py"
    return ["", head, *(f"{name} = {getattr(published, name):.4g}" for name in row_alignment.NAMES)]


def parse(name: str, table: Mapping[str, object]) -> FittedKernels:
    """Return the content of a file that was read as `table`; `name` is for messages.

    Raises:
        KernelProfileError: a key is missing, unknown or of the wrong kind.
    """
    keys = {"gpu", "sibling", "publications", "rows", "errors", "constants", "launch"}
    optional = {"vintage", "flash2", "cudnn", "alignment", "training"}
    for key in (*sorted(set(table) - keys - optional), *sorted(keys - set(table))):
        state = "missing" if key in keys else "not a key of fitted kernels"
        raise KernelProfileError(f"{name}: {key}: {state}")
    publications = table["publications"]
    if not isinstance(publications, list):
        raise KernelProfileError(f"{name}: publications must be a list")
    constants = _numbers(name, table, "constants")
    for each in (*sorted(set(constants) - set(NAMES)), *sorted(set(NAMES) - set(constants))):
        state = "missing" if each in NAMES else "not a constant"
        raise KernelProfileError(f"{name}: constants: {each}: {state}")
    try:
        launch = launch_costs(_numbers(name, table, "launch"))
    except LaunchError as error:
        raise KernelProfileError(f"{name}: launch: {error}") from None
    training = table.get("training")
    try:
        shares = ALONE if training is None else in_training.parse(_table(name, table, "training"))
    except InTrainingError as error:
        raise KernelProfileError(f"{name}: training: {error}") from None
    flash2, cudnn = (_published(name, table, kernels) for kernels in ("flash2", "cudnn"))
    aligned = _published_alignment(name, table)
    try:
        profile = KernelProfile(
            **constants,
            launch=launch,
            flash2=flash2,
            cudnn=cudnn,
            alignment=aligned,
            training=shares,
            gpu=str(table["gpu"]),
            vintage=str(table.get("vintage", "")),
        )
    except KernelProfileError as error:
        raise KernelProfileError(f"{name}: constants: {error}") from None
    return FittedKernels(
        gpu=str(table["gpu"]),
        sibling=str(table["sibling"]),
        constants=profile,
        rows={each: int(value) for each, value in _numbers(name, table, "rows").items()},
        errors=_numbers(name, table, "errors"),
        publications=tuple(str(each) for each in publications),
    )


def _published(name: str, table: Mapping[str, object], kernels: str) -> FusedAttention | None:
    if kernels not in table:
        return None
    numbers = _named_numbers(name, table, kernels, fused_attention.NAMES)
    try:
        return FusedAttention(**numbers)
    except FusedAttentionError as error:
        raise KernelProfileError(f"{name}: {kernels}: {error}") from None


def _published_alignment(name: str, table: Mapping[str, object]) -> Alignment | None:
    if "alignment" not in table:
        return None
    numbers = _named_numbers(name, table, "alignment", row_alignment.NAMES)
    try:
        return Alignment(**numbers)
    except AlignmentError as error:
        raise KernelProfileError(f"{name}: alignment: {error}") from None


def _named_numbers(
    name: str, table: Mapping[str, object], key: str, names: Sequence[str]
) -> dict[str, float]:
    numbers, known = _numbers(name, table, key), set(names)
    for each in (*sorted(set(numbers) - known), *sorted(known - set(numbers))):
        state = "missing" if each in known else "not a constant"
        raise KernelProfileError(f"{name}: {key}: {each}: {state}")
    return numbers


def _table(name: str, table: Mapping[str, object], key: str) -> dict[str, object]:
    found = table[key]
    if not isinstance(found, dict):
        raise KernelProfileError(f"{name}: {key} must be a table of numbers")
    return {str(each): value for each, value in found.items()}


def _numbers(name: str, table: Mapping[str, object], key: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for each, value in _table(name, table, key).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise KernelProfileError(f"{name}: {key}: {each} must be a number")
        numbers[str(each)] = float(value)
    return numbers
