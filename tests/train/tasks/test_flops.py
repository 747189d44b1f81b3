"""FLOPs that are counted by running, against numbers worked out by hand."""

import pytest
import torch

from polyad.model.bert import BertConfig
from polyad.model.decoder import GPT2Config
from polyad.train.tasks.random_input import flops_of_unit

SMALL = {"hidden_size": 32, "num_heads": 4, "sequence_length": 16, "vocab_size": 61}


def flops(layers, **feed_forward):
    """The FLOPs of a token of a small GPT-2."""
    section = {"feed_forward": feed_forward} if feed_forward else {}
    return flops_of_unit(GPT2Config(num_layers=layers, **SMALL, **section))


def test_flops_of_gpt2_equal_a_count_by_hand():
    # Block: 4 x 32^2 = 4,096 attention, 2 x 32 x 128 = 8,192 feed-forward: 12,288; three: 36,864.
    # Head: 32 x 61 = 1,952. 6 x 38,816 = 232,896. Attention: 12 x 3 x 32 x 16 = 18,432.
    assert flops(3) == 251_328
    # With 2 x 32 x 10 = 640: 6 x (3 x 4,736 + 1,952) + 18,432 = 96,960 + 18,432.
    assert flops(3, hidden_size=10) == 115_392


@pytest.mark.parametrize(
    ("section", "feed_forward"),
    [
        # Gate 32 x 8; both layers R (8 + 32 + 128).
        ({"factorization": "cp", "num_experts": [8], "rank": 10}, 256 + 2 * 1_680),
        # Gate 32 x 10. Ring ranks 4, R 5, of each layer: cores 4 x 8 x 4 + 4 x 2 x 4 = 160, their
        # product 64, with the input 4 x 4 x 5 = 80; 4 x (32 + 128) x 5 = 3,200.
        ({"factorization": "tr", "num_experts": [8, 2], "rank": 5}, 320 + 2 * 3_504),
        # With a gate three layers, as large.
        ({"num_experts": [8], "rank": 10, "activation": "swiglu"}, 256 + 3 * 1_680),
    ],
)
def test_flops_of_factorized_experts_equal_numbers_worked_out_by_hand(section, feed_forward):
    # Width 32, 2 blocks of 16 tokens, 61 words. A block: attention 4 x 32 x 32 = 4,096; head
    # 32 x 61 = 1,952; attention 12 x 32 x 16 = 6,144 FLOPs a block.
    weights = 1_952 + 2 * (4_096 + feed_forward)
    assert flops(2, kind="mumoe", **section) == 6 * weights + 2 * 6_144


def test_flops_of_sparse_experts_equal_numbers_worked_out_by_hand():
    # Width 32, 4 heads of 8, 4 blocks of 16 tokens, 61 words; blocks 1 and 3 route, 2 of 16
    # experts of 24, over the attention graph.
    # Weights of a token: head 32 x 61 = 1,952; attention 4 x 4 x 1,024 = 16,384; two dense
    # 2 x 2 x 32 x 128 = 16,384; two routed 2 (32 x 16 + 2 x 2 x 32 x 24) = 7,168; output biases of
    # all experts, which one product adds, 2 x 16 x 32 = 1,024; sums of two outputs 2 x 2 x 32;
    # together 43,040, times 6 = 258,240.
    # Attention 4 x 12 x 32 x 16 = 24,576.
    # The graph, for each of 16 tokens: 2 x 8 + 1 features and 16 scores, 33 x 16 = 528, by the
    # matrix that so few tokens have; the features of the token 32 x 8 + 8 x 8, and what all share,
    # (1 + 8) x 32 x 8 / 16; entropies of 4 heads 4 x 8 x 16, which choose one. Neighbours are for
    # records alone.
    options = {"kind": "smoe", "placement": 2, "graph": "attention", "expert_hidden_size": 24}

    def sparse(**more):
        return flops(4, **options | more)

    plain = 258_240 + 24_576
    features = 32 * 8 + 8 * 8 + (1 + 8) * 32 * 8 // 16
    assert sparse() == plain + 2 * 6 * (528 + features + 4 * 8 * 16)
    # Similarity: 32 features, and 16 scores.
    assert sparse(graph="similarity") == plain + 2 * 6 * 16 * 48
    # Cosine score: (32 + 16) x 8 in place of 512 weights.
    assert sparse(graph="none") == plain
    assert sparse(graph="none", score="cosine") == plain - 2 * 6 * (512 - 384)


def test_flops_of_bert_are_those_counted_by_hand():
    config = BertConfig(num_layers=2, hidden_size=8, num_heads=2, sequence_length=20, vocab_size=50)
    # A block: 4 D^2 of attention, 8 D^2 of the feed-forward. Of 20 tokens 3 are masked.
    weights = 2 * 12 * 64 + 3 * (64 + 8 * 50) / 20
    assert flops_of_unit(config) == round(6 * weights) + 2 * 12 * 8 * 20


def test_of_groups_of_units_those_of_a_tokens_experts_count():
    # A quarter of 2 x 32 x 128 weights; scores 32 x 8; attention 4 x 32 x 32; head 32 x 61; sums of
    # two outputs 2 x 32.
    others, unit = 6 * (256 + 4_096 + 1_952 + 64) + 12 * 32 * 16, 6 * 2 * 32 * 128
    assert flops(1, kind="emoe", num_experts=8, top_k=2) == others + unit // 4


def test_of_a_number_of_experts_that_grows_the_mean_counts():
    def sparse(**options):
        return flops(2, kind="smoe", num_experts=8, expert_hidden_size=20, **options)

    assert sparse(top_k=2, final_top_k=6) == sparse(top_k=4)
    assert sparse(graph="similarity") > sparse()


def test_counting_leaves_random_numbers_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    section = {"kind": "smoe", "num_experts": 8, "router_noise": 1.0, "expert_dropout": 0.1}
    flops_of_unit(GPT2Config(num_layers=2, dropout=0.1, **SMALL, feed_forward=section))
    assert torch.equal(torch.rand(4), expected)
