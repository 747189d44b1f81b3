"""A checkpoint that several files damage."""

import pytest

from tests.helpers.training import Case, train


@pytest.fixture(scope="session")
def good_checkpoint(workers, tmp_path_factory):
    """A checkpoint of two processes, for copying."""
    folder = tmp_path_factory.mktemp("good")
    workers(2).run(train, Case(stage=1, last_step=1, save_to=str(folder)))
    return folder / "step-00000001"
