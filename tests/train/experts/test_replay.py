"""Router replay: a model's own experts give its own numbers, and others those of a loop by hand.

Shapes: B rows, T tokens, N tokens of all rows, D width, E experts, K experts of a token.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from polyad.model.build import build_model, materialize, read_model_config
from polyad.model.output import ask_for_statistics
from polyad.model.smoe.layer import SelectingMoE, SparseMoE
from polyad.train.errors import ConfigError, RunError
from polyad.train.experts.replay import (
    LayerChoices,
    check_choices,
    first_rows,
    force_equal_loads,
    read_choices,
    recording,
    replaying,
    write_choices,
)
from tests.helpers.bert import LENGTHS, padded_input, small_bert
from tests.helpers.everyday import everyday
from tests.helpers.routed_models import step
from tests.helpers.routing import make, make_config, scatter

SMALL = {
    "kind": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
    "vocab_size": 61,
}  # fmt: skip
SPARSE = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 24}
LAYERS = {
    "plain": {},
    "one expert, in one block": {"top_k": 1, "placement": [1]},
    "similarity": {"graph": "similarity", "router_noise": 1.0},
    "attention": {"graph": "attention"},
    "groups and bias": {
        "score_function": "sigmoid", "num_groups": 3, "top_groups": 2, "group_score": "best_two",
        "balancing_rate": 0.1, "routed_scaling_factor": 2.5, "shared_hidden_size": 16,
    },
    "groups of units": {"kind": "emoe", "expert_hidden_size": None, "num_experts": 8, "top_k": 3},
    "learned groups": {
        "kind": "emoe", "expert_hidden_size": None, "num_experts": 8, "score": "linear",
        "experts": "grouped",
    },
}  # fmt: skip


def decoder(seed: int = 0, recompute: str = "none", **feed_forward: Any) -> nn.Module:
    """A small language model with experts."""
    section = {k: v for k, v in (SPARSE | feed_forward).items() if v is not None}
    config = read_model_config(SMALL | {"feed_forward": section, "recompute": recompute})
    model = build_model(config)
    materialize(model, seed)
    ask_for_statistics(
        model,
        losses=frozenset({"balance_loss", "z_loss", "importance_loss", "load_loss"}),
        samples=False,
    )
    return scatter(model, 0.1)


def spoiled(model: nn.Module) -> nn.Module:
    """The model, whose layers would select other experts by themselves."""
    for layer in model.modules():
        if isinstance(layer, SelectingMoE):
            experts = layer.config.num_experts
            layer.router.selection.agreed = lambda x, n=experts: (
                x if x.is_floating_point() else (x + 1) % n
            )
    return model


def tokens(rows: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(7))


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] is None) == (value is None), name
        assert value is None or torch.equal(ours[name], value), name


@pytest.mark.parametrize("recompute", ["none", "block"])
@everyday("name", LAYERS, keep=["plain", "groups and bias", "groups of units"])
def test_own_experts_give_what_the_model_computed(name, recompute):
    expected = step(decoder(**LAYERS[name]), tokens())
    model = decoder(recompute=recompute, **LAYERS[name])
    with recording(model) as recorder:
        assert_equal(step(model, tokens()), expected)
    choices = recorder.choices()
    other = spoiled(decoder(recompute=recompute, **LAYERS[name]))
    with replaying(other, choices):
        assert_equal(step(other, tokens()), expected)
    other.zero_grad()
    assert not torch.equal(step(other, tokens())["logits"], expected["logits"])


def test_micro_batches_take_the_rows_in_order_also_computed_again():
    model = spoiled(decoder(recompute="block"))
    with recording(decoder()) as recorder:
        pass
    with pytest.raises(RunError, match="there was no forward pass"):
        recorder.choices()
    whole = decoder()
    with recording(whole) as recorder:
        whole(tokens())
    ids = tokens()
    parts = [ids[:1], ids[1:3], ids[3:]]
    reference = decoder()
    for part in parts:
        summed_loss(reference(part).logits, part).backward()
    with replaying(model, recorder.choices()), recording(model) as again:
        for part in parts:
            summed_loss(model(part).logits, part).backward()
    for name, (ids_NK, tokens_R, _) in recorder.choices().items():
        assert torch.equal(again.choices()[name].expert_ids_NK, ids_NK)
        assert torch.equal(again.choices()[name].tokens_R, tokens_R)
    ours, theirs = (dict(each.named_parameters()) for each in (model, reference))
    assert_equal({n: p.grad for n, p in ours.items()}, {n: p.grad for n, p in theirs.items()})


def summed_loss(logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    flat = logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    return cross_entropy(*flat, reduction="sum")


class OneLayer(nn.Module):
    """A model of one sparse layer."""

    def __init__(self, layer: SparseMoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, u_BTD: torch.Tensor) -> torch.Tensor:
        """What the layer makes of its input."""
        y_BTD, _ = self.layer(u_BTD, u_BTD)
        return y_BTD


def by_hand(layer: SparseMoE, u_ND: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """All experts on all tokens; those of a token are weighed by their scores over their sum."""
    score = layer.router.score
    scores_NE = (u_ND @ score.weight.T + score.bias).softmax(-1)
    chosen_NE = torch.zeros_like(scores_NE).scatter(1, ids_NK, 1.0)
    weights_NE = scores_NE * chosen_NE
    weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
    experts = layer.experts
    inner_ENF = u_ND @ experts.up + experts.up_bias.unsqueeze(1)
    y_END = gelu(inner_ENF, approximate="tanh") @ experts.down + layer.output_bias.unsqueeze(1)
    return torch.einsum("ne,end->nd", weights_NE, y_END)


def test_other_experts_give_a_dense_computation_over_them():
    layer = make(SparseMoE, make_config(top_k=3))
    generator = torch.Generator().manual_seed(2)
    u_BTD = torch.randn(2, 5, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    ids_NK = torch.rand(10, 6, generator=generator).argsort(-1)[:, :3]
    choices = {"layer": LayerChoices(ids_NK, torch.tensor([5, 5]), 6)}
    with replaying(OneLayer(layer), choices):
        ours = OneLayer(layer)(u_BTD)
    theirs = by_hand(layer, u_BTD.flatten(0, 1), ids_NK).view_as(ours)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    parameters = [u_BTD, *layer.parameters()]
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    found, expected = (torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-11, rtol=1e-10)
    names = ["input", *(name for name, _ in layer.named_parameters())]
    of_router = found[names.index("router.score.weight")]
    assert of_router.abs().max() > 1e-3  # through the scores at the experts that were given


def test_padding_is_no_part_of_a_recording():
    head = {"kind": "classification", "num_classes": 3}
    keys = {"feed_forward": SPARSE, "head": head}
    model, (ids, mask, _) = small_bert(**keys), padded_input()
    with torch.no_grad(), recording(model) as recorder:
        expected = model(ids, mask_BT=mask).logits
    choices = recorder.choices()
    name = "blocks.0.feed_forward"
    assert choices[name].tokens_R.tolist() == list(LENGTHS)
    assert len(choices[name].expert_ids_NK) == sum(LENGTHS)
    other = spoiled(small_bert(**keys))
    with torch.no_grad(), replaying(other, choices):
        # Other micro-batches, each with less padding.
        first = other(ids[:1], mask_BT=mask[:1]).logits
        rest = other(ids[1:, :11], mask_BT=mask[1:, :11]).logits
    torch.testing.assert_close(torch.cat([first, rest]), expected)


def test_a_backward_pass_that_is_not_of_the_newest_rows_is_refused():
    model = decoder(recompute="block")
    with recording(model) as recorder:
        model(tokens())
    choices = recorder.choices()
    ids = tokens()
    with replaying(model, choices):
        first, _ = model(ids[:2]).logits, model(ids[2:]).logits
        with pytest.raises(RunError, match="not the newest one is computed again"):
            first.sum().backward()
    with replaying(model, choices):
        logits = model(ids).logits
    with pytest.raises(RunError, match="outside of `replaying`"):
        logits.sum().backward()
    expected = decoder()(ids).logits
    assert torch.equal(model(ids).logits, expected)
    model(ids).logits.sum().backward()


def test_what_selects_nothing_is_refused_by_name():
    factors = {"kind": "mumoe", "num_experts": [4], "rank": 4, "hidden_size": 16}
    with (
        pytest.raises(
            ConfigError, match=r"blocks\.0\.feed_forward \(MuMoE\) gives a token a share"
        ),
        recording(decoder(expert_hidden_size=None, **factors)),
    ):
        pass
    dense = decoder(num_experts=None, expert_hidden_size=None, kind="dense")
    for refused in (recording(dense), replaying(dense, {})):
        with pytest.raises(ConfigError, match="the model has no experts"), refused:
            pass
    with pytest.raises(ConfigError, match="the model has no experts"):
        force_equal_loads(dense)


@pytest.mark.parametrize(
    ("feed_forward", "line"),
    [
        ({"num_experts": 5}, "blocks.0.feed_forward: has 5 experts, but 6 in the recording"),
        ({"top_k": 3}, "blocks.0.feed_forward: a token uses 3 experts, but 2 in the recording"),
        ({"placement": 2}, "a layer blocks.0.feed_forward, but the model has blocks.1.feed_fo"),
    ],
)
def test_recordings_of_other_models_are_refused(feed_forward, line):
    model = decoder()
    with recording(model) as recorder:
        model(tokens())
    other = decoder(**feed_forward)
    with pytest.raises(ConfigError) as error, replaying(other, recorder.choices()):
        other(tokens())
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_other_rows_are_refused():
    model = decoder()
    with recording(model) as recorder:
        model(tokens())
    choices = recorder.choices()
    with (
        pytest.raises(ConfigError, match="the recording has 4 rows, and row 4 is read"),
        replaying(model, choices),
    ):
        model(tokens(rows=5))
    with (
        pytest.raises(ConfigError, match="row 0 has 9 tokens, but 16 in the recording"),
        replaying(model, choices),
    ):
        model(tokens()[:, :9])
    expected = model(tokens()).logits  # its own experts again
    with replaying(spoiled(model), choices, fills=True):
        ids = tokens()
        more = model(torch.cat([ids, ids[3:], ids[3:]])).logits
    torch.testing.assert_close(more[:4], expected)
    torch.testing.assert_close(more[5], expected[3])


@pytest.mark.parametrize(
    ("ids", "lengths", "line"),
    [
        ([[0, 6]], [1], "x: layer: expert 6 is not one of 0 to 5"),
        ([[-1, 2]], [1], "x: layer: expert -1 is not one of 0 to 5"),
        ([[0, 1], [2, 2]], [2], "x: layer: token 1 has the same expert twice: [2, 2]"),
        ([[0, 1], [2, 3]], [1], "x: layer: its rows have 1 tokens, and experts are named of 2"),
        ([0, 1], [2], "x: layer: whole numbers [tokens, experts] and [rows] are needed"),
        ([[0.0, 1.0]], [1], "x: layer: whole numbers [tokens, experts] and [rows] are needed"),
    ],
)
def test_experts_that_cannot_be_are_refused(ids, lengths, line):
    choices = LayerChoices(torch.tensor(ids), torch.tensor(lengths), 6)
    with pytest.raises(ConfigError) as error:
        check_choices({"layer": choices}, "x")
    assert str(error.value) == line


def test_a_file_holds_what_was_recorded(tmp_path):
    model = decoder()
    with recording(model) as recorder:
        model(tokens())
    choices = recorder.choices()
    write_choices(tmp_path / "routing.safetensors", choices, {"split": "test"})
    found, about = read_choices(tmp_path / "routing.safetensors")
    assert about["split"] == "test"
    assert list(found) == list(choices)
    for name, each in choices.items():
        assert torch.equal(found[name].expert_ids_NK, each.expert_ids_NK)
        assert torch.equal(found[name].tokens_R, each.tokens_R)
        assert found[name].num_experts == 6
    left = first_rows(found, 3)["blocks.1.feed_forward"]
    assert (len(left.expert_ids_NK), left.tokens_R.tolist()) == (48, [16, 16, 16])


def test_files_that_are_none_are_refused_in_one_line(tmp_path):
    path = tmp_path / "routing.safetensors"

    def refusal() -> str:
        with pytest.raises(ConfigError) as error:
            read_choices(path)
        assert error.value.exit_status == 2
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no such file" in refusal()
    path.write_bytes(b"nothing of it")
    assert "is damaged or not a safetensors file" in refusal()
    tensors = {"layer.expert_ids": torch.tensor([[0, 1]]), "layer.tokens": torch.tensor([1])}
    save_file(tensors, path)
    assert "is not a recording of routing" in refusal()
    for experts in ("not JSON", "[4]", json.dumps({"layer": 0})):
        save_file(tensors, path, {"format": "polyad routing 1", "experts": experts})
        assert "experts" in refusal()
    save_file(tensors, path, {"format": "polyad routing 1", "experts": json.dumps({"other": 4})})
    assert "contains tensors other than" in refusal()
    save_file(tensors, path, {"format": "polyad routing 1", "experts": json.dumps({"layer": 1})})
    assert "layer: expert 1 is not one of 0 to 0" in refusal()


@pytest.mark.slow
def test_compiled_blocks_record_and_replay_too():
    model = decoder()
    with recording(model) as recorder:
        expected = model(tokens()).logits
    other = spoiled(decoder())
    for block in other.blocks:  # type: ignore[union-attr]
        block.compile()
    apart = other(tokens()).logits
    with replaying(other, recorder.choices()):
        assert torch.equal(other(tokens()).logits, expected)
    assert not torch.allclose(apart, expected)
    assert torch.equal(other(tokens()).logits, apart)


@pytest.mark.parametrize(("top_k", "experts"), [(2, 6), (3, 4), (1, 5)])
def test_forced_loads_are_equal_or_one_token_apart(top_k, experts):
    model = decoder(top_k=top_k, num_experts=experts)
    ask_for_statistics(model, losses=frozenset(), samples=False)
    before = model(tokens()).routing
    force_equal_loads(model)
    with recording(model) as recorder:
        output = model(tokens())
    assignments = 4 * 16 * top_k
    for name, (ids_NK, _, _) in recorder.choices().items():
        counts = ids_NK.flatten().bincount(minlength=experts)
        assert counts.max() - counts.min() == (assignments % experts > 0), name
        assert ids_NK[1].tolist() == [(top_k + k) % experts for k in range(top_k)]
    for stats, own in zip(output.routing, before, strict=True):
        assert (stats.load_E * assignments).round().max() == -(-assignments // experts)
        assert own.load_E.max() > stats.load_E.max()
    summed_loss(output.logits, tokens()).backward()
    gradient = model.get_parameter("blocks.0.feed_forward.router.score.weight").grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-6
