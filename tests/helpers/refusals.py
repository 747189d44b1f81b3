"""What is refused, in one line."""

from collections.abc import Callable
from typing import Any

import pytest


def line_of(error: type[Exception], call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The one line of the error with which a call refuses its arguments."""
    with pytest.raises(error) as caught:
        call(*arguments, **named)
    (line,) = str(caught.value).splitlines()
    return line
