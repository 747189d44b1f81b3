"""The one error of this room that a user causes."""


class DataError(ValueError):
    """Bad input to `data`: one line that names the file or key, the value and what is allowed."""

    exit_status = 2
