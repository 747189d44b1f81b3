"""Whole runs with factorized experts: what is recorded, and what can be done with the result."""

import pytest
import yaml
from scipy.stats import entropy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyad.parallel.weights import load_model
from tests.helpers.runs import records, run, write_config

pytestmark = pytest.mark.distributed

SECTION = {"kind": "mumoe", "factorization": "tr", "num_experts": [16, 2]}
LAYER = "routing/blocks.1.feed_forward"
# Dense block 2 x 32 x 128 + 160 = 8,352. Gate 32 x 18 = 576; both layers' cores 2 (256 + 32); of
# each R3 4 (33 + 128 + 129 + 32) = 1,288: (8352 - 576 - 576) / 1288 = 5.6.
RANK = 6


@pytest.fixture(scope="module")
def finished(workers, tmp_path_factory, prepared_path):
    """A run of 3 steps by 2 processes at ZeRO 3, which one process takes to 6 at ZeRO 1."""
    folder = tmp_path_factory.mktemp("mumoe")
    changes = {"model__feed_forward": SECTION, "train__steps": 3, "parallel__zero_stage": 3}
    config = write_config(folder / "config.yaml", prepared_path, **changes)
    workers(2).run(run, config)
    assert workers(1).run(run, config, "train.steps=6", "parallel.zero_stage=1") == [6]
    return folder


def test_every_step_records_what_each_gate_did(finished):
    lines = records(finished / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    first = lines[0]  # the gate starts at zero: 32 leaves, one as good as any other
    # The dominant of the second level are 0.5, or just below.
    assert {key: first[f"{LAYER}/{key}"] for key in ("dominated", "load_max")} == pytest.approx(
        {"dominated": 0, "load_max": 1}
    )
    assert first[f"{LAYER}/load"] == pytest.approx([1 / 16] * 16 + [1 / 2] * 2)
    assert first[f"{LAYER}/entropy"] == pytest.approx(3.4657, abs=1e-3)  # ln 32
    assert first[f"{LAYER}/level_entropy"] == pytest.approx([2.7726, 0.6931], abs=1e-3)
    assert first[f"{LAYER}/effective_experts"] == pytest.approx(32, rel=1e-4)
    assert first[f"{LAYER}/dominant"][:16] == [0] * 16
    for line in lines:
        load, dominant = line[f"{LAYER}/load"], line[f"{LAYER}/dominant"]
        assert (sum(load[:16]), sum(load[16:])) == pytest.approx((1, 1), abs=1e-4)
        busiest = max(16 * max(load[:16]), 2 * max(load[16:]))
        assert line[f"{LAYER}/load_max"] == pytest.approx(busiest, rel=1e-5)
        assert line[f"{LAYER}/unused"] == pytest.approx(load.count(0.0) / 18)
        assert all(share <= 2 * mean + 1e-6 for share, mean in zip(dominant, load, strict=True))
        used = entropy(load[:16]) + entropy(load[16:])
        assert line[f"{LAYER}/usage_entropy"] == pytest.approx(used, abs=1e-4)
        by_level = sum(line[f"{LAYER}/level_entropy"])
        assert by_level == pytest.approx(line[f"{LAYER}/entropy"], abs=1e-4)
        assert not any("dropped" in key or "balance" in key for key in line)
        both = [line[f"routing/blocks.{block}.feed_forward/effective_experts"] for block in (0, 1)]
        assert line["routing/effective_experts"] == pytest.approx(sum(both) / 2)
    assert lines[-1][f"{LAYER}/effective_experts"] < 31
    # Both parts of the run may have begun in one second, by which TensorBoard orders their files.
    place, every = str(finished / "run" / "tensorboard"), {"histograms": 0}
    events = EventAccumulator(place, every, purge_orphaned_data=False)
    events.Reload()
    for name in ("load", "dominant"):
        last = max(events.Histograms(f"{LAYER}/{name}"), key=lambda event: event.step)
        histogram = last.histogram_value
        total = sum(lines[-1][f"{LAYER}/{name}"])
        assert (histogram.num, histogram.sum) == (18, pytest.approx(total))


def test_the_run_keeps_the_rank_that_was_solved_for(finished):
    tree = yaml.safe_load((finished / "run" / "config.yaml").read_text())
    assert tree["model"]["feed_forward"]["rank"] == RANK
    block = load_model(finished / "run").blocks[1].feed_forward
    assert block.up.output_factor.shape == (4, RANK, 128)
