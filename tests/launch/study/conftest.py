"""A small study over the small run of `tests/launch`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CP = {"kind": "mumoe", "factorization": "cp", "num_experts": [4], "rank": "match-dense"}
LEAKY = {
    **{"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "graph": "similarity"},
    "similarity": "cosine",
}
WriteStudy = Callable[..., Path]


def small_study(folder: Path, base: Path, data: Path) -> dict[str, Any]:
    """Two variants of a run of four steps, on text that is prepared."""
    return {
        "base": str(base),
        "folder": str(folder / "study"),
        "data": {"path": str(data)},
        "seeds": [1],
        "baseline": "dense",
        "common": {"optimizer.learning_rate": 0.01, "log.trackers": []},
        "variants": {"dense": None, "cp": {"model.feed_forward": CP}},
    }


@pytest.fixture
def write_study(tmp_path: Path, config: Path, data: Path) -> WriteStudy:
    """Writes study.yaml; keywords replace whole keys, and None leaves one out."""

    def write(**changes: Any) -> Path:
        tree = small_study(tmp_path, config, data) | changes
        path = tmp_path / "study.yaml"
        path.write_text(
            yaml.safe_dump({k: v for k, v in tree.items() if v is not None}, sort_keys=False)
        )
        return path

    return write
