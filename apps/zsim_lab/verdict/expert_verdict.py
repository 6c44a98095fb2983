"""Predict published exchanges and layers of experts, and compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.cluster.profile.network import NetworkProfile
from zsim.compute.roofline import kernel_ps
from zsim.files.installed import fitted_kernels, network_profiles, topology
from zsim.model.architecture import Llama
from zsim.model.expert_transport import ExpertChoice, ExpertTransport, transport_of
from zsim.model.experts import Experts, RouterFormat, Scores
from zsim.model.kernel import Kernel
from zsim.model.model import Value
from zsim.model.transformer.mixture import mixture
from zsim.model.transformer.operator import Stretch
from zsim.model.transformer.size import Size
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.expert_library import SentTokens, library_timing
from zsim.network.link_load import bandwidths
from zsim.network.tuner import alone_s, choose
from zsim.strategy.execution import DispatchLibrary, Execution, Float8, Quantizer, TokenDispatch
from zsim.strategy.precision import Precision
from zsim.units import PICOSECONDS_PER_SECOND, format_bytes, format_seconds
from zsim_lab.rows.csv_rows import Unmodelled
from zsim_lab.rows.expert_tables import DispatchRow, ExchangeRow, ExpertRow, LayerRow
from zsim_lab.rows.hardware import GB, GPUS
from zsim_lab.verdict.verdict import Verdict, VerdictRow

H800_BYTES_PER_S = 200 * GB
"""NVLink of an H800 in each direction (Zhao et al. 2025, arXiv 2505.09343, section 4)."""

MEMORY = {"h100": 3350 * GB, "b200": 8000 * GB, "gb200": 8000 * GB}
"""Memory bandwidth, by data sheet."""

SMS = {DispatchLibrary.DEEPEP: 20, DispatchLibrary.HYBRIDEP: 16}
"""Megatron-LM's defaults."""

HEADS, VOCABULARY = 64, 128
"""Attention and vocabulary of the model around a layer, which is not timed."""


def expert_verdict(file: str, rows: Sequence[ExpertRow], left: Sequence[Unmodelled]) -> Verdict:
    """Return the predictions of the rows of a table, which are all of one kind."""
    made: list[VerdictRow] = []
    quantity = "time of a layer"
    shown: Callable[[float], str] = format_seconds
    for row in rows:
        match row:
            case DispatchRow():
                quantity, shown = "bandwidth of an exchange of tokens", _rate
                made.append(_dispatch(row))
            case ExchangeRow():
                quantity = "time of a collective"
                made.append(_exchange(row))
            case LayerRow():
                made += _layer(row)
    return Verdict(
        name=file,
        quantity=quantity,
        rows=tuple(made),
        shown=shown,
        unmodelled=tuple((each.row, each.reason) for each in left),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _links(row: DispatchRow) -> Bandwidths:
    """Return the links in use, of whole nodes or of a part of one."""
    hardware = GPUS[row.gpu]
    gpu = H800_BYTES_PER_S if row.is_h800 else hardware.gpu_bytes_per_s
    used = min(Fraction(1), Fraction(row.ranks, row.domains * hardware.domain))
    return Bandwidths(
        gpu=gpu,
        node=max(1, int(hardware.nic_bytes_per_s * used)),
        pair=hardware.nic_bytes_per_s // hardware.nics,
    )


def dispatch_s(row: DispatchRow) -> float:
    """Return the predicted seconds of an exchange.

    A call of HybridEP also copies the rows that a GPU receives, between its buffer and a tensor.
    """
    transport = _transport(row)
    shape = GroupShape(ranks=row.ranks, nodes=row.domains)
    rows = SentTokens(tokens=float(row.tokens), row_bytes=row.width * row.element_bytes)
    calls_hybrid = row.is_called and transport.library is DispatchLibrary.HYBRIDEP
    plans = calls_hybrid and not row.returns
    timing = library_timing(
        replace(transport, plans=plans),
        rows,
        shape,
        links=_links(row),
        profile=_profile(row.gpu),
        is_called=row.is_called,
    )
    if not calls_hybrid:
        return timing.seconds
    copied = 2 * rows.tokens * rows.row_bytes * transport.choice.places(row.ranks)
    share = fitted_kernels()["h100"].constants.elementwise_forward
    return timing.seconds + copied / (MEMORY[row.gpu] * share)


def _transport(row: DispatchRow) -> ExpertTransport:
    return ExpertTransport(
        library=DispatchLibrary(row.library),
        choice=ExpertChoice(
            experts=row.experts, top_k=row.top_k, groups=row.groups, top_groups=row.top_groups
        ),
        width=row.width,
        num_sms=row.num_sms,
        returns=row.returns,
    )


def _dispatch(row: DispatchRow) -> VerdictRow:
    choice = _transport(row).choice
    # a rack is one domain, yet its trays count as nodes: rows that a GPU receives
    counted = choice.places(row.domains if row.domains > 1 else row.ranks)
    moved = row.tokens * row.width * row.element_bytes * counted
    where = f"{row.ranks} ranks" + (f" on {row.domains} nodes" if row.domains > 1 else "")
    way = "combine" if row.returns else "dispatch"
    return VerdictRow(
        place=row.row,
        name=f"line {row.row} ({row.gpu}, {row.library} {way}, {where}, {row.num_sms} SMs)",
        published=row.bytes_per_s,
        predicted=moved / dispatch_s(row),
        is_kept=not row.is_fitted,
        groups={"library": f"{row.library}, {'h800' if row.is_h800 else row.gpu}"},
        source=row,
    )


def _profile(name: str) -> NetworkProfile:
    return network_profiles()[name].of(None)


def _exchange(row: ExchangeRow) -> VerdictRow:
    hardware = GPUS[row.gpu]
    shape = GroupShape(ranks=row.ranks, nodes=row.domains)
    used = min(Fraction(1), Fraction(row.ranks, row.domains * hardware.domain))
    links = Bandwidths(
        gpu=hardware.gpu_bytes_per_s,
        node=max(1, int(hardware.nic_bytes_per_s * used)),
        pair=hardware.nic_bytes_per_s // hardware.nics,
    )
    profile = _profile(row.profile)
    predicted = alone_s(profile, Collective.ALL_TO_ALL, row.size_bytes, shape, links=links)
    where = f" on {row.domains} racks" if row.domains > 1 else ""
    size = format_bytes(row.size_bytes)
    return VerdictRow(
        place=row.row,
        name=f"line {row.row} ({row.gpu}, {row.ranks} ranks{where}, {size})",
        published=row.seconds,
        predicted=predicted,
        groups={"fabric": "between racks" if row.domains > 1 else "in a rack"},
        source=row,
    )


def layer_shape(row: LayerRow) -> Llama:
    """Return a model of one block with the experts of a layer."""
    library = DispatchLibrary(row.library) if row.library else None
    return Llama(
        layers=1,
        hidden_size=row.width,
        attention_heads=HEADS,
        sequence_length=row.tokens,
        vocab_size=VOCABULARY,
        intermediate_size=row.inner,
        experts=Experts(
            count=row.experts,
            top_k=row.top_k,
            intermediate_size=row.inner,
            scores=Scores.SIGMOID if row.is_sigmoid else Scores.SOFTMAX_OF_CHOSEN,
            score_bias=row.is_sigmoid,
            groups=row.groups,
            top_groups=row.top_groups,
            router_format=RouterFormat.FP32,
        ),
        execution=Execution(
            compiled=True,
            expert=row.ranks,
            dispatch=None
            if library is None
            else TokenDispatch(library=library, num_sms=SMS[library]),
            recipe=Float8.BLOCKWISE if row.is_narrow else None,
            quantizer=Quantizer.TRANSFORMER_ENGINE,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExchanges:
    """Exchanges of a layer on one node, each alone on its links."""

    transport: ExpertTransport | None
    tokens: int
    shape: GroupShape
    links: Bandwidths
    profile: NetworkProfile

    def seconds(self, value: Value, widest: int, *, returns: bool, plans: bool) -> float:
        """Return the seconds of the exchange of a value, or of its gradient.

        Values with fewer elements than the `widest` of a segment ride with it.
        """
        if self.transport is None:
            size_bytes = value.size_bytes
            chosen = choose(
                self.profile, Collective.ALL_TO_ALL, size_bytes, self.shape, links=self.links
            )
            taken_ps = chosen.time_ps(
                size_bytes, gpu_bytes_per_s=self.links.gpu, node_bytes_per_s=self.links.node
            )
            return taken_ps / PICOSECONDS_PER_SECOND
        rides = value.elements < widest
        width = 1 if rides else self.transport.width
        marked = replace(
            self.transport, width=width, returns=returns, plans=plans and not rides, rides=rides
        )
        rows = SentTokens(tokens=float(self.tokens), row_bytes=width * value.dtype.size_bytes)
        return library_timing(
            marked, rows, self.shape, links=self.links, profile=self.profile
        ).seconds


def layer_s(row: LayerRow, *, backward: bool) -> float:
    """Return the predicted seconds of one direction: kernels and exchanges in sequence."""
    shape, formats = layer_shape(row), Precision.BF16
    size = Size(shape=shape, sequences=1, tensor=1, dtype=formats.compute, wide=formats.wide)
    stretches = mixture(size, size.value("normed"), size.value("output"), "layer")
    cluster = topology(row.node, "single_switch", 1)
    gpu = replace(cluster.gpu, kernels=fitted_kernels()[row.kernels].constants)
    group = GroupShape(ranks=row.ranks)
    exchanges = LayerExchanges(
        transport=transport_of(shape),
        tokens=row.tokens,
        shape=group,
        links=bandwidths(cluster, group),
        profile=network_profiles()[row.network].of(None),
    )
    moved_s = 0.0
    for place, stretch in enumerate(each for each in stretches if each.swaps):
        widest = max(each.elements for each in stretch.outputs)
        returns = (place > 0) is not backward
        exchanged = (each for each in stretch.outputs if each.copies or each.name == stretch.routes)
        for value in exchanged:
            moved_s += exchanges.seconds(
                value, widest, returns=returns, plans=not (place or backward)
            )
    ps = sum(kernel_ps(each, gpu) for each in _kernels(stretches, backward=backward))
    return moved_s + ps / PICOSECONDS_PER_SECOND


def _kernels(stretches: Sequence[Stretch], *, backward: bool) -> Iterator[Kernel]:
    for stretch in stretches:
        for operator in stretch.operators:
            yield from (*operator.backward, *operator.trains) if backward else operator.forward


def _layer(row: LayerRow) -> Iterator[VerdictRow]:
    for backward, published in ((False, row.forward_s), (True, row.backward_s)):
        way = "backward" if backward else "forward"
        yield VerdictRow(
            place=row.row,
            name=f"line {row.row} ({row.case}, {way})",
            published=published,
            predicted=layer_s(row, backward=backward),
            groups={
                "dispatcher": row.library or "alltoall",
                "format": "float8 in blocks" if row.is_narrow else "bf16",
            },
            source=row,
        )
