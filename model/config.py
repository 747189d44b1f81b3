"""The base class of every configuration model in this package."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LARGEST_WHOLE_NUMBER = 2**63 - 1
LARGEST, SMALLEST = 1e30, 1e-30
"""Bounds of a number's magnitude: products of a few such numbers are finite in fp32."""


def whole_number_or(least: int, *others: object) -> BeforeValidator:
    """Annotates a union of whole numbers and a few other values, for one error in one line, where
    pydantic lists those of all members.

    Args:
        least: The smallest number.
        others: The other values, which YAML can write.
    """
    allowed = [f"{least} or more", *("null" if each is None else str(each) for each in others)]

    def check(value: object) -> object:
        if value not in others and (type(value) is not int or value < least):
            raise ValueError(f"{', '.join(allowed[:-1])} or {allowed[-1]}")
        return value

    return BeforeValidator(check)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a tree to dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def divisors(number: int) -> list[int]:
    """Lists all divisors of a number, in order.

    Args:
        number: At least 1.
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def nearest_two(numbers: Iterable[int], wanted: int) -> str:
    """Lists the two of some numbers that are nearest to another, for an error."""
    near = sorted(numbers, key=lambda number: abs(number - wanted))[:2]
    return ", ".join(map(str, sorted(near)))


class SectionError(ValueError):
    """Values of a section that contradict one another or the model.

    A section does not know its own key in the configuration; `within` adds it.

    Args:
        message: The error, with an @ before each key of the section.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("@", ""))
        self._message = message

    def within(self, section: str) -> str:
        """Returns the message with full keys.

        Args:
            section: The dotted key of the section.
        """
        return self._message.replace("@", f"{section}.")


@dataclass(frozen=True)
class NameIn:
    """Annotates a string that has to be a name in a registry, to which plugins may add."""

    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks the name; the error is that of a `Literal` of all names."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: object) -> JsonSchemaValue:
        """Lists the names."""
        return {"type": "string", "enum": list(self.registry)}

    def _checked(self, name: str) -> str:
        *names, last = map(repr, self.registry)
        if repr(name) not in (*names, last):
            expected = f"{', '.join(names)} or {last}" if names else last
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": expected}
            )
        return name


@dataclass(frozen=True)
class SectionIn:
    """Annotates a section whose `kind` names its class in a registry, to which plugins may add."""

    registry: Callable[[], "Mapping[str, type[Config]]"]
    """Returns the classes by kind; called when a section is checked."""
    default: str
    """The kind of a section without one."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Checks a section by its class; errors are those of a union by `kind`."""
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Lists the classes."""
        kinds = tuple(self.registry().values())
        union: Any = Annotated[Union[kinds], Field(discriminator="kind")]  # noqa: UP007  # of a tuple
        description: JsonSchemaValue = handler(TypeAdapter(union).core_schema)
        return description

    def _checked(self, value: object) -> "Config":
        classes = self.registry()
        if isinstance(value, Config):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        kind = value.get("kind", self.default)
        if not isinstance(kind, str) or kind not in classes:
            context = {"discriminator": "'kind'", "tag": str(kind)}
            expected = ", ".join(map(repr, classes))
            raise PydanticKnownError("union_tag_invalid", context | {"expected_tags": expected})
        return classes[kind].model_validate({"kind": kind} | value)


class Config(BaseModel):
    """Keyword-only, frozen, validated; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _number_can_be_computed_with(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER:
            raise ValueError(f"Input should be at most {LARGEST_WHOLE_NUMBER}")
        if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
            raise ValueError(f"Input should be from {SMALLEST:g} to {LARGEST:g} in magnitude")
        return value
