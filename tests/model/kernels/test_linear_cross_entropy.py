"""The loss without whole logits, beside PyTorch's cross-entropy of whole ones."""

import math

import pytest
import torch

from polyad.model.kernels import linear_cross_entropy as kernel
from polyad.model.kernels.linear_cross_entropy import (
    VocabularyPart,
    by_definition,
    linear_cross_entropy,
)
from tests.helpers.allocated import Allocated
from tests.helpers.everyday import everyday

N, D, V = 37, 16, 101


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, V, (N,), generator=generator)


def gradients(operation, *arguments, factor=1.0):
    loss = operation(*arguments)
    return loss, *torch.autograd.grad(factor * loss, arguments[:2])


def compiled(*arguments):
    """The form of a compiler, whose kernels are not written here."""
    return torch.compile(linear_cross_entropy, backend="aot_eager")(*arguments)


@everyday(
    ("operation", "chunk"),
    [
        *((linear_cross_entropy, chunk) for chunk in (1, 7 * V, 1 << 26)),
        *((compiled, chunk) for chunk in (1, 7 * V, 1 << 26)),
    ],
    keep=[*((linear_cross_entropy, chunk) for chunk in (1, 7 * V)), (compiled, 7 * V)],
)
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, operation, chunk):
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    x, weight, targets = drawn()
    ours = gradients(operation, x, weight, targets, factor=3.0)
    theirs = gradients(by_definition, x, weight, targets, factor=3.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_compiled_vocabulary_with_padding_has_no_gradient_there():
    x, weight, targets = drawn()
    real = int(targets.max()) + 1
    part = VocabularyPart(0, real)
    ours = gradients(lambda *given: compiled(*given, part), x, weight, targets)
    theirs = gradients(lambda x, w, t: by_definition(x, w[:real], t), x, weight, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not ours[2][real:].any()


@pytest.mark.parametrize("chunk", [3 * V, 1 << 26])
def test_in_bf16_it_is_as_near_to_the_truth_as_whole_logits(monkeypatch, chunk):
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    x, weight, targets = drawn(torch.bfloat16)
    exact = gradients(
        by_definition, *(t.detach().double().requires_grad_() for t in (x, weight)), targets
    )
    ours = gradients(linear_cross_entropy, x, weight, targets)
    theirs = gradients(by_definition, x, weight, targets)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype
        errors = [((each.double() - true).norm() / true.norm()).item() for each in (one, other)]
        assert errors[0] < 1.5 * errors[1] + 1e-6


def test_only_what_is_wanted_has_a_gradient():
    x, weight, targets = drawn()
    (of_x,) = torch.autograd.grad(linear_cross_entropy(x, weight.detach(), targets), [x])
    torch.testing.assert_close(of_x, gradients(by_definition, x, weight, targets)[1])
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(x, weight, targets), by_definition(x, weight, targets)
        )
    each = torch.nn.functional.cross_entropy(x @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(kernel.token_scores(x, weight, targets)[0], each.detach())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad):
    x, weight, targets = drawn()
    with torch.no_grad():
        x[3, 2] = bad
    loss, of_x, of_weight = gradients(linear_cross_entropy, x, weight, targets)
    assert not loss.isfinite()
    assert not of_x.isfinite().all()
    assert not of_weight.isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_given_targets_returns_its_loss(small_model, random_ids, tied):
    model, ids = small_model(tied_embeddings=tied), random_ids(3, 17)
    given, targets = ids[:, :-1], ids[:, 1:]
    loss = model(given, target_ids_BT=targets).logits
    expected = torch.nn.functional.cross_entropy(model(given).logits.mT, targets)
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        each = model(given, target_ids_BT=targets).logits
    assert each.shape == (3, 16)
    torch.testing.assert_close(each.mean(), expected.detach())
    ours, theirs = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_memory_of_the_loss_at_full_size():
    """Counted on the meta device: 32 x 1,024 tokens of GPT-2's vocabulary in bf16."""
    tokens, width, vocabulary = 32 * 1024, 768, 50_257
    peaks = {}
    for name, operation in (("whole", by_definition), ("chunks", linear_cross_entropy)):
        with torch.device("meta"):
            x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.empty(tokens, dtype=torch.int64)
            with Allocated() as allocated:
                operation(x, weight, targets).backward()
        peaks[name] = allocated.peak
    assert peaks["whole"] > 15e9
    assert peaks["chunks"] < 2e9


def test_a_target_beyond_the_vocabulary_is_an_error():
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel.token_scores(torch.randn(3, 8), torch.randn(10, 8), torch.tensor([0, 9, 10]))
