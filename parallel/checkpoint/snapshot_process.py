"""The process that writes snapshots: it reads orders and writes files.

Orders and answers are lines of JSON; tensors lie in memory that it shares with the training
process. It dies with that one, and imports nothing that is slow or large.
"""

import base64
import ctypes
import json
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from polyad.parallel.checkpoint.commit import (
    NotFiniteError,
    Piece,
    Retention,
    Shard,
    commit,
    write_shard,
)
from polyad.parallel.checkpoint.storage import make_folder, reason_of
from polyad.parallel.checkpoint.tensor_bytes import RawTensor

PR_SET_PDEATHSIG = 1


def main() -> None:
    """The program that `SnapshotWriter` starts, with the arguments PARENT and DESCRIPTOR."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
        serve(sys.stdin, sys.stdout, memory)
        os._exit(0)  # without cleanup: views of the shared memory still exist


def serve(orders: Iterable[str], answers: TextIO, memory: Any) -> None:
    """Carries out orders until there are no more.

    Args:
        orders: a line each.
        answers: takes a line for each.
        memory: where the tensors are.
    """
    for line in orders:
        order = json.loads(line)
        try:
            answer = _write(order, memory) if order["do"] == "write" else _commit(order)
        except OSError as error:
            answer = {"error": reason_of(error)}
        except NotFiniteError as error:
            answer = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _write(order: dict[str, Any], memory: Any) -> dict[str, Any]:
    staging = Path(order["staging"])
    make_folder(staging)
    whole = memoryview(memory)
    tensors, pieces = [], []
    for at, key, dtype, shape, nbytes, piece in order["tensors"]:
        data = partial(whole.__getitem__, slice(at, at + nbytes))
        tensors.append(RawTensor(key, dtype, tuple(shape), nbytes, data))
        pieces.append(Piece(*piece))
    return {"shard": write_shard(staging, order["rank"], tensors, pieces)}


def _commit(order: dict[str, Any]) -> dict[str, Any]:
    shards = [Shard(*shard) for shard in order["shards"]]
    others = {name: base64.b64decode(content) for name, content in order["others"].items()}
    staging, keep = Path(order["staging"]), Retention(*order["keep"])
    return {"committed": str(commit(staging, order["step"], shards, others, keep))}


if __name__ == "__main__":
    main()
