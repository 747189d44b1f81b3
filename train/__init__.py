"""Training runs: configuration, loop, losses, metrics and evaluation.

`polyad.train(config)` calls `polyad.train.loading.train`: the package has the name of what it does.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **keys: Any) -> Any:
        from polyad.train.loading import train

        return train(*arguments, **keys)


sys.modules[__name__].__class__ = _Callable
