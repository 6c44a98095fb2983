"""The tables of published runs that are known, by the name of their file."""

from zsim.calibration import (
    azure_zero3,
    fsdp2_llama,
    fsdp_mpt,
    internevo,
    kempner_h200,
    simumax_b200,
    vtrain,
    zero01,
)
from zsim.calibration.run_rows import RunTable

TABLES: dict[str, RunTable] = {
    table.file: table
    for table in (
        fsdp_mpt.TABLE,
        fsdp2_llama.TABLE,
        zero01.TABLE,
        azure_zero3.TABLE,
        internevo.TABLE,
        kempner_h200.TABLE,
        simumax_b200.TABLE,
        vtrain.SINGLE,
        vtrain.MULTI,
    )
}
