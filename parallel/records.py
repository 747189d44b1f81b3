"""Reads untrusted JSON files: typed, strict and frozen, with one-line errors.

Every JSON file of a checkpoint or of a folder of weights is read through `parsed`. Nothing is
converted: a string is never accepted as a number, and unknown keys are errors in Polyad's own
    formats.
"""

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")
_SHOWN = 60
_MESSAGES = {"missing": "is missing", "extra_forbidden": "is not known here"}
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = _SHOWN


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
    """Returns the first fault that pydantic found, on one line, with long values shortened."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(_part(part) for part in first["loc"] if part != "[key]")
    message = _MESSAGES.get(first["type"])
    if first["type"] == "json_invalid":
        return "is not JSON: " + first["msg"].removeprefix("Invalid JSON: ")
    if message is None:
        text = first["msg"].removeprefix("Value error, ").replace("dictionary", "object")
        message = f"{quoted(first['input'])}: {text[:1].lower()}{text[1:]}"
        if isinstance(first["input"], dict | BaseModel):
            message = f"{text[:1].lower()}{text[1:]}"
    return f"{where}: {message}" if where else message


def quoted(value: Any) -> str:
    """Formats a value for an error: short, and without terminal control characters."""
    text = _QUOTE.repr(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def _part(part: str | int) -> str:
    text = str(part)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
