"""Kernels and bytes of a compiled training step on an H100 that is not there:

    python -m tests.gpu.fake.kernels 12 configs/gpt2/124m.yaml ...     # started by `library.run`

Inductor plans each graph of a micro-batch of so many samples as a run has it, with the padded
vocabulary, stacked gates and fused attention, and writes its code, which is not loaded. Prints a
line of JSON for each configuration: what failed, why graphs ended early, which kernels store a
value twice; of each graph the kernels in Triton, the other ones (products, attention, operations of
our own), and the bytes that all of them read and write.
"""

import json
import os
import re
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import _dynamo
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from polyad.model import attention
from polyad.model.build import compile_model
from polyad.model.output import ask_for_statistics
from polyad.parallel.config import Dims
from polyad.parallel.parallelize import split_layers
from polyad.parallel.plan import pretended_world
from polyad.parallel.zero import DTYPES
from polyad.train.config.adaptation import model_of
from polyad.train.config.run import RunConfig
from polyad.train.loop.losses import routing_loss
from polyad.train.loop.optimizer import stacks_gates
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.random_input import losses_for, random_batch
from polyad.train.tasks.task import OneDevice
from tests.gpu.fake.library import fake_gpu
from tests.gpu.fake.step import loaded, to_gpu

WORDS = 50_257
"""The vocabulary of GPT-2, where a configuration leaves it to the data."""
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, warp_size=32,
    multi_processor_count=132, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152, L2_cache_size=50 << 20,
    shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
    gcnArchName="", is_integrated=0, uuid="none", clock_rate=1980000, memory_clock_rate=2619000,
    memory_bus_width=5120,
)  # fmt: skip
LAUNCHED = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.(?!aten\._?reinterpret)[\w.]+\(")
"""In generated code: calls that are no kernels in Triton."""


class Written(Exception):
    """The code of a graph, in place of its program."""


@contextmanager
def h100():
    """A context in which PyTorch and Triton believe in an H100."""
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch.utils import _triton
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    state = torch.zeros(16, dtype=torch.uint8)
    of_torch: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: H100.name,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda *_: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
    }
    of_interface = {
        **{name: of_torch[name] for name in ("get_device_properties", "is_available")},
        **{name: of_torch[name] for name in ("current_device", "device_count", "synchronize")},
        "get_compute_capability": lambda *_: 90,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
        "get_raw_stream": lambda _: 0,
        "is_bf16_supported": lambda including_emulation=False: True,
        "set_device": lambda _: None,
        "exchange_device": lambda _: 0,
        "maybe_exchange_device": lambda _: 0,
    }
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(
            get_device_properties=lambda _: {
                "max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32,
            }
        ),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )  # fmt: skip
    interface = device_interface.CudaInterface
    settings = {
        "compile_threads": 1, "shape_padding": False, "fx_graph_cache": False,
        "force_disable_caches": True, "joint_graph_constant_folding": False,
    }  # fmt: skip
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, of_torch),
        (torch.cuda.random, {n: of_torch[n] for n in ("get_rng_state", "set_rng_state")}),
        (interface, {name: staticmethod(call) for name, call in of_interface.items()}),
        (
            interface.Worker,
            {
                "get_device_properties": staticmethod(of_torch["get_device_properties"]),
                "current_device": staticmethod(of_torch["current_device"]),
            },
        ),
        (_triton, {"has_triton": of_torch["is_available"]}),
        (FakeTensorMode, {"avoid_device_init": property(lambda _: True)}),
    ]
    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        for place, names in replaced:
            stack.enter_context(mock.patch.multiple(place, **names))
        stack.enter_context(config.patch(settings))
        runtime.driver.set_active(driver)
        yield


class Planned:
    """A backend that has Inductor write its code, and runs the graph without it.

    Args:
        options: Of Inductor.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V

        self.options = options
        self.graphs: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.code: list[str] = []

        def compiler(direction: str) -> Callable[..., Any]:
            def write(graph: Any, inputs: Any) -> Any:
                with torch._inductor.config.patch(self.options):
                    self._write(direction, graph, inputs)
                return make_boxed_func(graph.forward)

            return write

        def partition(graph: Any, inputs: Any, **named: Any) -> Any:
            with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
                compile_fx._recursive_joint_graph_passes(graph)
            return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **named)

        self.backend = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            decompositions=select_decomp_table,
            partition_fn=partition,
        )

    def _write(self, direction: str, graph: Any, inputs: Any) -> None:
        def write_only(lowered: GraphLowering) -> None:
            code, _ = lowered.codegen()
            moved, *_ = lowered.count_bytes()
            raise Written(getattr(code, "value", code), moved)

        patched = ("compile_to_module", "_compile_to_module")
        with mock.patch.multiple(GraphLowering, **dict.fromkeys(patched, write_only)):
            try:
                compile_fx.compile_fx_inner(graph, inputs)
            except Exception as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, Written):
                    cause = cause.__cause__ or cause.__context__
                if cause is None:
                    said = str(error).strip().splitlines() or [""]
                    self.failed.append(f"{direction}: {type(error).__name__}: {said[0][:300]}")
                    return
                code, moved = cause.args
        self.code.append(code)
        self.graphs.append(
            {
                "pass": direction,
                "triton": code.count(".run("),
                "others": len(LAUNCHED.findall(code)),
                "bytes": moved,
            }
        )


STORED = re.compile(r"tl\.store\((\w+) \+ \(.*?\), (tmp\d+),")
"""In a kernel in Triton: where a value is stored, and which."""


def stored_twice(code: str) -> list[str]:
    """Returns the kernels of generated code that store one value in two tensors."""
    found = []
    for name, kernel in re.findall(r"def (triton_\w+)\((.*?)'''", code, re.DOTALL):
        places = set(STORED.findall(kernel))
        if len({value for _, value in places}) < len(places):
            found.append(name)
    return found


def fused(q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None, **_: Any) -> Any:
    """Attention as a GPU has it: one operation, which no fake GPU has a kernel for."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, 0.0, is_causal, scale=scale)[0]


def check(config: RunConfig, samples: int) -> dict[str, Any]:
    """Compiles a micro-batch of a configuration without dropout of attention."""
    on_cpu, model = random_batch(config.model, range(samples), config.data), model_of(config)
    with pretended_world(Dims(world_size=1)) as world:
        stacked = stacks_gates(config.optimizer)
        split_layers(model, config.parallel, world, stack_gates=stacked)
    planned = Planned({})
    with (
        h100(),
        fake_gpu() as mode,
        mock.patch.object(attention, "scaled_dot_product_attention", fused),
    ):
        to_gpu(model, DTYPES[config.train.precision])
        model.train()
        batch = type(on_cpu)(
            *(None if t is None else mode.from_tensor(t).to("cuda") for t in on_cpu)
        )
        ask_for_statistics(model, losses=config.loss.asked(), samples=False, record_is_due=False)
        compile_model(model, backend=planned.backend)
        of_each, routing = losses_for(config.model)(OneDevice(model, cross_entropy), batch)
        loss, auxiliary = of_each.mean(), routing_loss(routing, config.loss)
        (loss if auxiliary is None else loss + auxiliary).backward()
    return {
        "failed": planned.failed,
        "breaks": dict(_dynamo.utils.counters["graph_break"]),
        "stored_twice": [name for code in planned.code for name in stored_twice(code)],
        "graphs": planned.graphs,
    }


def main() -> None:
    """Prints a line for each configuration."""
    samples, *paths = sys.argv[1:]
    for path in paths:
        _dynamo.reset()
        _dynamo.utils.counters.clear()
        found = check(loaded(Path(path), words=WORDS), int(samples))
        print(json.dumps({"config": path} | found), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.environ["POLYAD_FAKE_GPU"])
    main()
