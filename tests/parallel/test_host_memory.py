"""How much memory a process may take; freed memory that is kept, in processes of their own:
malloc's settings last for ever."""

import json
import os
import resource
import shutil
import subprocess
import sys

import psutil
import pytest

from polyad.parallel.host_memory import free_memory

SCRIPT = """
import json, resource, sys
import torch
from polyad.parallel.host_memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
pages = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(24):
    first, second = torch.ones(16 * 2**20), torch.ones(12 * 2**20)  # 64 and 48 MiB
    del first, second
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(json.dumps([kept, [b - a for a, b in zip(pages, pages[1:])]]))
"""
LIBC = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
pytestmark = pytest.mark.skipif(not LIBC, reason="malloc's settings are glibc's")


def faults(how):
    """What the call returned, and the pages filled in each of 24 rounds of 112 MiB."""
    command = [sys.executable, "-c", SCRIPT, how]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.slow
def test_freed_memory_is_used_again_without_asking_the_system_for_pages():
    _, given_back = faults("leave")
    kept, pages = faults("keep")
    assert kept is True
    assert min(given_back) > 1000  # in pages of 4 KiB, or in huge ones with some of these
    # Some rounds look for a place for each size, and one may look again later.
    assert sorted(pages[12:])[6] < 100


def test_a_control_group_leaves_less_than_the_machine(tmp_path):
    top = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/\n0::/job/step\n")
    assert free_memory(tmp_path) > 50_000_000
    for name, most, taken, cache in (
        ("", "max", 0, 0),
        ("job", 9_000_000, 8_000_000, 3_000_000),  # 4 MB are left
        ("job/step", 7_000_000, 2_000_000, 500_000),
    ):
        group = top / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{taken}\n")
        (group / "memory.stat").write_text(f"anon 7\nactive_file {cache}\ninactive_file 0\n")
    assert free_memory(tmp_path) == 4_000_000
    shutil.rmtree(top / "job")  # as a container sees it: its own group is at the top
    (top / "memory.max").write_text("3000000")
    assert free_memory(tmp_path) == 3_000_000


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_of_the_process_leaves_less_than_the_machine(limit):
    before, memory = resource.getrlimit(limit), psutil.Process().memory_info()
    used = memory.vms if limit == resource.RLIMIT_AS else memory.data
    resource.setrlimit(limit, (used + 100 * 2**20, before[1]))
    try:
        assert 50 * 2**20 < free_memory() <= 100 * 2**20
    finally:
        resource.setrlimit(limit, before)
