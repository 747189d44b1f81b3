"""The parts of the GPU path, each alone, in this process."""

import itertools
import threading
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyad.model.build import build_model, compile_model, materialize
from polyad.model.decoder import GPT2Config
from polyad.model.kernels.linear_cross_entropy import (
    VocabularyPart,
    by_definition,
    linear_cross_entropy,
)
from polyad.parallel.checkpoint.save import Task
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.loop.profiling import Prefetch, allow_tf32
from polyad.train.tasks.distillation import cross_entropy
from tests.helpers.gpu import NEEDS_CUDA

pytestmark = NEEDS_CUDA
CUDA = torch.device("cuda")
SMALL = GPT2Config(num_layers=2, hidden_size=128, num_heads=2, sequence_length=128, vocab_size=300)


@pytest.fixture(autouse=True)
def _settings_as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.compiler.reset()


def model(dtype: torch.dtype, device: torch.device = CUDA) -> torch.nn.Module:
    network = build_model(SMALL)
    materialize(network, seed=3, device=device, dtype=dtype)
    return network


def step(network: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss, and the gradient of the first block's queries, keys and values."""
    loss = cross_entropy(network(tokens[:, :-1]).logits, tokens[:, 1:].contiguous()).mean()
    loss.backward()
    return loss.item(), network.blocks[0].attention.qkv.weight.grad.float().cpu()


@pytest.fixture
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(300, (4, SMALL.sequence_length + 1), generator=generator)


def product_error() -> float:
    """The largest error of a product of fp32 matrices, as a share of the largest element."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(1024, 1024, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return ((a.to(CUDA) @ b.to(CUDA)).cpu() - exact).abs().max().item() / exact.abs().max().item()


class Batch(NamedTuple):
    values: torch.Tensor


def test_tf32_is_as_the_key_says() -> None:
    allow_tf32(False, CUDA)
    full = product_error()
    allow_tf32(True, CUDA)
    rounded = product_error()
    # Rounding errors of 2^-24 and 2^-11 in the factors, over 1,024 terms.
    assert full < 1e-5
    if torch.cuda.get_device_capability() >= (8, 0):
        assert 20 * full < rounded < 1e-2


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_blocks_compute_the_same(tokens, dtype, tf32) -> None:
    allow_tf32(tf32, CUDA)  # torch 2.10 could not compile after one of the ways to set it
    plain, compiled = model(dtype), model(dtype)
    compile_model(compiled)
    expected, actual = (step(network, tokens.to(CUDA)) for network in (plain, compiled))
    assert actual[0] == pytest.approx(expected[0], rel=1e-2)
    tolerance = 0.05 * expected[1].abs().max().item()
    torch.testing.assert_close(actual[1], expected[1], atol=tolerance, rtol=0)


def test_attention_runs_on_the_flash_kernel_in_bf16(tokens) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where this kernel cannot
        alone = step(model(torch.bfloat16), tokens.to(CUDA))
    network, ids = model(torch.bfloat16), tokens.to(CUDA)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        chosen = step(network, ids)
    names = {event.key for event in profile.key_averages()}
    fused = {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_cudnn_attention",  # newer torch prefers it on newer GPUs
    }
    assert names & fused
    assert not names & {"aten::_scaled_dot_product_attention_math", "aten::bmm"}
    assert chosen[0] == pytest.approx(alone[0], rel=1e-2)


@pytest.mark.parametrize("real", [300, 50257])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_loss_of_a_padded_vocabulary_is_the_definition(dtype, tolerance, real) -> None:
    generator = torch.Generator().manual_seed(6)
    x_ND = torch.randn(2100, 256, generator=generator).to(dtype)
    weight_VD = 0.1 * torch.randn(real + 47, 256, generator=generator).to(dtype)
    targets_N = torch.randint(real, (2100,), generator=generator)
    x, weight = x_ND.double().requires_grad_(), weight_VD.double().requires_grad_()
    exact = by_definition(x, weight[:real], targets_N)
    exact.backward()
    ours = [t.to(CUDA).requires_grad_() for t in (x_ND, weight_VD)]
    loss = linear_cross_entropy(*ours, targets_N.to(CUDA), VocabularyPart(0, real))
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=tolerance)
    for mine, true in zip(ours, (x, weight), strict=True):
        error = mine.grad.double().cpu() - true.grad
        assert error.norm() < tolerance * true.grad.norm()


def test_adamw_is_fused_and_does_what_it_does_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    start, *gradients = (torch.randn(64, 32, generator=generator) for _ in range(4))
    after = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(start.to(device, copy=True))
        optimizer = build_optimizer(OptimizerConfig(learning_rate=0.1), [("w", weight, 2)])
        assert optimizer.defaults["fused"] is (device == "cuda")
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step()
        after.append(weight.detach().cpu())
    torch.testing.assert_close(*after, atol=1e-5, rtol=1e-5)


def test_prefetch_copies_the_same_while_the_device_computes() -> None:
    generator = torch.Generator().manual_seed(4)
    batches = [torch.randint(1 << 40, (64, 4097), generator=generator) for _ in range(24)]
    ahead = Prefetch((Batch(batch.pin_memory()) for batch in batches), CUDA)
    busy = torch.randn(4096, 4096, device=CUDA)
    sums = []
    for (batch,) in ahead:
        assert batch.is_cuda
        busy = torch.tanh(busy @ busy)  # the copy of the next one is done long before this is
        sums.append(batch.sum())
        del batch  # its memory is taken by a later copy
    assert [value.item() for value in sums] == [batch.sum().item() for batch in batches]
    assert torch.isfinite(busy).all()


def test_the_copy_overlaps_with_computation() -> None:
    # Pinned beforehand, and the third copy finds the first one's memory: neither may wait.
    batches = [torch.zeros(16, 1 << 20, dtype=torch.int64).pin_memory() for _ in range(3)]
    ahead = Prefetch(map(Batch, batches), CUDA)
    next(ahead)
    torch.cuda.synchronize()
    copy = torch.cuda.Event()
    busy = torch.randn(8192, 8192, device=CUDA)
    for _ in itertools.repeat(None, 60):  # hundreds of milliseconds, queued at once
        busy = torch.tanh(busy @ busy)
    done = torch.cuda.Event()
    done.record()
    next(ahead)  # queues the copy of the last one, 128 MiB, on the stream of its own
    copy.record(ahead._stream)
    copy.synchronize()
    assert not done.query()
    torch.cuda.synchronize()


def test_a_snapshot_has_what_was_queued_before_it_and_waits_for_nothing_after() -> None:
    busy = torch.randn(8192, 8192, device=CUDA)
    values = [torch.zeros(1 << 20, device=CUDA) for _ in range(4)]
    torch.cuda.synchronize()
    for _ in itertools.repeat(None, 20):
        busy = torch.tanh(busy @ busy)
    for number, value in enumerate(values):
        value += number + 0 * busy[0, 0]
    pairs = [(torch.empty(value.shape), value) for value in values]
    ordered = threading.Event()
    copying = Task(lambda check: ordered.set(), pairs, CUDA)
    for _ in itertools.repeat(None, 100):  # hundreds of milliseconds, queued at once
        busy = torch.tanh(busy @ busy)
    done = torch.cuda.Event()
    done.record()
    copying.join()
    assert copying.error is None
    assert not done.query()
    assert ordered.is_set()
    for number, pair in enumerate(pairs):
        assert (pair.place == number).all()
    torch.cuda.synchronize()
