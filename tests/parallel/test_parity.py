"""n processes compute what one process computes, for every kind of model on every kind of layout.

A kind is one entry of `KINDS`. A layout is words: how many processes; `TP2` and `EP2`, tensor- and
expert-parallel ones; `Z3`, the stage of ZeRO; `SP`, shared tokens; what changes nothing either
(`recompute`, `compile`, `bf16`); and what both train with (`adamw`, `clip0`).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch import _dynamo

from polyad.model.build import compile_model, read_model_config
from polyad.model.lora import LoRAConfig
from polyad.parallel import parallelize
from polyad.train.loop.losses import LossConfig, SampleSimilarityConfig
from tests.helpers.everyday import pairwise
from tests.helpers.parity import assert_near_state, assert_same_course, assert_same_routing, near
from tests.helpers.small_decoders import DECODERS, small_decoder
from tests.helpers.training import (
    GLOBAL_BATCH,
    MODEL,
    Case,
    build_engine,
    emoe_model,
    moe_model,
    mumoe_model,
    relative,
    table_model,
    take_step,
    tensors,
    train,
)

pytestmark = pytest.mark.distributed


def breaks_of_a_step(case: Case) -> list[str]:
    """Runs a step of a model that is traced but not compiled, which would be slow.

    Returns:
        Reasons for graph breaks.
    """
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    traced = partial(compile_model, backend="aot_eager")
    model = case.model.model_copy(update={"compile": True})
    with mock.patch.object(parallelize, "compile_model", traced):
        engine, world = build_engine(case.but(model=model))
    assert take_step(engine, world, case, 0).result.applied
    assert _dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    return list(_dynamo.utils.counters["graph_break"])


SGD = Case(optimizer="sgd", learning_rate=0.1, clip=0.5)
UNCUT = LossConfig()
BALANCED = LossConfig(load_balance=0.01, router_z=0.001)


@dataclass(frozen=True)
class Kind:
    """What is trained, and on which layouts."""

    model: Any
    everyday: Iterable[str] = ()
    """Layouts of the everyday suite."""
    slow: Iterable[str] = ()
    losses: LossConfig = UNCUT
    case: dict[str, Any] = field(default_factory=dict)
    """Other values of the case."""
    recorded: frozenset[str] = frozenset()
    """Keys that the last record has."""
    norms_rtol: float = 1e-5
    bf16_rtol: float = 2e-3
    is_whole: bool = False
    """Whether a micro-batch is a whole step, shared out: BatchNorm is over all of a forward pass;
    and whether some weights are rounding around zero."""
    loads_alone: bool = False
    """Whether of the records the loads of experts alone are the same."""


def over(shapes: str, stages: str = "123") -> list[str]:
    """Layouts: each shape, in a list with commas, at each stage."""
    return [f"{shape.strip()} Z{stage}" for shape in shapes.split(",") for stage in stages]


def read(layout: str) -> tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The number of processes, what the layout changes, what it changes in the model, and what
    both have."""
    processes, *words = layout.split()
    ours: dict[str, Any] = {"stage": 1}
    model: dict[str, Any] = {}
    both: dict[str, Any] = {}
    for word in words:
        if word[:2] in ("TP", "EP"):
            ours[{"TP": "tensor", "EP": "expert"}[word[:2]]] = int(word[2:])
        elif word.startswith("clip"):
            both["clip"] = float(word[4:])
        elif word[0] == "Z":
            ours["stage"] = int(word[1:])
        else:
            place, changes = {
                "SP": (ours, {"sequence": True}),
                "stacked": (ours, {"stack_gates": True}),
                "bf16": (ours, {"precision": "bf16"}),
                "recompute": (model, {"recompute": "block"}),
                "compile": (model, {"compile": True}),
                "muon": (both, {"optimizer": "muon"}),
                "adamw": (both, {"optimizer": "adamw", "learning_rate": 1e-3, "clip": 1.0}),
            }[word]
            place |= changes
    return int(processes), ours, model, both


# Language models: dense, factorized, of decoders.
CHANGED = ["2 Z1 compile", "2 Z2 compile", "2 Z1 recompute", "2 Z2 recompute"]
DENSE = {
    "dense": Kind(
        MODEL,
        everyday=["4 TP2 Z3"],
        slow=[
            *over("1", "23"), *over("2"), *over("2 TP2, 4 TP2"), *CHANGED, "2 Z3 recompute",
            *(f"{each} {clip}" for each in over("2, 4 TP2") for clip in ("clip0", "clip100")),
            *(f"{each} adamw" for each in ("1 Z3", *over("2, 2 TP2"), "4 TP2 Z3")),
            *over("2 adamw bf16"),
            "2 TP2 recompute", "4 TP2 compile", "2 TP2 Z2 recompute", "4 TP2 Z2 compile",
        ],
    ),
    "own head": Kind(
        MODEL.model_copy(update={"tied_embeddings": False}),
        slow=["2 TP2 Z3", "2 Z3", "2 TP2 Z1", "4 TP2 Z1"],
    ),
    # More words than a part of a padded vocabulary has rows, so that each process has some.
    "many words": Kind(MODEL.model_copy(update={"vocab_size": 251})),
}  # fmt: skip
MUMOE_LAYOUTS = [*over("2 TP2, 4 TP2"), "4 TP4 Z1"]
MUMOE_OTHERS = [
    *("2 TP2 adamw", "4 TP2 Z2 adamw", "2 TP2 adamw bf16", "2 TP2 recompute", "2 TP2 compile")
]
TR = {"factorization": "tr", "num_experts": [4, 3]}
MUMOE_MEASURES = frozenset(
    {f"routing/{name}" for name in ("load_max", "unused", "entropy", "effective_experts")}
    | {"routing/dominated"}
    | {f"routing/blocks.1.feed_forward/{name}" for name in ("load", "dominant")}
)


def mumoe(everyday: Iterable[str], slow: Iterable[str], **section: Any) -> Kind:
    """Factorized experts."""
    return Kind(mumoe_model(**section), everyday, slow, recorded=MUMOE_MEASURES)


FACTORIZED = {
    "mumoe cp": mumoe(["2 TP2 Z3"], [*MUMOE_LAYOUTS, *MUMOE_OTHERS], rank=8),
    "mumoe tr": mumoe([], [*MUMOE_LAYOUTS, *MUMOE_OTHERS], **TR),
    # Ranks that nothing divides.
    "odd cp": mumoe([], [*over("2"), "2 adamw bf16", "2 Z3 adamw bf16", "2 Z3 recompute"]),
    "odd tr": mumoe(["2 Z3"], over("2", "12"), **TR),
    "odd tt": mumoe([], over("2"), factorization="tt"),
    "odd tucker": mumoe([], over("2"), factorization="tucker", rank=5),
    "odd gated": mumoe([], over("2"), activation="swiglu"),
    "mumoe cp, dropped experts": mumoe(
        [], ["2 TP2", "2 TP2 recompute"], rank=8, expert_dropout=0.3
    ),
    "mumoe tr, dropped experts": mumoe([], ["2 TP2", "2 TP2 recompute"], expert_dropout=0.3, **TR),
}  # fmt: skip
TABLE_LAYOUTS = ["2 Z3", "2 TP2", "2 TP2 Z3", "4 TP2 Z2", "4 TP4"]


def table(*everyday: str, **section: Any) -> Kind:
    """Mixtures of decoders and transcoders."""
    measures = frozenset({"routing/active", "routing/load_max"})
    return Kind(table_model(**section), everyday, TABLE_LAYOUTS, recorded=measures)


TABLES = {
    "mxd": table("4 TP2 Z2"),
    "mxd, more active than a process has": table(top_k=7),
    "mxd, gated": table(activation="swiglu", hidden_size=24),
    "transcoder": table(kind="transcoder"),
}

# Sparse experts, with state of every kind: a balancing bias, head entropies, a frozen score.
SCORES = ("linear", "cosine", "random")
GRAPHS = ("none", "similarity", "attention")
SHAPES = ("1", "2 EP2", "4 EP2", "4 EP4", "4 TP2 EP2", "2", "2 TP2")
EVERYDAY = [
    ("4 TP2 EP2", "2", "random", "similarity", "clip0.5"),
    ("2 EP2", "1", "linear", "none", "clip0.5"),
    ("4 TP2 EP2", "3", "cosine", "attention", "clip0.5"),
]
ROWS = pairwise(itertools.product(SHAPES, "123", SCORES, GRAPHS, ("clip0.5", "clip0")), EVERYDAY)
SPARSE_OTHERS = {
    ("linear", "none"): ["2 EP2 recompute", "2 EP2 compile"],
    ("linear", "similarity"): [
        "2 EP2 recompute", "2 EP2 compile",
        *(f"{shape} Z{stage} adamw" for shape in SHAPES[1:] for stage in "123"),
    ],
    ("linear", "attention"): ["2 EP2 recompute", "2 EP2 compile"],
    ("cosine", "attention"): ["4 EP2 Z3 recompute"],
}  # fmt: skip


def sparse(score: str, graph: str, **changes: Any) -> Any:
    """The tiny model with sparse experts."""
    section = {"score": score, "graph": graph, "similarity": "cosine", "balancing_rate": 0.01}
    return moe_model(**section).model_copy(update=changes)


def rows_of(rows: list[Any], score: str, graph: str) -> list[str]:
    """The layouts of the rows of a score and a graph."""
    return [f"{row[0]} Z{row[1]} {row[4]}" for row in rows if row[2:4] == (score, graph)]


SPARSE = {
    f"smoe {score} {graph}": Kind(
        sparse(score, graph),
        everyday=rows_of(EVERYDAY, score, graph),
        slow=[*rows_of(ROWS, score, graph), *SPARSE_OTHERS.get((score, graph), [])],
        losses=BALANCED,
    )
    for score, graph in itertools.product(SCORES, GRAPHS)
} | {
    # Widths that are multiples of 8, which the grouped product takes in bf16.
    "smoe 32 wide": Kind(
        sparse("linear", "none", hidden_size=32),
        slow=[f"{each} adamw bf16" for each in over("2 EP2, 4 TP2 EP2")],
        bf16_rtol=3e-3,
    ),
    "smoe, noise": Kind(
        moe_model(router_noise=2.0), slow=["2 TP2"], losses=LossConfig(importance=0.05, load=0.05),
        recorded=frozenset({"routing/load_loss"}),
    ),
    # A balancing bias, head entropies, a frozen score, a K that grows.
    "smoe, all state": Kind(
        moe_model(score="random", graph="attention", balancing_rate=0.01, final_top_k=4),
        case={"total_steps": 12},
    ),
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"graph": "attention"},
    {"graph": "similarity", "tau": 0.5},
    {"graph": "similarity", "similarity": "dot", "tau": 6.0},
    {"graph": "attention", "sigma": 0.3, "score": "cosine", "score_width": 3},
    {"graph": "attention", "attention_head": 3, "sigma": 3.0},  # of the second process
    {"graph": "attention", "attention_head": 0, "head_mean": False},
    {"combine": "scores"},
    {"router_bias": False},
    {"placement": 2},
    {"top_k": 1},
    {"top_k": 4},
    {"num_experts": 8, "top_k": 3},
    {"score": "random", "top_k": 1, "final_top_k": 4},
]
OF_ATTENTION = frozenset({"routing/blocks.1.feed_forward/attention_head"})
SPARSE |= {
    f"smoe {section}": Kind(
        moe_model(**section),
        slow=["4 TP2 EP2"],
        losses=BALANCED.model_copy(update={"importance": 0.05}),
        recorded=OF_ATTENTION if "attention" in section.values() else frozenset(),
    )
    for section in OPTIONS
}  # fmt: skip
# Over micro-batches of one size the loss is a mean, over those of a process or of all.
SIMILAR = LossConfig(
    importance=0.1, importance_form="plain",
    sample_similarity=SampleSimilarityConfig(same=0.5, different=2, of="layer_input"),
)  # fmt: skip
UNCOMPARED = SIMILAR.model_copy(update={"sample_similarity": None})
COMPARED = {
    f"similar samples, {name}": Kind(
        model, everyday, slow, losses=SIMILAR, recorded=frozenset({"routing/similarity_loss"})
    )
    for name, model, everyday, slow in (
        ("smoe", moe_model(), ["2"], ["2 EP2", "2 TP2", "2 Z3"]),
        ("mumoe", mumoe_model(), [], ["2"]),
    )
}


def pooled(pool: str, least: int | None = 3, most: int | None = 3, **section: Any) -> Any:
    """Pools of experts by document, which are of some tokens, as the tokens are random ones."""
    section |= {"pool": pool, "pool_least": least, "pool_most": most, "num_experts": 8}
    return moe_model(**section).model_copy(update={"vocab_size": 20, "end_of_text_id": 7})


POOLED = {
    "pools": Kind(
        pooled("prefix", balancing_rate=0.01), ["2 EP2"],
        ["2 TP2", "2 TP2 SP", "2 Z3", "4 TP2 EP2 Z2"],
        losses=LossConfig(load_balance=0.5, router_z=0.001), case={"clip": 1.0},
    ),
    # Of one data-parallel process the numbers are drawn as without others.
    "pools of any size": Kind(
        pooled("prefix", 2, 8), [], ["2 TP2", "2 TP2 recompute"],
        losses=LossConfig(load_balance=0.5, router_z=0.001), case={"clip": 1.0},
    ),
}  # fmt: skip
EMERGENT_LAYOUTS = [*over("2"), *over("2 TP2", "13"), *over("2 EP2"), "4 TP2 EP2"]
EMERGENT = {
    name: Kind(
        emoe_model(**section), everyday, EMERGENT_LAYOUTS, bf16_rtol=2e-2, loads_alone=True,
        losses=LossConfig(load_balance=0.1, importance=0.1), case={"last_step": 3},
    )
    for name, everyday, section in (
        ("emoe", ["2 EP2"], {}),
        ("emoe cosine", [], {"score": "cosine", "blocks": [1]}),
    )
} | {
    "emoe alone": Kind(emoe_model(), [], ["2 TP2 SP", "2 EP2"], bf16_rtol=2e-2, loads_alone=True),
    "emoe recomputed": Kind(
        emoe_model().model_copy(update={"recompute": "block"}), [],
        ["2 Z3 adamw bf16", "2 TP2 adamw bf16", "2 EP2 adamw bf16"], bf16_rtol=2e-2,
    ),
}  # fmt: skip

# Decoders, as published ones are built.
ROUTED = {
    name
    for name, settings in DECODERS.items()
    if settings.get("feed_forward", {}).get("kind") in ("smoe", "emoe")
}
DENSE_LAYOUTS = ["2 TP2", "4 TP4", "4 TP2 SP", "2 Z3"]
ROUTED_LAYOUTS = ["2 TP2", "2 EP2", "4 TP2 EP2 Z2", "4 TP2 EP2 SP", "4 EP2 Z3", "2 TP2 Z3 SP"]
DECODERS_EVERYDAY = {"latent": "4 TP2 EP2 SP", "sinks": "4 TP2 EP2 stacked"}
WITH_GATES = ("norm over heads", "latent", "sinks")  # of experts
STACKED = ["1 stacked", "2 Z2 stacked", "4 EP2 Z3 stacked", "2 TP2 compile stacked"]


def losses_of_decoder(name: str) -> LossConfig:
    """Losses with which only routed ones train."""
    if name not in ROUTED:
        return UNCUT
    over = "model" if name == "sinks" else "layer"
    sequence = 0.01 if name == "latent" else 0.0
    return BALANCED.model_copy(
        update={"load_balance_over": over, "sequence_balance": sequence}
    )  # fmt: skip


DECODED = {
    f"decoder {name}": Kind(
        small_decoder(name),
        everyday=[DECODERS_EVERYDAY[name]] if name in DECODERS_EVERYDAY else [],
        slow=[
            *(ROUTED_LAYOUTS if name in ROUTED else DENSE_LAYOUTS),
            *(STACKED if name in WITH_GATES else ()),
        ],
        losses=losses_of_decoder(name), case={"clip": 0.1},
    )
    for name in DECODERS
}  # fmt: skip

# BERT, models of images, mixtures of whole networks.
BERT = {
    "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 17,
    "vocab_size": 61,
}  # fmt: skip
IMAGES = {
    "image_size": 16, "patch_size": 4, "num_classes": 7, "num_layers": 2, "hidden_size": 24,
}  # fmt: skip
MIXER, VIT = IMAGES | {"kind": "mixer"}, IMAGES | {"kind": "vit", "num_heads": 4}
NETWORK = {"convolutions": [3, 4], "padding": 1, "hidden_sizes": [10, 6]}
NORMED = NETWORK | {"batch_norm": [1]}
MIXTURE = {
    "kind": "mixture", "image_size": 8, "num_classes": 7, "num_experts": 3, "expert": NETWORK,
    "gate_network": NETWORK,
}  # fmt: skip
SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
SOME_SMOE = SMOE | {"placement": [1], "dense_hidden_size": 16}
BY_ATTENTION, BY_SIMILARITY = SMOE | {"graph": "attention"}, SOME_SMOE | {"graph": "similarity"}
COSINE = SMOE | {"graph": "similarity", "similarity": "cosine", "tau": 0.2}
MUMOE = {"kind": "mumoe", "num_experts": [6], "rank": 8, "hidden_size": 24}
NORMALIZED = MUMOE | {"hidden_size": 20, "gate_input": "normalized"}
CP = NORMALIZED | {"gate_norm": "batch"}
RING = CP | {"factorization": "tr"}
DEEP_RING = NORMALIZED | {"factorization": "tr", "num_experts": [3, 2], "level_std": 0.1}


def fed(base: dict[str, Any], *parts: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A model with these feed-forwards: of its blocks, or of tokens and of channels."""
    keys = ("feed_forward",) if len(parts) == 1 else ("token_feed_forward", "channel_feed_forward")
    return base | others | dict(zip(keys, parts, strict=True))


CLASSES = {"kind": "classification", "num_classes": 7}
CHANGED_ONCE = ("2 recompute", "2 compile")
OTHER_MODELS: dict[str, tuple[dict[str, Any], list[str], tuple[str, ...]]] = {
    "bert": (BERT, [], ("4 TP2", *CHANGED_ONCE)),
    "bert mumoe": (fed(BERT, MUMOE | {"gate_norm": "batch"}), [], ()),
    "bert ring": (fed(BERT, MUMOE | {"factorization": "tr"}), [], CHANGED_ONCE),
    "bert sparse": (fed(BERT, SOME_SMOE), [], ()),
    "bert sparse attention": (fed(BERT, BY_ATTENTION), ["4 TP2 EP2"], CHANGED_ONCE),
    "bert classes": (BERT | {"head": CLASSES}, [], ()),
    "mixer": (MIXER | {"token_feed_forward": {"kind": "dense", "hidden_size": 20}}, [], ()),
    "mixer cp": (fed(MIXER, CP, CP), ["4 TP2"], ()),
    "mixer tr": (fed(MIXER, RING, DEEP_RING), [], ("2 Z3", *CHANGED_ONCE)),
    "mixer sparse": (fed(MIXER, SMOE, COSINE), [], ()),
    "vit": (VIT | {"pre_logits": 10}, [], ()),
    "vit sparse similarity": (fed(VIT, BY_SIMILARITY), [], CHANGED_ONCE),
    "vit sparse attention": (fed(VIT, BY_ATTENTION, pool="mean"), [], ("4 TP2 EP2",)),
    "mixture": (MIXTURE | {"top_k": 2}, [], ()),
    "mixture attentive, BatchNorm": (
        MIXTURE | {"gate": "attentive", "expert": NORMED, "gate_network": NORMED}, ["2 Z2"], (),
    ),
}  # fmt: skip


def allowed(name: str, shape: str, stage: str) -> bool:
    """Whole experts alone are spread; of mixtures of networks no layer is cut."""
    if "mixture" in name:
        return shape in ("1", "2")
    return "EP" not in shape or "sparse" in name


OTHER_ROWS = pairwise(
    row
    for row in itertools.product(OTHER_MODELS, ("1", "2", "4", "2 EP2", *SHAPES[2:5]), "123")
    if allowed(*row) and "EP4" not in row[1]
) + [(name, "2 TP2", "1") for name in OTHER_MODELS if "mixture" not in name]
CAPACITY = {"capacity_factor": 1.0, "num_experts": 4, "top_k": 2}
OTHERS = {
    name: Kind(
        read_model_config(section), everyday,
        [*(f"{shape} Z{stage}" for kind, shape, stage in OTHER_ROWS if kind == name), *changed],
        is_whole=True,
    )
    for name, (section, everyday, changed) in OTHER_MODELS.items()
} | {
    # The same tokens of the same micro-batches are dropped.
    f"vit {section['kind']}, capacity": Kind(
        read_model_config(fed(VIT, section)), ["4 TP2 EP2"] if section["kind"] == "smoe" else [],
        ["4 TP2 EP2"], recorded=frozenset({"routing/dropped"}), loads_alone=True,
    )
    for section in (
        CAPACITY | {"kind": "smoe", "expert_hidden_size": 16, "combine": "scores"},
        CAPACITY | {"kind": "emoe"},
    )
}  # fmt: skip

# Tokens that tensor-parallel processes share.
SHARED = ["2 TP2 SP", "4 TP2 Z2 SP"]
LONG = ["4 TP2 SP", "4 TP2 Z3 SP", "4 TP2 SP recompute"]
WITH_SHARED_TOKENS = {
    f"shared tokens, {name}": Kind(model, everyday, slow, norms_rtol=1e-4, bf16_rtol=3e-3)
    for name, model, everyday, slow in (
        ("dense", MODEL, [], [*SHARED, *LONG, "2 TP2 SP bf16"]),
        ("without biases", MODEL.model_copy(update={"bias": False, "tied_embeddings": False}),
         [], SHARED),
        ("cp", mumoe_model(rank=8), [], SHARED),
        ("ring", mumoe_model(factorization="tr", expert_rank=2, rank=4, num_experts=[6]),
         [], SHARED),
        ("residual gate", mumoe_model(rank=8, gate_input="residual"), [], SHARED),
        ("table", table_model(), [], SHARED),
        ("sparse", moe_model(balancing_rate=0.01), [], SHARED),
        ("similarity", moe_model(graph="similarity"), [], SHARED),
        ("attention", moe_model(graph="attention"), [], [*SHARED, "2 TP2 SP bf16"]),
        ("mixed", moe_model(placement=[1], dense_hidden_size=16), ["4 TP2 Z2 SP"], SHARED),
    )
} | {
    # 15 tokens have no equal halves, and 3 of them no quarters.
    f"{length} shared tokens": Kind(
        MODEL.model_copy(update={"sequence_length": length}), everyday, slow, norms_rtol=1e-4,
        case={"micro_batch": 1},
    )
    for length, everyday, slow in ((15, [], ["4 TP2 SP"]), (3, [], ["4 TP4 SP"]))
}  # fmt: skip

# Adapters on frozen weights.
TRAINED = ("final_norm.*",)
LINEAR = LoRAConfig(rank=3, alpha=6.0, targets=("attention.*", "feed_forward.*"), trained=TRAINED)
FACTORS = LoRAConfig(rank=3, alpha=6.0, targets=("feed_forward.*_factor",))
EXPERTS = LoRAConfig(rank=4, alpha=6.0, experts=True)
DECODER = LINEAR.model_copy(update={"trained": ()})
MIXED = DECODER.model_copy(update={"experts": True})
ADAPTED: dict[str, tuple[Any, LoRAConfig, list[str], tuple[str, ...]]] = {
    "lora dense": (MODEL, LINEAR, [], ("2 TP2 SP", "2 TP2 recompute", "2 TP2 compile")),
    "lora experts": (
        moe_model(), EXPERTS, ["4 TP2 EP2"], ("4 TP2 EP2 Z3", "2 TP2 recompute", "2 TP2 compile")
    ),
    "lora graph": (
        moe_model(graph="attention"), LoRAConfig(rank=3, alpha=6.0), [], ()
    ),
    "lora padded": (mumoe_model(), FACTORS, [], ()),
    **{
        f"lora {kind}": (
            mumoe_model(factorization=kind, rank=8, expert_rank=ring), FACTORS,
            [], ("2 TP2 Z3", "2 TP2 recompute", "2 TP2 compile") if kind == "cp" else (),
        )
        for kind, ring in (("cp", 4), ("tr", 4), ("tt", 4), ("tucker", 3))
    },
    "lora one head of keys": (small_decoder("one head of keys"), DECODER, [], ("2 TP2 SP",)),
    "lora norm over heads": (small_decoder("norm over heads"), MIXED, [], ("2 EP2",)),
    "lora latent": (
        small_decoder("latent"), MIXED, [], ("4 TP2 EP2 SP", "2 TP2 recompute")
    ),
    "lora sinks": (small_decoder("sinks"), MIXED, [], ("2 TP2",)),
    "lora multipliers": (small_decoder("multipliers"), MIXED, [], ("4 TP2 EP2 Z2 SP",)),
}  # fmt: skip
SPREAD = ("experts", "graph", "norm over heads", "latent", "sinks", "multipliers")


def adaptable(name: str, shape: str, stage: str) -> bool:
    """Whole experts alone are spread; ranks are cut into equal parts."""
    return ("EP" not in shape or name.removeprefix("lora ") in SPREAD) and (
        "TP" not in shape or name != "lora padded"
    )


LORA_SHAPES = [
    *("2", "4", "2 TP2", "4 TP2", "2 EP2", "4 EP2", "4 TP2 EP2"),
    *("2 TP2 SP", "4 TP2 SP", "4 TP2 EP2 SP"),
]
LORA_ROWS = pairwise(
    row for row in itertools.product(ADAPTED, LORA_SHAPES, "123") if adaptable(*row)
)
LORA = {
    name: Kind(
        model, everyday,
        [*(f"{shape} Z{stage}" for kind, shape, stage in LORA_ROWS if kind == name), *more],
        case={"learning_rate": 0.5, "lora": lora},
    )
    for name, (model, lora, everyday, more) in ADAPTED.items()
}  # fmt: skip

KINDS = (
    DENSE | FACTORIZED | TABLES | SPARSE | COMPARED | POOLED | EMERGENT | DECODED | OTHERS
    | WITH_SHARED_TOKENS | LORA
)  # fmt: skip


def parameters() -> list[Any]:
    """Every kind on every of its layouts."""
    found: dict[tuple[str, str], Any] = {}
    for name, kind in KINDS.items():
        for layout in [*kind.everyday, *kind.slow]:
            key = name, layout.replace(" Z1", "").replace(" clip0.5", "")
            marks = [] if layout in kind.everyday else [pytest.mark.slow]
            found.setdefault(key, pytest.param(*key, marks=marks, id=", ".join(key)))
    return list(found.values())


def case_of(name: str, ranks: int = 1, model: dict[str, Any] | None = None, **changes: Any) -> Case:
    """How a kind is trained by so many processes with samples of their own."""
    kind = KINDS[name]
    values = {"losses": kind.losses, **kind.case, **changes}
    if kind.is_whole:
        values["micro_batch"] = GLOBAL_BATCH // ranks
    return SGD.but(model=kind.model.model_copy(update=model or {}), **values)


@pytest.mark.parametrize(("name", "layout"), parameters())
def test_n_processes_compute_what_one_computes(workers, whole_runs, tmp_path, name, layout):
    kind = KINDS[name]
    processes, ours, model, both = read(layout)
    expected, saved = whole_runs(case_of(name, **both))
    ranks = processes // ours.get("tensor", 1)
    case = case_of(name, ranks, model, save_to=str(tmp_path), **both, **ours)
    if case.clip == 0.5 and name.split()[0] in ("dense", "own", "mumoe", "odd", "smoe"):
        assert all(norm > case.clip for norm in expected["norms"])  # so that the clip is active
    results = workers(processes).run(train, case)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert all(result["norms"] == results[0]["norms"] for result in results)
    result = results[0]
    if case.precision == "bf16":
        assert near(result["losses"], expected["losses"], kind.bf16_rtol)
    elif kind.is_whole and model:
        assert near(result["losses"], expected["losses"], 1e-4)
    elif case.optimizer == "adamw":
        assert near(result["losses"], expected["losses"])
    else:
        assert_same_course(result, expected, kind.norms_rtol)
        if not (kind.loads_alone or kind.is_whole):
            assert_same_routing(result, expected)
        if not model:
            folder = tmp_path / f"step-{case.last_step:08}"
            assert_near_state(folder, saved, rounding=kind.is_whole)
    last = expected["routing"][-1]
    assert kind.recorded <= set(last)
    if kind.loads_alone and case.precision == "fp32":
        for key in (key for key in last if key.endswith("/load")):
            assert result["routing"][-1][key] == pytest.approx(last[key], abs=1e-6), key


def test_clipping_changes_the_weights(whole_runs):
    clipped, free = (tensors(whole_runs(case_of("dense", clip=clip))[1]) for clip in (0.5, 0.0))
    assert max(relative(clipped[key], free[key]) for key in free) > 1e-3


@pytest.mark.parametrize("name", ["mumoe cp", "mumoe tr"])
def test_gates_leave_their_zero(whole_runs, name):
    _, saved = whole_runs(case_of(name))
    assert tensors(saved)["blocks.0.feed_forward.gate.weight", "master"].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("mumoe cp, dropped experts", {"model": mumoe_model(rank=8)}),
        ("smoe, noise", {"model": moe_model()}),
        ("pools", {"model": pooled("none", None, None, balancing_rate=0.01)}),
        ("similar samples, smoe", {"losses": UNCOMPARED}),
    ],
)
def test_what_a_kind_has_changes_the_losses(whole_runs, name, without):
    found, free = (whole_runs(case)[0] for case in (case_of(name), case_of(name).but(**without)))
    assert abs(found["losses"][-1] - free["losses"][-1]) > 1e-5


@pytest.mark.parametrize("name", ["vit smoe, capacity", "vit emoe, capacity"])
def test_a_capacity_drops_some_tokens(whole_runs, name):
    result, _ = whole_runs(case_of(name))
    assert 0 < result["routing"][0]["routing/dropped"] < 1


@pytest.mark.parametrize("name", ["mixer cp", "mixture attentive, BatchNorm"])
def test_all_running_statistics_move(whole_runs, name):
    """A Mixer has two gates for each block; of a mixture each network has a BatchNorm."""
    _, saved = whole_runs(case_of(name))
    found = [value for key, value in tensors(saved).items() if "running_variance" in key[0]]
    assert len(found) == 4
    assert all(bool((value != 1).all()) for value in found)


def test_momentum_is_part_of_the_state(workers, whole_runs, tmp_path):
    case = SGD.but(momentum=0.9, learning_rate=0.01, clip=1.0)
    expected, saved = whole_runs(case)
    result = workers(2).run(train, case.but(stage=2, save_to=str(tmp_path)))[0]
    assert near(result["losses"], expected["losses"])
    assert {field for _, field in tensors(saved)} == {"master", "momentum_buffer"}
    assert_near_state(tmp_path / "step-00000004", saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(
            (name, "2")
            for name in ("bert mumoe", "bert sparse", "mixer cp", "vit sparse similarity")
        ),
        *((f"smoe linear {graph}", "2 EP2") for graph in GRAPHS),
    ],
)
def test_a_compiler_traces_a_step_whole(workers, name, layout):
    processes, ours, _, _ = read(layout)
    case = case_of(name, processes, **ours)
    assert workers(processes).run(breaks_of_a_step, case) == [[], []]
