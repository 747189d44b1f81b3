"""The key-value cache: the same logits as without it, in any pieces."""

import pytest
import torch

from polyad.model.attention import KeyValueCache
from polyad.model.mumoe.config import FACTORIZATIONS

OVERRIDES = {"dense": {}, "dense, one head": {"bias": False, "num_heads": 1}} | {
    name: {"feed_forward": {"kind": "mumoe", "factorization": name, "num_experts": [4, 3]}}
    for name in FACTORIZATIONS
}


@pytest.mark.parametrize("pieces", [[16], [1] * 16, [5, 1, 1, 9], [1, 15], [8, 8], [3, 2, 4, 1, 6]])
@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_logits_in_pieces_equal_those_of_the_whole(small_model, random_ids, pieces, overrides):
    model = small_model(dtype=torch.float64, **overrides).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        ids = random_ids(3, 16)
        expected = model(ids).logits
        cache = KeyValueCache(3, 16)
        parts = [model(part, cache).logits for part in ids.split(pieces, dim=1)]
    assert cache.length == 16
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-12, rtol=1e-12)


def test_a_cache_that_is_full_refuses_more(small_model, random_ids):
    model, cache = small_model().eval(), KeyValueCache(3, 16)
    with torch.no_grad():
        model(random_ids(1, 15), cache)
        with pytest.raises(ValueError, match=r"input of 17 tokens; model\.sequence_length allows"):
            model(random_ids(1, 2), cache)


def test_bf16_and_recomputation_leave_it_as_it_is(small_model, random_ids):
    model = small_model(dtype=torch.bfloat16, recompute="block").eval()
    ids, cache = random_ids(2, 16), KeyValueCache(3, 16)
    first = model(ids[:, :9], cache).logits
    both = torch.cat([first, model(ids[:, 9:], cache).logits], 1)
    torch.testing.assert_close(both, model(ids).logits, atol=0.02, rtol=0.0)
