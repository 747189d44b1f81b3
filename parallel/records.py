"""Reads JSON files that others have written: typed, strict and frozen, with one-line errors.

Nothing is converted: a string is never accepted as a number, and unknown keys are errors in
Polyad's own formats.
"""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")


class Record(BaseModel):
    """The base class of records; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def plain_name(name: str) -> str:
    """Checks that a file name cannot lead to another folder.

    Raises:
        ValueError: it is a path, hidden, or contains unprintable characters.
    """
    bad = not name.isprintable() or name.startswith(".") or set(name) & set("/\\")
    if bad or not 0 < len(name.encode()) <= 255:
        raise ValueError("the plain name of a file in this folder is needed")
    return name


PlainName = Annotated[str, AfterValidator(plain_name)]


def parsed(kind: Any, content: bytes) -> Any:
    """Parses JSON of a known form.

    Args:
        kind: a `Record`, or another type that pydantic supports.
        content: the content of the file.

    Returns:
        An instance of that type.

    Raises:
        FormError: it is not JSON, or has another form.
    """
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        raise FormError(fault_of(error)) from None
    except RecursionError:
        raise FormError("is nested too deeply") from None


class FormError(ValueError):
    """JSON of a wrong form: the place, the value, and what is expected."""


def fault_of(error: ValidationError) -> str:
    """Returns the first fault that pydantic found, on one line: key, value, what is expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "is not JSON: " + first["msg"].removeprefix("Invalid JSON: ")
    parts = [str(part) for part in first["loc"] if part != "[key]"]
    where = ".".join(part if part.isprintable() else repr(part) for part in parts)
    if first["type"] == "missing":
        return f"{where}: is missing"
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {first['input']!r:.60}: {text}".removeprefix(": ")
