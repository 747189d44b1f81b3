"""What the files here compare with."""

import pytest

from tests.helpers.training import train


@pytest.fixture(scope="session")
def whole_runs(workers, tmp_path_factory):
    """A case in one process at stage 1, once: its result and its checkpoint."""
    made = {}

    def whole_run(case):
        case = case.but(stage=1)
        if (key := repr(case)) not in made:
            folder = tmp_path_factory.mktemp("reference")
            result = workers(1).run(train, case.but(save_to=str(folder)))[0]
            made[key] = result, folder / f"step-{case.last_step:08}"
        return made[key]

    return whole_run
