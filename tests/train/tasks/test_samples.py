"""Held-out text as measures read it: block by block, what the whole model computes."""

import pytest
import torch

from polyad.train.tasks.samples import Passages, embedded, losses, through
from tests.helpers.decoders import CASES, opened, theirs, tokens

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", CASES)
def test_blocks_one_by_one_give_the_losses_of_the_model(case, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    model, ids_BT = opened(tmp_path), tokens()
    read_BT, target_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    places_BT = torch.arange(read_BT.shape[1]).expand_as(read_BT)
    scored_BT = torch.ones_like(target_BT, dtype=torch.bool)
    passages = Passages(torch.arange(len(ids_BT)), read_BT, places_BT, target_BT, scored_BT)
    entering = {1: torch.empty(0)}
    with torch.inference_mode():
        wanted = model(read_BT, target_ids_BT=target_BT).logits
        whole = through(model, embedded(model, passages), kept=entering)
        rest = through(model, entering[1], 1)
        torch.testing.assert_close(losses(model, whole, passages), wanted)
        assert torch.equal(rest, whole)
