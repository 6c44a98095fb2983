"""Tables of exchanges and layers of experts: each row with its published figures.

A file of `apps/zsim_lab/expert_rows` describes the columns of a table, as for tables of training
runs (`zsim_lab.rows.training_tables`). `kind` is the kind of its rows, and `row` has their fields.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim_lab.rows.csv_rows import Cells, NotModelledError, Unmodelled, parsed
from zsim_lab.rows.training_tables import RowScope, forms_in, row_model


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRow:
    """An exchange of rows of tokens by a library.

    Attributes:
        row: line number in the file; the header is line 1.
        gpu: key of zsim_lab.rows.hardware.GPUS; of an H800 that of the H100, if `is_h800`.
        library: of `DispatchLibrary`.
        returns: rows are returned and added.
        is_called: the time is that of a call from PyTorch.
        domains: NVLink domains of the ranks.
        tokens, width, element_bytes: rows of each rank, and their elements and bytes for each.
        bytes_per_s: published: rows that a GPU receives, or that it sends to nodes, over time.
        is_fitted: constants were fitted to it.
    """

    row: int
    source: str
    gpu: str
    is_h800: bool
    library: str
    returns: bool
    is_called: bool
    ranks: int
    domains: int
    tokens: int
    width: int
    element_bytes: float
    experts: int
    top_k: int
    groups: int
    top_groups: int
    num_sms: int
    bytes_per_s: float
    is_fitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """A layer of experts alone, forward and backward.

    `library` is empty for NCCL's all-to-all; GEMMs of an `is_narrow` layer are in blocks of 8 bits.
    """

    row: int
    source: str
    case: str
    kernels: str
    network: str
    node: str
    ranks: int
    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int
    is_sigmoid: bool
    groups: int
    top_groups: int
    library: str
    is_narrow: bool
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow:
    """An all-to-all of NCCL's tests; `profile` has constants for the links of its GPU."""

    row: int
    source: str
    gpu: str
    profile: str
    ranks: int
    domains: int
    size_bytes: int
    seconds: float


ExpertRow = DispatchRow | LayerRow | ExchangeRow
KINDS: Mapping[str, type[ExpertRow]] = {
    "dispatch": DispatchRow,
    "layer": LayerRow,
    "collective": ExchangeRow,
}


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """A file, by its name without suffix, and the description of its rows."""

    file: str
    form: Mapping[str, Any]

    def read(self, rows: Iterable[Cells]) -> tuple[list[ExpertRow], list[Unmodelled]]:
        """Return the rows that are modelled, and the others with a reason.

        Raises:
            MeasuredError: a column is missing.
        """
        model, kind = row_model(self.form["columns"]), KINDS[self.form["kind"]]
        found: list[ExpertRow] = []
        left: list[Unmodelled] = []
        for line, cells in enumerate(rows, start=2):
            try:
                scope = RowScope(self.form, parsed(self.file, model, cells).model_dump())
                scope.need_modelled()
                fields = scope.filled(self.form["row"])
                found.append(kind(row=line, source=scope["source"], **fields))
            except NotModelledError as error:
                left.append(Unmodelled(file=self.file, row=line, reason=str(error)))
        return found, left


EXPERT_TABLES: dict[str, ExpertTable] = {
    name: ExpertTable(name, form) for name, form in forms_in("expert_rows")
}
"""All tables of experts, by the name of their file."""
