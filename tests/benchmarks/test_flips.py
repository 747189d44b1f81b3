"""Which flipped bits are noticed: those that can throw a run off its way have to be."""

import pytest

from tests.benchmarks.flips import BITS, bench_flips, flips, flips_table
from tests.benchmarks.script import run

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_top_exponent_bits_are_noticed_everywhere(workers):
    (result,) = workers(1).run(bench_flips, steps=60, matrices=2)
    for precision, (bits, _, _) in BITS.items():
        for place in ("weights", "gradients"):
            rows = result["precisions"][precision][place]
            assert [row["bit"] for row in rows] == list(range(bits))
            top = rows[bits - 2]
            assert top["part"] == "exponent"
            assert (top["noticed"], top["flips"]) == (2, 2), (precision, place, top)
            # And nothing is noticed where there is next to nothing: no false alarm.
            assert all(row["noticed"] == 0 for row in rows[: bits - 9])
            # What is not noticed has hardly changed the loss.
            off = [row["unnoticed_loss_error"] for row in rows if row["noticed"] < row["flips"]]
            assert max(off) < 0.1
    table = flips_table(result)
    assert table.splitlines()[1].split()[:3] == ["fp32", "weights", "31"]


def test_too_few_steps_are_refused(capfd):
    assert run(flips, ["--steps", "7"]) == 2
    assert capfd.readouterr().err == ("polyad: error: --steps: 7 is not allowed, at least 8\n")
