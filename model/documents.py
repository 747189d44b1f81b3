"""Documents in sequences of tokens: where the one that a token belongs to begins and ends.

Prepared text is cut into sequences wherever that falls, so a sequence may hold several documents
and parts of two more. What is in another sequence is no part of a document here.

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
    """Position of its last token."""

    @classmethod
    def of(cls, ids_BT: Tensor, end_id: int) -> "Documents":
        """Finds the documents of a text.

        Args:
            ids_BT: Token ids.
            end_id: The token that ends each document, its last one.
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
        """Sequences that are one document each.

        Args:
            batch: B.
            length: T.
            device: Where the tensors are.
        """
        first_BT = torch.zeros(batch, length, dtype=torch.int64, device=device)
        return cls(first_BT, torch.full_like(first_BT, length - 1))
