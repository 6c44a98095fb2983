"""Rows of a result as a pandas DataFrame; pandas is an optional dependency."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zsim.mistake import MistakeError

if TYPE_CHECKING:
    from pandas import DataFrame


def data_frame(rows: Sequence[Mapping[str, object]]) -> "DataFrame":
    """Return `rows` as a DataFrame, with a column for each key.

    Raises:
        MistakeError: pandas is not installed.
    """
    try:
        pandas: Any = import_module("pandas")
    except ModuleNotFoundError as error:
        raise MistakeError(f"to_pandas: needs {error.name} (pip install 'zsim[pandas]')") from None
    frame: DataFrame = pandas.DataFrame.from_records(list(rows))
    return frame
