"""The one place where torchvision is used: RandAugment.

torchvision's wheel is built for CUDA, and cannot be imported beside a CPU build of torch, for want
of the libraries of its compiled operators. Transforms need none of them: here their names are
declared, and the import is tried again. Without that, `transformers` could not be imported either
where torchvision is installed.
"""

import functools
import importlib
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyad.data.errors import DataError
from polyad.data.images.config import RandAugmentConfig

_MISSING = (
    "data.augmentation.randaugment: needs torchvision, which is not installed; `pip "
    "install -c constraints.txt -e '.[images]'` installs it; or set it to null"
)


@functools.cache
def _transforms() -> Any:
    try:
        importlib.import_module("torchvision")
    except ImportError:
        raise DataError(_MISSING) from None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        importlib.import_module("torchvision")
    return importlib.import_module("torchvision.transforms.v2")


_declared: list[torch.library.Library] = []
"""Kept, or the declarations would end."""


def _declare_operators() -> None:
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(  # type: ignore[no-untyped-call]
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    _declared.append(library)


def available() -> bool:
    """Whether torchvision can be imported."""
    try:
        _transforms()
    except DataError:
        return False
    return True


@functools.cache
def _operation(operations: int, magnitude: int) -> Any:
    return _transforms().RandAugment(operations, magnitude)


def randaugment(image_CHW: Tensor, chosen: RandAugmentConfig, seeds: tuple[int, ...]) -> Tensor:
    """Applies RandAugment.

    torchvision draws from PyTorch's global generator, which is seeded for the image and then left
    as it was.

    Args:
        image_CHW: uint8.
        chosen: How much of it.
        seeds: What its random numbers follow from.

    Returns:
        uint8 [C, H, W].

    Raises:
        DataError: torchvision is not installed.
    """
    operation = _operation(chosen.operations, chosen.magnitude)
    generator = torch.default_generator
    state = generator.get_state()
    drawn = np.random.SeedSequence((*seeds, 1)).generate_state(1, np.uint64)[0]
    generator.manual_seed(int(drawn >> np.uint64(1)))
    try:
        result: Tensor = operation(image_CHW)
    finally:
        generator.set_state(state)
    return result
