"""The order of samples, computed for all numbers at once with whole arrays."""

import numpy as np
from xxhash import xxh3_64_intdigest


def permutation(count, key):
    """The permutation of `polyad.data.text.samples.shuffled`, as a list."""
    half = 3
    while 4**half < count:
        half += 1
    side = 2**half
    left, right = np.divmod(np.arange(side**2), side)
    for number in range(4):
        table = [xxh3_64_intdigest(f"{key}/{number}/{value}".encode()) for value in range(side)]
        mixed = np.array([value % side for value in table])
        left, right = right, left ^ mixed[right]
    following = (left * side + right).tolist()
    found = []
    for number in range(count):
        number = following[number]
        while number >= count:
            number = following[number]
        found.append(number)
    return found
