"""`polyad ARGUMENT...` with little memory: `python -m tests.helpers.limited GIB RANK ARGUMENT...`.

That rank may have GIB GiB of addresses more than it has once its libraries are there.
"""

import os
import resource
import sys


def main() -> None:
    gib, rank = float(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    import psutil

    import polyad.train.evaluation.evaluate
    import polyad.train.train
    from polyad.launch.cli import main as polyad
    from polyad.parallel.zero import import_deepspeed

    import_deepspeed()
    if os.environ.get("RANK", "0") == rank:
        size = psutil.Process().memory_info().vms + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    polyad()


if __name__ == "__main__":
    main()
