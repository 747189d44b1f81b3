"""Results of `routing.py`: ratios, the bound that FLOPs set, and the table.

Shapes: T tokens in a sequence.
"""

from typing import Any

from polyad.launch.output import align
from polyad.model.decoder_config import GPT2Config
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from tests.benchmarks.routing_peers import MATERIALIZED, PLAIN, graphs_of
from tests.benchmarks.timed_layer import multiply_adds, setting
from tests.benchmarks.turns import span

HEAD = (
    "variant",
    "forward ms",
    "backward ms",
    "both ms",
    "x plain",
    "90%",
    "by FLOPs",
    "kept KiB/token",
    "more than plain",
)


def model_config(shape: dict[str, int], place: str, length: int) -> GPT2Config:
    """The model of a place, without a graph.

    Args:
        shape: As in the result.
        place: `block`: a model of one, next to without vocabulary; or `model`.
        length: T.
    """
    return GPT2Config(
        num_layers=1 if place == "block" else shape["layers"],
        hidden_size=shape["width"],
        num_heads=shape["heads"],
        sequence_length=length,
        vocab_size=2 if place == "block" else shape["vocab_size"],
        feed_forward=SparseMoEConfig(
            num_experts=shape["experts"],
            top_k=shape["top_k"],
            expert_hidden_size=shape["hidden"],
        ),
    )


def add_ratios(rows: dict[str, Any], shape: dict[str, int], place: str, length: int) -> None:
    """Adds what depends on the plain router's row, and on the number of tokens.

    Args:
        rows: By variant: seconds and saved bytes.
        shape: As in the result.
        place: `block` or `model`.
        length: T.
    """
    config = model_config(shape, place, length)
    plain = rows[PLAIN]
    for name, row in rows.items():
        keys = graphs_of(shape["width"]).get(name.removeprefix(MATERIALIZED), {})
        graph = graph_flops(config, keys.get("graph", "none"))
        row["graph_flops_per_token"] = graph
        row["least_ratio"] = 1 + graph / plain_flops(config)
        row["saved_bytes_per_token"] = row["saved_bytes"] / length
        graph_bytes = row["saved_bytes"] - plain["saved_bytes"]
        row["graph_saved_bytes_per_token"] = graph_bytes / length


def plain_flops(config: GPT2Config) -> float:
    """FLOPs of a token without a graph, forward and backward; attention to what comes before."""
    width, keys = config.hidden_size, (config.sequence_length + 1) / 2
    plain = config.known_feed_forward().model_copy(update={"graph": "none"})
    weights = 4 * width**2 + multiply_adds(SparseMoE, plain, width)
    head = width * config.known_vocab_size() if config.num_layers > 1 else 0
    return 6 * (config.num_layers * weights + head) + config.num_layers * 12 * width * keys


def graph_flops(config: GPT2Config, graph: str) -> float:
    """FLOPs that a graph adds for a token, forward and backward, nothing computed twice.

    Args:
        config: Of the model; T is its sequence length.
        graph: Its name.
    """
    width, keys = config.hidden_size, (config.sequence_length + 1) / 2
    assert isinstance(config.feed_forward, SparseMoEConfig)
    size = width // config.num_heads
    # Attention's features: the output times the head's weight, and the length of m.
    features, more = {
        "none": (0, 0),
        "similarity": (width, 0),
        "attention": (2 * size + 1, size * (width + size)),
    }[graph]
    mixed = (features + config.feed_forward.num_experts) * keys if features else 0
    return 6 * config.num_layers * (mixed + more)


def routing_table(result: dict[str, Any]) -> str:
    """The result for a person.

    Args:
        result: Of `bench_routing`.
    """
    lines = [
        f"width {result['width']}, {result['heads']} heads, {result['experts']} experts of which "
        f"{result['top_k']}, {result['width']}-{result['hidden']}; {setting(result)}"
        f"{', compiled' if result['compiled'] else ''}"
    ]
    for precision, places in result["precisions"].items():
        for place, compared in places.items():
            what = place if place == "block" else f"model of {result['layers']} blocks"
            for one in compared:
                lines += ["", f"{precision}, {what}, {one['tokens']:,} tokens"]
                lines += [align([HEAD, *(_cells(*item) for item in one["variants"].items())])]
                lines += [f"{name} is left out: {why}" for name, why in one["left_out"].items()]
                lines += _goal_lines(one)
    return "\n".join(lines)


def _goal_lines(one: dict[str, Any]) -> list[str]:
    if "goal" not in one:
        return []
    ratio = max(one["variants"][name]["seconds_ratio"] for name in graphs_of(1))
    met = "met" if one["reached"] else "missed"
    return [f"slowest graph {ratio:.3f}, the goal is at most {one['goal']}: {met}"]


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    seconds = (row["forward_seconds"], row["backward_seconds"], row["seconds"])
    return (
        name,
        *(f"{1e3 * value:.1f}" for value in seconds),
        f"{row['seconds_ratio']:.3f}",
        span(row["seconds_ratio_interval"], 3),
        f"{row['least_ratio']:.3f}",
        f"{row['saved_bytes_per_token'] / 2**10:.1f}",
        f"{row['graph_saved_bytes_per_token'] / 2**10:+.2f}",
    )
