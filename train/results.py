"""Results of a command in two forms: JSON values, and aligned lines for display.

No other file aligns columns, or decides how NaN is written.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def json_value(value: Any) -> Any:
    """Converts a value to one that JSON can represent, recursively.

    Numbers that JSON cannot represent become null. Dataclasses and named tuples become objects with
    a key per field, unless they have a `to_json`; arrays and tensors become lists.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "to_json"):
        return json_value(value.to_json())
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    if isinstance(value, dict):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return value


def aligned(rows: Iterable[Sequence[str]], sides: str = "<>") -> list[str]:
    """Formats rows as lines with aligned columns.

    Args:
        rows: rows of equally many cells.
        sides: alignment of each column, `<` or `>`; the last one applies to all further columns. By
            default a name on the left, and numbers on the right.
    """
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width, side = max(map(len, cells)), sides[min(number, len(sides) - 1)]
        columns.append([cell.ljust(width) if side == "<" else cell.rjust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
