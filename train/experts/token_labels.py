"""The user's own labels of the tokens of a split.

A file (.parquet, or .csv with a header) has the columns `document` and `offset`, as written by
`polyad experts trace`, and one or more others, each of which labels the tokens that have a value.
Other tokens have no class.

Shapes: N tokens of a split, B windows, T tokens of a window.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.text.dataset import TokenStream
from polyad.train.errors import ConfigError, one_line

PLACE = ("document", "offset")
MOST_CLASSES = 64
"""Maximum number of distinct values of a column; each is a class."""
AS_A_TRACE = frozenset(
    {"window", "position", "token_id", "layer", "module", "level", "slot", "expert", "weight",
     "score", "entropy", "norm", "loss"}
)  # fmt: skip
"""Columns of a trace, which are not labels."""


class Labels(NamedTuple):
    """One column of a file."""

    name: str
    classes: Sequence[str]
    class_N: npt.NDArray[np.int8]
    """Class of each token of the split; -1: none."""

    def of(self, position_BT: Tensor) -> Tensor:
        """Returns the classes of tokens of the split; -1: none, or outside.

        Args:
            position_BT: their positions in the split.
        """
        table_N = torch.from_numpy(self.class_N)
        inside_BT = (position_BT >= 0) & (position_BT < len(table_N))
        found_BT = table_N[position_BT.clamp(0, len(table_N) - 1)].long()
        return found_BT.where(inside_BT, -1)


def read_labels(path: Path, stream: TokenStream) -> list[Labels]:
    """Reads a file of labels.

    Args:
        path: the file.
        stream: the split of its tokens.

    Raises:
        ConfigError: it cannot be read, or belongs to another split.
    """
    where = f"--labels {path}"
    table = _table(path, where)
    for name in PLACE:
        if name not in table.column_names:
            raise ConfigError(f"{where}: has no column {name!r}; document and offset are needed")
    names = [each for each in table.column_names if each not in (*PLACE, *AS_A_TRACE)]
    if not names:
        raise ConfigError(f"{where}: has no column with labels beside document and offset")
    document_M, offset_M = (_whole(table, name, where) for name in PLACE)
    lengths = stream.document_lengths
    wrong_M = (document_M < 0) | (document_M >= len(lengths))
    wrong_M |= (offset_M < 0) | (offset_M >= lengths[document_M.clip(0, len(lengths) - 1)])
    if wrong_M.any():
        row = int(wrong_M.argmax())
        raise ConfigError(
            f"{where}: row {row}: document {document_M[row]}, offset {offset_M[row]} is not in the "
            f"split, which has {len(lengths):,} documents"
        )
    begin_D = np.cumsum(lengths, dtype=np.int64) - lengths
    position_M = begin_D[document_M] + offset_M
    return [_column(table, name, position_M, stream.num_tokens, where) for name in names]


def _table(path: Path, where: str) -> Any:
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"{where}: must be a .parquet or .csv file")
    try:
        return parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{where}: cannot be read: {one_line(error)}") from None


def _whole(table: Any, name: str, where: str) -> npt.NDArray[np.int64]:
    import pyarrow as pa

    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ConfigError(f"{where}: column {name!r}: whole numbers are needed in every row")
    found: npt.NDArray[np.int64] = column.to_numpy().astype(np.int64)
    return found


def _column(
    table: Any, name: str, position_M: npt.NDArray[np.int64], tokens: int, where: str
) -> Labels:
    values = [None if each is None else str(each) for each in table.column(name).to_pylist()]
    classes = sorted({each for each in values if each is not None})
    if not 1 <= len(classes) <= MOST_CLASSES:
        raise ConfigError(
            f"{where}: column {name!r} has {len(classes):,} different values; 1 to {MOST_CLASSES} "
            f"are allowed"
        )
    number = {each: place for place, each in enumerate(classes)}
    class_M = np.array([-1 if each is None else number[each] for each in values], dtype=np.int8)
    class_N = np.full(tokens, -1, dtype=np.int8)
    class_N[position_M] = class_M
    again_M = class_N[position_M] != class_M  # a token with several slots may be repeated
    if again_M.any():
        row = int(again_M.argmax())
        raise ConfigError(
            f"{where}: column {name!r}: the token of row {row} has another label in another row"
        )
    return Labels(name, classes, class_N)
