"""Comparisons of results between several processes and another layout, or one process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyad.parallel.checkpoint.load import find_checkpoint
from tests.helpers.runs import records, run, weights_of
from tests.helpers.training import relative, tensors
from tests.helpers.workers import WorkerPool


def near(ours: Any, theirs: Any, rtol: float = 1e-5) -> bool:
    """Whether numbers, in lists, differ by no more than a share of them."""
    return torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=rtol, atol=0)


def assert_same_course(
    result: dict[str, Any], expected: dict[str, Any], norms_rtol: float = 1e-5
) -> None:
    """Checks losses and norms of gradients of all steps."""
    assert near(result["losses"], expected["losses"]), (result["losses"], expected["losses"])
    assert near(result["norms"], expected["norms"], norms_rtol)


def assert_same_routing(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks the records of routing of all steps."""
    for a, b in zip(result["routing"], expected["routing"], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            ours, theirs = torch.tensor(a[key]), torch.tensor(b[key])
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), key


def assert_near_state(folder: Path, expected: Path, *, rounding: bool = False) -> None:
    """Checks the tensors of a checkpoint against those that another layout has trained to.

    Args:
        folder: The checkpoint.
        expected: The other one.
        rounding: Whether some may be rounding around zero: what adds the same to all channels of a
            patch is taken out by the next LayerNorm, so that in a Mixer the gradient of such a
            bias, and the mean of a token gate's scores, are no numbers to compare by their size.
    """
    ours, theirs = tensors(folder), tensors(expected)
    assert ours.keys() == theirs.keys()
    if rounding:
        far = {key: (ours[key] - theirs[key]).abs().max() for key in theirs}
        allowed = {key: 2e-5 * theirs[key].abs().max() + 1e-6 for key in theirs}
        assert [key for key in theirs if far[key] > allowed[key]] == []
    else:
        assert max(relative(ours[k].double(), theirs[k].double()) for k in theirs) < 1e-5


def assert_equal_tensors(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    """Checks that the same tensors are there, and equal to the last bit."""
    assert ours.keys() == theirs.keys()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def assert_equal_state(folder: Path, expected: Path) -> None:
    """Checks that the tensors of two checkpoints are equal to the last bit."""
    assert_equal_tensors(tensors(folder), tensors(expected))


def assert_equal_files(folder: Path, expected: Path) -> None:
    """Checks that the tensors of two folders of weights are equal to the last bit."""
    assert_equal_tensors(*(load_file(each / "model.safetensors") for each in (folder, expected)))


def assert_two_train_as_one(
    workers: Callable[[int], WorkerPool],
    config: Path,
    words: Sequence[str],
    of_two: Sequence[str] = (),
    keys: tuple[str, ...] = ("loss",),
    **near: float,
) -> list[Path]:
    """Trains by one process and by two, and compares records and last weights.

    Args:
        workers: pools of processes.
        config: of both runs.
        words: `key=value`, of both.
        of_two: more of the run by two.
        keys: how those of a record begin that are compared.
        near: how near their numbers have to be; if not given, to a share of 1e-5.

    Returns:
        The folders of the runs.
    """
    folders = [config.parent / f"on-{number}" for number in (1, 2)]
    for number, folder, more in zip((1, 2), folders, ((), of_two), strict=True):
        workers(number).run(run, config, f"run.folder={folder}", *words, *more)
    for one, two in zip(*map(records, folders), strict=True):
        for key in (key for key in one if key.startswith(keys)):
            assert two[key] == pytest.approx(one[key], **near or {"rel": 1e-5}), key
    one, two = (weights_of(find_checkpoint(folder)) for folder in folders)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    return folders
