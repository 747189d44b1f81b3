"""The parts of `make quickstart`; the whole of it takes minutes and is run by hand and by CI."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.quickstart import remove_previous_run, summary
from train.errors import ConfigError
from train.unigram import count_tokens, unigram_perplexity


class Stream:
    """Tokens in memory, with what unigram counting uses of a split."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = np.array(tokens, dtype=np.int64)
        self.num_tokens = len(tokens)

    def read(self, start: int, stop: int) -> Any:
        assert stop - start <= 2, "no more than a chunk at a time"
        return self._tokens[start:stop]


def test_unigram_perplexity_is_that_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.unigram.CHUNK_TOKENS", 2)
    train, held_out = Stream([0, 0, 0, 1, 1]), Stream([0, 1, 2])
    assert count_tokens(train, 3).tolist() == [3, 2, 0]  # type: ignore[arg-type]
    # (4, 3, 1) / 8 after adding one; their geometric mean is (12 / 512) ** (1 / 3).
    perplexity = unigram_perplexity(train, held_out, 3)  # type: ignore[arg-type]
    assert perplexity == pytest.approx((512 / 12) ** (1 / 3), rel=1e-12)


def test_a_previous_run_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    remove_previous_run(tmp_path / "none")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    (run / "checkpoints").mkdir()
    (run / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        remove_previous_run(run)
    (run / "notes.txt").unlink()
    remove_previous_run(run)
    assert not run.exists()
    run.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        remove_previous_run(run)


@pytest.mark.distributed
def test_the_table_names_what_was_reached(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]], data: Path
) -> None:
    folder, done = finished_run
    assert done.returncode == 0, done.stderr
    result = {
        **{"perplexity": 12.25, "tokens_scored": 1234},
        **{"word_perplexity": 99.5, "bits_per_byte": 1.5},
    }
    rows = dict(summary(folder, data, result, half=2))
    assert rows["perplexity"].startswith("12.2")
    assert "step-00000002" in rows["went on"]
    assert "tensorboard" in rows["curves"]
    assert float(rows["of a unigram model"].split()[0]) > 1
