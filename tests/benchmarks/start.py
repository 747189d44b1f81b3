"""One start of `step.py` in a process of its own, cold or warm as its cache is.

    python -m tests.benchmarks.start '{"began": ..., "name": "polyad", ...}'

prints JSON: seconds until the imports were done, the model and its optimizer stood, and the first
step had ended, each since the process was asked for; and the most memory of two steps.
"""

import json
import sys
import time
from typing import Any

import torch

from polyad.model.decoder_config import GPT2Config
from polyad.train.guard.failures import is_out_of_memory
from polyad.train.loop.profiling import peak_memory_bytes
from tests.benchmarks.step import OUT_OF_MEMORY
from tests.benchmarks.step_variants import make_step
from tests.benchmarks.turns import prepare_device, synchronize


def measure(began: float, order: dict[str, Any]) -> dict[str, Any]:
    """Starts a variant and runs two steps.

    Args:
        began: when the process was asked for, in seconds of the clock.
        order: what `make_step` takes, with the configuration as JSON.

    Returns:
        JSON values.
    """
    name, device = order.pop("name"), order["device"]
    prepare_device(device)
    if name == "transformers":
        from transformers import GPT2LMHeadModel  # noqa: F401
    imported = time.time()
    config = GPT2Config.model_validate(order.pop("config"))
    step = make_step(name, config, order.pop("precision"), **order)
    synchronize(device)
    built = time.time()
    step()
    synchronize(device)
    stepped = time.time()
    step()
    synchronize(device)
    on_gpu = device == "cuda"
    return {
        "imports_seconds": imported - began,
        "built_seconds": built - began,
        "first_step_seconds": stepped - began,
        "peak_memory_bytes": peak_memory_bytes(torch.device(device)),
        "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "compiled_graphs_found": _graphs_found(),
    }


def _graphs_found() -> int:
    """The number of compiled graphs that this process took from the cache."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def main() -> int:
    """Measures what the command line says; a lack of memory is one line and status 1."""
    order = json.loads(sys.argv[1])
    try:
        print(json.dumps(measure(order.pop("began"), order)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(OUT_OF_MEMORY, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
