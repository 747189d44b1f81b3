"""What a command found, in its two forms: values that JSON can write, and aligned lines for people.

No other file aligns columns, or decides what becomes of a NaN.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def json_value(value: Any) -> Any:
    """The form of a value that JSON can write, however deep it is.

    Numbers that JSON cannot write become null. Dataclasses and named tuples become objects with a
    key for each field, unless their `to_json` gives another form; arrays and tensors become lists.
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
    """Lines in which the cells of a column have one width.

    Args:
        rows: as many cells each.
        sides: of each column the side that its cells stand at, `<` or `>`; the last one holds for
            all columns that follow. By default a name to the left, and numbers to the right.
    """
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width, side = max(map(len, cells)), sides[min(number, len(sides) - 1)]
        columns.append([cell.ljust(width) if side == "<" else cell.rjust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
