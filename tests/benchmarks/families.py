"""`families.py`: how near decoders that are opened from transformers' folders come to its own.

Random models of the shapes in `tests/helpers/decoders.py`, 3 x 23 tokens, or 30 x 60 in bf16. In
fp64 transformers computes without its islands of fp32; its gradients are rounded to fp32 on the
way. The error of bf16 is the mean one of our logits against fp64, over transformers' own.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import load_file

from polyad.launch.command import Argument, Json, UsageError
from polyad.launch.output import align, results
from polyad.train.console import Progress
from polyad.train.exchange.convert import convert
from tests.benchmarks.script import benchmark, start
from tests.helpers.decoders import (
    CASES,
    Choices,
    Chosen,
    InDouble,
    in_double,
    opened,
    theirs,
    tokens,
)

TITLES = (
    "model", "logits fp32", "fused", "fp64", "gradients", "choices", "in bf16", "error bf16",
    "tensors back",
)  # fmt: skip


def bench_families(cases: Sequence[str] = tuple(CASES)) -> dict[str, dict[str, Any]]:
    """Compares cases.

    Args:
        cases: Names in `CASES`.

    Returns:
        JSON values by case, as in `TITLES`: largest differences of logits from transformers', with
        files of one expert each and of all, in fp32 and fp64; the largest difference of a gradient
        over the largest gradient; how many choices of an expert are the same, and of how many,
        in fp32 and in bf16, there from the same inputs; errors in bf16 as a ratio; and how many
        tensors are the same bytes after a conversion to our form and back, and of how many.
    """
    found = {}
    progress = Progress("comparing", len(cases), "models")
    for done, case in enumerate(cases, 1):
        with tempfile.TemporaryDirectory() as folder:
            found[case] = _compare(case, Path(folder))
        progress(done / len(cases))
    return found


@torch.no_grad()
def _compare(case: str, folder: Path) -> dict[str, Any]:
    model, ids = theirs(case), tokens()
    model.save_pretrained(folder / "each")
    model.save_pretrained(folder / "fused", save_original_format=False)
    ours = opened(folder / "each")
    chosen, choices = Chosen(model), Choices(ours)
    wanted = model(ids).logits
    errors = [_largest(wanted - each(ids).logits) for each in (ours, opened(folder / "fused"))]
    with torch.enable_grad():
        of_double, gradients = in_double(case, folder / "double")
    convert(folder / "each", folder / "ours", to="polyad")
    convert(folder / "ours", folder / "back", to="huggingface")
    before, after = (load_file(folder / each / "model.safetensors") for each in ("each", "back"))
    same = [name for name, tensor in before.items() if _same_bytes(tensor, after.get(name))]
    return {
        "logits_fp32": errors[0],
        "logits_fp32_fused": errors[1],
        "logits_fp64": of_double,
        "gradients_fp64": max(_largest(a - b) for _, a, b in gradients)
        / max(_largest(b) for _, _, b in gradients),
        "choices": _alike(choices.ids, chosen.ids),
        **_in_bf16(case, folder),
        "tensors_back": [len(same), len(before)],
    }


def _in_bf16(case: str, folder: Path) -> dict[str, Any]:
    model, ids = theirs(case, torch.bfloat16), tokens(60, 30)
    model.save_pretrained(folder / "bf16")
    ours, chosen = opened(folder / "bf16", torch.bfloat16), Chosen(model)
    exact = theirs(case, torch.float64)
    with InDouble():
        true = exact(ids, use_cache=False).logits
    errors = [(each(ids).logits - true).abs().mean().item() for each in (ours, model)]
    routers = [b.feed_forward.router for b in ours.blocks if hasattr(b.feed_forward, "router")]
    inputs = [each.view(*ids.shape, -1) for each in chosen.inputs]
    selected = [
        router(x_BTD).selected.expert_ids_NK
        for router, x_BTD in zip(routers, inputs, strict=True)
    ]  # fmt: skip
    return {"choices_bf16": _alike(selected, chosen.ids), "error_bf16": errors[0] / errors[1]}


def _alike(ours: list[torch.Tensor], of_theirs: list[torch.Tensor]) -> list[int]:
    """How many tokens of all layers have the same experts, and how many there are."""
    same = [
        (a.sort(-1).values == b.view_as(a).sort(-1).values).all(-1)
        for a, b in zip(ours, of_theirs, strict=True)
    ]
    return [sum(int(each.sum()) for each in same), sum(each.numel() for each in same)]


def _same_bytes(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and other.dtype == one.dtype and torch.equal(one, other)


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


def families_table(result: dict[str, dict[str, Any]]) -> str:
    """The result for a person."""
    rows = [TITLES]
    for case, each in result.items():
        of_logits = ("logits_fp32", "logits_fp32_fused", "logits_fp64", "gradients_fp64")
        rows.append(
            (
                case,
                *(f"{each[key]:.0e}" for key in of_logits),
                *(_of(each[key]) for key in ("choices", "choices_bf16")),
                f"{each['error_bf16']:.2f}",
                _of(each["tensors_back"]),
            )
        )
    return align(rows)


def _of(pair: list[int]) -> str:
    return "{} of {}".format(*pair) if pair[1] else "-"


@benchmark("families", "--json families.json", "--case olmoe")
def families(
    *,
    case: Annotated[str | None, Argument("one of the models; default: all", "NAME")] = None,
    json: Json = None,
) -> None:
    """Compares decoders of transformers with the same opened here."""
    if case is not None and case not in CASES:
        raise UsageError(f"--case: {case!r} is not known; {', '.join(CASES)} are")
    with results(json) as show:
        result = bench_families([case] if case else tuple(CASES))
        show(result, families_table(result))


if __name__ == "__main__":
    start(families)
