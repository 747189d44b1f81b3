"""What groups of units keep of the activation, against a loop over tokens."""

import json

import pytest
import torch
from torch.nn.functional import gelu

from polyad.launch.cli import run
from polyad.model.build import build_model, materialize
from polyad.train.experts.kept_activation import kept_activation
from tests.helpers.emergent import emoe_model
from tests.helpers.training import MODEL

GROUPS, UNITS = 4, 12
NAME = "blocks.1.feed_forward"


def a_model(**changes):
    """Only the second block is in groups, of 12 units each, two a token."""
    model = build_model(emoe_model(blocks=[1], **changes))
    materialize(model, seed=3)
    return model.eval()


@pytest.mark.parametrize("experts", ["masked", "grouped"])
@pytest.mark.parametrize(("select", "used"), [("top_k", 2), ("not_top_k", 2), ("bottom_k", 2)])
def test_shares_are_those_of_a_loop_over_tokens(experts, select, used):
    model = a_model(select=select, experts=experts)
    layer = dict(model.named_modules())[NAME]
    read = []
    layer.dispatcher.register_forward_pre_hook(lambda _, args: read.append(args[:2]))
    ids = torch.randint(0, MODEL.vocab_size, (3, 7), generator=torch.Generator().manual_seed(1))
    with kept_activation(model) as sums, torch.no_grad():
        model(ids)
        model(ids[:1, :2])
    assert list(sums) == [NAME]
    whole = kept = best = 0.0
    for tokens, selected in read:
        for token, chosen in zip(tokens, selected.expert_ids_NK.tolist(), strict=True):
            assert len(chosen) == used
            by_group = []
            for group in range(GROUPS):
                inner = 0.0
                for unit in range(UNITS):
                    key, bias = layer.experts.keys[group, unit], layer.experts.bias[group, unit]
                    inner += gelu(key @ token + bias, approximate="tanh").abs().item()
                by_group.append(inner)
            whole += sum(by_group)
            kept += sum(by_group[group] for group in chosen)
            best += sum(sorted(by_group)[-used:])
    found = sums[NAME].result()
    assert found.share == pytest.approx(kept / whole, rel=1e-5)
    assert found.best == pytest.approx(best / whole, rel=1e-5)
    assert found.chance == used / GROUPS
    assert found.share <= found.best


def test_all_groups_keep_all_of_it():
    model = a_model(top_k=GROUPS)
    with kept_activation(model) as sums, torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert sums[NAME].result() == pytest.approx((1.0, 1.0, 1.0))


def test_nothing_was_read_and_dense_feed_forwards_have_no_share():
    with kept_activation(a_model()) as sums:
        pass
    assert sums[NAME].result() is None
    dense = build_model(MODEL)
    with kept_activation(dense) as sums:
        pass
    assert not sums


@pytest.mark.slow
@pytest.mark.distributed
def test_the_report_has_it(trained, tmp_path):
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    arguments = ["report", str(trained("emoe")), "--output", str(page), "--tokens", "2000"]
    assert run([*arguments, "--json", str(result)]) == 0
    (found,) = json.loads(result.read_text())["kept_activation"].values()
    assert found["chance"] == 0.5
    assert 0.3 < found["share"] <= found["best"] < 1
    assert f"keep {100 * found['share']:.1f}% of the activation" in page.read_text()
