"""The script of a GPU's check: what it reads of traces and tests; and as it runs, without a GPU."""

import json
import subprocess
import sys

import pytest

from tests.gpu.check import ROOT, parts, trace_of


def test_kernels_beside_each_other_count_once_and_gaps_do_not():
    def kernel(name, first, duration, cat="kernel"):
        return {"name": name, "cat": cat, "ts": first, "dur": duration}

    found = trace_of(
        [
            kernel("mm", 100.0, 50.0),
            kernel("copy", 120.0, 10.0, "gpu_memcpy"),  # within
            kernel("mm", 140.0, 20.0),  # 10 beyond
            kernel("add", 200.0, 40.0),
            kernel("aten::mm", 0.0, 999.0, "cpu_op"),
        ]
    )
    assert found["kernels"] == 4
    assert found["seconds"] == pytest.approx(140e-6)
    assert found["busy_seconds"] == pytest.approx(100e-6)
    assert found["most"]["mm"] == [pytest.approx(0.07), 2]
    assert trace_of([]) == {"kernels": 0}


def test_parts_have_names_of_their_own_and_files_that_are_there(tmp_path):
    for tiny in (False, True):
        names = [part.name for part in parts(tmp_path, tiny)]
        assert len(set(names)) == len(names)
        for part in parts(tmp_path, tiny):
            for word in part.words:
                if word.startswith(("tests/", "configs/")):
                    assert (ROOT / word).exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_is_stopped_goes_on_and_is_read_where_there_is_no_gpu(tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "tests/gpu/check.py", "--tiny", "--out", str(out)]
    only = ["--only", "tests-device", "train", "resume"]
    done = subprocess.run([*words, *only], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert [*result] == ["visit", "data", *only[1:]]
    assert result["tests-device"]["tests"]["failed"] == []
    first, both = result["train"]["run"], result["resume"]["run"]
    assert both["steps"][1] > first["steps"][1] > 0
    assert (out / "logs.tar.gz").stat().st_size > 0
