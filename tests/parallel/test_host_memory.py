"""Freed memory that is kept, in processes of their own: malloc's settings last for ever."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys
import torch
from polyad.parallel.host_memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
pages = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(12):
    first, second = torch.ones(16 * 2**20), torch.ones(12 * 2**20)  # 64 and 48 MiB
    del first, second
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(json.dumps([kept, [b - a for a, b in zip(pages, pages[1:])]]))
"""
LIBC = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
pytestmark = pytest.mark.skipif(not LIBC, reason="malloc's settings are glibc's")


def faults(how: str, **environment: str) -> tuple[bool | None, list[int]]:
    """What the call returned, and the pages filled in each of twelve rounds of 112 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages = json.loads(done.stdout)
    return kept, pages


@pytest.mark.slow
def test_freed_memory_is_used_again_without_asking_the_system_for_pages() -> None:
    _, given_back = faults("leave")
    kept, pages = faults("keep")
    assert kept is True
    assert min(given_back) > 1000  # in pages of 4 KiB, or in huge ones with some of these
    assert max(pages[-4:]) < 100  # it took some rounds to find a place for each size


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_who_sets_malloc_himself_is_left_alone(variable: dict[str, str]) -> None:
    kept, pages = faults("keep", **variable)
    assert kept is False
    assert min(pages) > 1000
