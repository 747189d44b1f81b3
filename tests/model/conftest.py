"""Small models for the tests of this room."""

from collections.abc import Callable

import pytest
import torch

from polyad.model.decoder import Decoder, GPT2Config
from tests.helpers.random_model import built

SMALL = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 4,
    "sequence_length": 16,
    "vocab_size": 61,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def small_config() -> Callable[..., GPT2Config]:
    """Makes a small configuration; keywords override it."""
    return lambda **overrides: GPT2Config.model_validate(SMALL | overrides)


@pytest.fixture
def small_model(small_config: Callable[..., GPT2Config]) -> Callable[..., Decoder]:
    """Makes a small model with weights; keywords override its configuration."""

    return lambda dtype=torch.float32, seed=0, **overrides: built(
        small_config(**overrides), seed, dtype=dtype
    )


@pytest.fixture
def random_ids() -> Callable[..., torch.Tensor]:
    """Makes token ids [batch, length] of the small vocabulary."""

    def make(batch: int, length: int, vocab_size: int = 61) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(vocab_size, (batch, length), generator=generator)

    return make
