"""How much of each expert every token gets, for the pass over held-out text.

Shapes: B windows, T tokens of a window, S experts of all levels side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polyad.train.experts.probing import RoutedLayer, deciding

Reader = Callable[[Tensor], dict[str, Tensor]]


@contextmanager
def reading(model: nn.Module, layers: Sequence[RoutedLayer]) -> Iterator[Reader]:
    """Gives a function from input ids [B, T] to the coefficients [B, T, S] of each layer, by name.

    Of sparse experts a coefficient is the weight of the expert's output, 0 if it was not selected.

    Args:
        model: in evaluation mode, on one device.
        layers: of the model.
    """
    with deciding(model, layers) as decisions:

        def read(input_ids_BT: Tensor) -> dict[str, Tensor]:
            with torch.inference_mode():
                model(input_ids_BT)
                result = {
                    name: decision.coefficients().view(*input_ids_BT.shape, -1)
                    for name, decision in decisions.items()
                }
            decisions.clear()
            return result

        yield read
