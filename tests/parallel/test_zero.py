"""The engine's surroundings: what DeepSpeed is told, and what it is kept from."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from polyad.model.vit import ViTConfig
from polyad.parallel import parallelize
from tests.helpers.training import Case, build_engine, moe_model
from tests.parallel.test_gradients import rates_of_blocks, settings


def places_of_weights(case: Case) -> tuple[bool, bool]:
    """Builds an engine.

    Returns:
        Whether the compiler was told that weights may be unaligned, and whether one is.
    """
    model = case.model.model_copy(update={"compile": True})
    with mock.patch.object(parallelize, "compile_model") as told:
        engine, _ = build_engine(case.but(model=model))
    (call,) = told.call_args_list
    weights = engine.module.parameters()
    unaligned = any(p.storage_offset() * p.element_size() % 16 for p in weights)
    return call.kwargs["placed_anywhere"], unaligned


def made(stage, precision="fp32", **keys):
    return settings(stage, precision, 5, num_parameters=1000, **keys)


def test_buckets_are_no_larger_than_the_model_and_even():
    assert made(2)["zero_optimization"]["reduce_bucket_size"] == 1000
    for size in (7, 8):
        assert made(1, bucket_size=size)["zero_optimization"]["allgather_bucket_size"] == 8


def test_bf16_accumulates_in_fp32():
    kinds = [made(stage, "bf16").get("data_types") for stage in (1, 2, 3)]
    assert kinds == [{"grad_accum_dtype": "fp32"}] * 3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "path"), [(3, ""), (1, os.environ["PATH"])])
def test_no_compiler_is_needed_or_used(tmp_path, stage, path):
    # Neither found on an empty PATH, nor called where there is one.
    code = (
        "from polyad.parallel import comm\n"
        "from tests.helpers.training import Case, train\n"
        "if __name__ == '__main__':\n"
        f"    print(train(Case(stage={stage}, last_step=1)))\n"
        "    comm.leave(0)\n"  # as every command: python's own end aborts now and then after gloo
    )
    clean = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment = clean | {"PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": "."}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("{'losses': [")  # and nothing before it
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("num_experts", "precision", "odd"), [(8, "bf16", False), (4, "bf16", True), (4, "fp32", False)]
)
def test_a_compiler_is_told_where_weights_may_begin(workers, stage, num_experts, precision, odd):
    """The bias of a router of 4 experts has 8 bytes, and what follows begins in between."""
    model = moe_model(num_experts=num_experts).model_copy(update={"hidden_size": 32})
    case = Case(stage=stage, precision=precision, model=model)
    assert workers(1).run(places_of_weights, case) == [(odd, odd)]


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rates_of_blocks_are_exact_whatever_the_precision_of_weights(workers, precision):
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_heads": 4}
    vit = ViTConfig(**sizes, num_classes=7, num_layers=4, drop_path=0.1)
    case = Case(stage=1, model=vit, precision=precision)
    for found in workers(2).run(rates_of_blocks, case):
        dtypes, shares = zip(*found, strict=True)
        assert set(dtypes) == {"torch.float32"}
        assert shares == pytest.approx([1 - 0.1 * n / 3 for n in range(4)], abs=1e-7)
