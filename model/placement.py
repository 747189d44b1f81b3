"""Which blocks of a model have experts, as a key of a feed-forward says it."""

from typing import TypeAlias

from polyad.model.config import SectionError

Placement: TypeAlias = int | list[int]
"""1 all blocks, n the last of every n, or a list of block numbers, from 0."""


def check_placement(value: object) -> object:
    """Checks what a file says, before pydantic does: its error on a union lists every member's.

    Raises:
        ValueError: It is no placement.
    """
    numbers, least = (value, 0) if isinstance(value, list) else ([value], 1)
    if any(type(number) is not int or number < least for number in numbers):
        raise ValueError("1 or more, or a list of block numbers from 0")
    return value


def check_once(key: str, placement: Placement) -> None:
    """Checks that no block is listed twice.

    Args:
        key: Of the placement in its section.
        placement: What it says.

    Raises:
        SectionError: One is.
    """
    listed = placement if isinstance(placement, list) else []
    if len(set(listed)) < len(listed):
        raise SectionError(f"@{key}: {placement} names a block twice")


def check_blocks(key: str, placement: Placement, num_layers: int) -> None:
    """Checks that the model has these blocks.

    Args:
        key: Of the placement in its section.
        placement: What it says.
        num_layers: Of the model.

    Raises:
        SectionError: It has not, or none would have experts.
    """
    placed = [block for block in range(num_layers) if is_placed(placement, block)]
    listed = placement if isinstance(placement, list) else []
    if any(block >= num_layers for block in listed) or not placed:
        raise SectionError(
            f"@{key}: {placement} is not allowed: the model has blocks 0 to {num_layers - 1}, and "
            f"at least one has to route"
        )


def is_placed(placement: Placement, block: int) -> bool:
    """Whether a block has experts.

    Args:
        placement: Of the feed-forward.
        block: Its number, from 0.
    """
    if isinstance(placement, list):
        return block in placement
    return (block + 1) % placement == 0
