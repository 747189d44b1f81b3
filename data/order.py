"""The order of the samples of an epoch."""

from xxhash import xxh3_64_intdigest

_ROUNDS = 4
_LEAST_HALF = 3
"""Bits of half a number: with fewer, four rounds favour some permutations."""


def shuffled(number: int, count: int, key: str) -> int:
    """Permutes the numbers below `count`, one at a time, in constant time and memory.

    A cycle-walking Feistel network (Black & Rogaway 2002, "Ciphers with arbitrary finite
    domains"): a permutation of the next larger power of four, repeated until the result is small
    enough.

    Args:
        number: At least 0 and below `count`.
        count: How many numbers are permuted.
        key: Names the permutation.

    Returns:
        The number at that place of the permutation.
    """
    half = max(_LEAST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_ in range(_ROUNDS):
            mixed = xxh3_64_intdigest(f"{key}/{round_}/{right}".encode())
            left, right = right, left ^ (mixed & mask)
        number = left << half | right
        if number < count:
            return number
