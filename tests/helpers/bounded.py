"""`polyad ARGUMENT...` with little memory: `python tests/helpers/bounded.py MIB FILE ARGUMENT...`.

It may use MIB MiB more than after importing its libraries; files mapped for reading do not count.
Writes to FILE the peak in bytes, and the times at which each block was in memory.
"""

import json
import resource
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from polyad.model.families.keys import configurations
from polyad.parallel.weights import Streamed
from polyad.parallel.zero import import_deepspeed


def main() -> None:
    mib, told = float(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    import polyad.train.evaluation.evaluate
    import polyad.train.measures.measure  # noqa: F401
    from polyad.launch.cli import run

    import_deepspeed()
    _ = configurations("olmoe")["olmoe"]  # imports transformers, which reads config.json
    process, part, seconds = psutil.Process(), Streamed.part, []
    before, most = _private(), [0]

    def watch() -> None:
        while True:
            most[0] = max(most[0], _private() - before)
            time.sleep(0.005)

    @contextmanager
    def timed(self, *begins):
        began = time.monotonic()
        with part(self, *begins):
            loaded = time.monotonic()
            yield
        seconds.append((begins[0], loaded - began, time.monotonic() - loaded))

    Streamed.part = timed
    threading.Thread(target=watch, daemon=True).start()
    limit = process.memory_info().data + int(mib * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    status = run(sys.argv[1:])
    told.write_text(json.dumps({"most": most[0], "seconds": seconds}))
    sys.exit(status)


def _private() -> int:
    """Bytes of memory that are not mapped from files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise AssertionError("/proc/self/status: no RssAnon")


if __name__ == "__main__":
    main()
