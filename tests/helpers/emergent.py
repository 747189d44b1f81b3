"""A tiny GPT-2 whose feed-forwards are in groups."""

from typing import Any

from polyad.model.decoder import GPT2Config
from tests.helpers.training import MODEL


def emoe_model(**feed_forward: Any) -> GPT2Config:
    """The tiny model with groups of units in its blocks; keywords say more of them."""
    section = {"kind": "emoe", "num_experts": 4, "top_k": 2, "hidden_size": 48}
    return GPT2Config.model_validate(MODEL.model_dump() | {"feed_forward": section | feed_forward})
