"""What several files here compare with."""

import pytest

from tests.helpers.training import train


@pytest.fixture(scope="module")
def whole_runs(workers, tmp_path_factory):
    """A case in one process at stage 0, once: its result and its checkpoint."""
    made = {}

    def whole_run(case):
        case = case.but(stage=0)
        if case not in made:
            folder = tmp_path_factory.mktemp("reference")
            result = workers(1).run(train, case.but(save_to=str(folder)))[0]
            made[case] = result, folder / "step-00000004"
        return made[case]

    return whole_run
