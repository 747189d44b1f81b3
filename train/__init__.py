"""`polyad.train(config, **keys)` trains a model in this process, as `polyad train` does.

    run = polyad.train("quickstart/gpt2-smoe", data__path="runs/stdlib", train__steps=20)

`config` is a file, the name of one that ships with Polyad, its content, or the folder of a run,
which continues. `keys` are values of other keys, with two underscores for a dot; None is null. It
returns a `polyad.Run`.

The package of that name has all of training: configuration, loop, losses, metrics and evaluation.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, config: Any, **keys: Any) -> Any:
        from polyad.train.loading import train

        return train(config, **keys)


sys.modules[__name__].__class__ = _Callable
