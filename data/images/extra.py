"""What needs scikit-learn."""

from collections.abc import Sequence
from typing import Any

from polyad.data.errors import DataError


def _sklearn(module: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise DataError(f"{what}: needs scikit-learn, which cannot be imported") from None


def average_precision(is_positive: Sequence[int], scores: Sequence[float]) -> float:
    """Area under the precision-recall curve.

    Args:
        is_positive: 1 or 0 of each sample.
        scores: The higher, the more likely it is positive.
    """
    metrics = _sklearn("metrics", "the area under a precision-recall curve")
    return float(metrics.average_precision_score(list(is_positive), list(scores)))


def digits() -> tuple[Any, Any]:
    """scikit-learn's handwritten digits: images [N, 8, 8] from 0 to 16, and labels [N]."""
    found = _sklearn("datasets", "--images digits").load_digits()
    return found.images, found.target
