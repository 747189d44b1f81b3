"""Document boundaries in sequences of tokens.

Prepared text is cut into sequences at arbitrary places, so a sequence may hold several documents
and parts of two more. Parts of a document in other sequences do not count here.

Shapes: B batch, T tokens in a sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of each sequence, int64."""

    first_BT: Tensor
    """Position in the sequence of the first token of each token's document."""
    last_BT: Tensor
    """Position in the sequence of the last token of each token's document."""

    @classmethod
    def of(cls, ids_BT: Tensor, end_id: int) -> "Documents":
        """Finds the documents in a batch of sequences.

        Args:
            ids_BT: Token ids.
            end_id: The token that ends each document and belongs to it.
        """
        length = ids_BT.shape[1]
        position_T = torch.arange(length, device=ids_BT.device)
        is_end_BT = ids_BT == end_id
        after_BT = torch.where(is_end_BT, position_T + 1, 0).cummax(1).values
        first_BT = torch.cat([torch.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], 1)
        end_BT = torch.where(is_end_BT, position_T, length - 1)
        return cls(first_BT, end_BT.flip(1).cummin(1).values.flip(1))

    @classmethod
    def whole(cls, batch: int, length: int, device: torch.device) -> "Documents":
        """Treats each sequence as one document.

        Args:
            batch: B.
            length: T.
            device: Device of the tensors.
        """
        first_BT = torch.zeros(batch, length, dtype=torch.int64, device=device)
        return cls(first_BT, torch.full_like(first_BT, length - 1))
