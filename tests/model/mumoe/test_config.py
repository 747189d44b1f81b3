"""What a configuration may say, the message if it says something else, and the rank solver."""

from functools import partial

import pytest

from polyad.model.config import SectionError
from polyad.model.decoder_config import GPT2Config
from polyad.model.mumoe.config import FACTORIZATIONS, MuMoEConfig
from polyad.train.config.rules import validate
from polyad.train.config.run import parse_config
from polyad.train.tasks.language import with_vocabulary
from tests.helpers.sections import KEY, run_of, section_of

parse = partial(section_of, "mumoe")


def test_many_experts_are_possible_at_a_rank_that_is_given():
    assert parse("num_experts=[300]", "rank=2").model.feed_forward.num_experts == (300,)


def test_batch_norm_is_possible_where_nothing_is_predicted():
    MuMoEConfig(gate_norm="batch").check_model(num_layers=4, num_heads=4, causal=False)


def test_a_section_names_its_own_keys_and_its_reader_puts_the_path_before_them():
    with pytest.raises(SectionError) as caught:
        MuMoEConfig(num_experts=(300,)).of_model(width=8, bias=True)
    line = "rank: match-dense is not allowed with num_experts: [300]: even at rank 1 "
    assert str(caught.value).startswith(line)
    line = "a.b.rank: match-dense is not allowed with a.b.num_experts: [300]: even at rank 1 "
    assert caught.value.within("a.b").startswith(line)


@pytest.mark.parametrize(
    "overrides",
    [["rank=8"], ["factorization=tr", "rank=7"], ["factorization=tr", "expert_rank=3", "rank=8"]],
)
def test_tensor_parallelism_takes_one_of_both_ranks_of_a_ring(overrides):
    changes = ["parallel.tensor_parallel_size=2", *(f"{KEY}{o}" for o in overrides)]
    assert validate(run_of("mumoe", *changes), 2).tensor_parallel_size == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_is_allowed(stage):
    config = run_of("mumoe", f"parallel.zero_stage={stage}")
    assert validate(config, 2).data_parallel_size == 2


def test_a_resolved_config_reads_back_as_itself():
    config = parse("num_experts=[8, 4]", "factorization=tr", "rank=5")
    assert parse_config(config.to_yaml(), origin="again") == config


def gpt2_block(bias=True, **changes):
    config = GPT2Config(bias=bias, feed_forward={"kind": "mumoe", **changes})
    return config.known_feed_forward()


@pytest.mark.parametrize(
    ("factorization", "num_experts", "rank", "expected"),
    [
        ("cp", 256, 556, 4_752_472),
        ("tr", 256, 149, 4_783_272),
        ("cp", 64, 599, 4_727_342),
        ("tr", 64, 153, 4_752_584),
    ],
)
def test_a_block_of_the_papers_ranks_has_its_parameters(factorization, num_experts, rank, expected):
    block = gpt2_block(factorization=factorization, num_experts=[num_experts], rank=rank)
    assert block.parameters(768) == expected


@pytest.mark.parametrize("bias", [True, False])  # of the dense block: 4,722,432 or 4,718,592
@pytest.mark.parametrize(
    ("factorization", "num_experts", "rank"),
    [("cp", 256, 552), ("tr", 256, 147), ("cp", 64, 598), ("tr", 64, 152)],
)
def test_a_matching_rank_is_the_nearest(bias, factorization, num_experts, rank):
    block = gpt2_block(bias, factorization=factorization, num_experts=[num_experts])
    assert block.rank == rank


@pytest.mark.parametrize("factorization", FACTORIZATIONS)
@pytest.mark.parametrize("num_experts", [[16], [8, 2], [1]])
@pytest.mark.parametrize("hidden_size", [None, 100, 5])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_no_other_rank_is_nearer(factorization, num_experts, hidden_size, activation):
    config = MuMoEConfig(
        activation=activation,
        factorization=factorization,
        num_experts=num_experts,
        expert_rank=2,
        hidden_size=hidden_size,
    )
    inner = 256 if hidden_size is None else hidden_size
    firsts = 2 if activation == "swiglu" else 1
    dense = (firsts + 1) * 64 * inner + 64 + firsts * inner
    if config.model_copy(update={"rank": 1}).parameters(64) > dense:
        with pytest.raises(ValueError, match="at rank 1"):
            config.of_model(width=64, bias=True)
        return
    chosen = config.of_model(width=64, bias=True).rank
    away = {
        rank: abs(config.model_copy(update={"rank": rank}).parameters(64) - dense)
        for rank in range(1, 200)
    }
    assert away[chosen] == min(away.values())


def test_a_run_is_resolved_to_a_number():
    config = parse("num_experts=[8]")
    assert config.model.feed_forward.rank == "match-dense"
    # Dense 8,352, gate 8 x 32, and 2 x 8 + 33 + 128 + 129 + 32 for each rank: 23.95.
    assert {block.rank for block in config.model.block_feed_forwards()} == {24}
    model = with_vocabulary(config.model, 61, "data.path: x")
    resolved = config.model_copy(update={"model": model})
    assert resolved.model.feed_forward.rank == 24
    assert parse_config(resolved.to_yaml(), origin="again") == resolved
