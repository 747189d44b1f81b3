"""No token of a decoder of another library sees a later one."""

import pytest
import torch

from tests.helpers.decoders import CASES, WORDS, opened, theirs, tokens
from tests.helpers.routing import assert_causal

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", CASES)
def test_nothing_depends_on_later_tokens(case, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    model, ids_BT = opened(tmp_path, torch.float64), tokens()
    assert model.config.vocab_size == WORDS
    for last in (0, 8, 21):
        assert_causal(model, ids_BT, last)
