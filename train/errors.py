"""How a command ends when it does not succeed. The exit statuses of `polyad` in one place.

0   done
1   the run failed, or the program has a fault (then with a traceback)
2   bad input: one line names the key or file, the value, and what is allowed
130 interrupted from the keyboard
"""


class ConfigError(ValueError):
    """Bad configuration: one line that names the key, the value and what is allowed."""

    exit_status = 2


class RunError(RuntimeError):
    """A run that cannot go on, though its input was good: one line that says why."""

    exit_status = 1
