"""The choice between fast kernels and definitions: `POLYAD_KERNELS`.

fast        the default: the fastest that the device, the precision and the installation allow
reference   the definition of every operation, in plain PyTorch
"""

import os

VARIABLE = "POLYAD_KERNELS"
WAYS = ("fast", "reference")


class KernelsError(ValueError):
    """A wrong value of the environment variable: one line."""

    exit_status = 2


def chosen_way(value: str | None) -> str:
    """Reads the variable.

    Args:
        value: Its value; None or empty: it is not set.

    Returns:
        One of `WAYS`.

    Raises:
        KernelsError: It has another value.
    """
    if not value:
        return WAYS[0]
    if value not in WAYS:
        raise KernelsError(f"{VARIABLE}: {value[:200]!r} is not allowed: {' or '.join(WAYS)}")
    return value


# Read once, not in every forward pass: a process computes in one way.
REFERENCE = chosen_way(os.environ.get(VARIABLE)) == "reference"
"""Whether every operation is computed by its definition."""
