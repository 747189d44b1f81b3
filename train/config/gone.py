"""Keys of configurations that earlier versions had."""

GONE: dict[str, str] = {}
"""By dotted key: what it went with, and what to use instead, as in "rewinding; use `skip`"."""
