"""Compiles Triton kernels to machine code of a GPU that need not be present.

Run as a program, without TRITON_INTERPRET; its arguments are a compute capability, as 80 or 90, and
which kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

POINTERS = {
    "groups": "*i64", "firsts": "*i64", "ends": "*i64", "row": "*i64", "assignment": "*i64",
    **dict.fromkeys(
        ("a", "b", "out", "rows", "weights", "gradient", "for_rows", "for_weights", "x", "s"), "*"
    ),
}  # fmt: skip


def compiled_for(capability: int, cache: Path, which: str) -> dict[str, dict[str, Any]]:
    """What kernels became, by name and precision; see `compiled`.

    Args:
        capability: Of the GPU.
        cache: A folder for the machine code.
        which: `products`, or `rows`: sums over rows, and entmax.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.machine_code", str(capability), which],
        env=kept | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def compiled(kernel: Any, kind: str, constants: dict[str, Any], target: Any) -> dict[str, Any]:
    """What a kernel became: whether it multiplies with tensor cores, and the memory it shares."""
    import triton
    from triton.compiler import ASTSource

    signature = {}
    for name in kernel.arg_names:
        pointer = POINTERS.get(name)
        signature[name] = pointer + kind if pointer == "*" else pointer or "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options={"num_warps": 8})
    return {"tensor_cores": "mma" in made.asm["ptx"], "shared_bytes": made.metadata.shared}


def products(target: Any) -> dict[str, dict[str, Any]]:
    """What grouped products became."""
    from polyad.model.kernels import grouped_triton as grouped

    sizes = {"BM": grouped.ROWS, "BN": grouped.COLUMNS, "PRECISION": "ieee"}
    return {
        f"{kernel.__name__} {kind}": compiled(kernel, kind, sizes | {"BK": terms}, target)
        for kind, terms in (("bf16", 64), ("fp32", 32))
        for kernel in (grouped._rows_kernel, grouped._sums_kernel)
    }


def rows(target: Any) -> dict[str, dict[str, Any]]:
    """What sums over rows, and entmax, became."""
    from tests.benchmarks.kernels import entmax, rows

    found = {}
    for kind in ("bf16", "fp32"):
        options = {"WEIGHTS": True, "BLOCK": rows.WIDTH}
        found[f"sum {kind}"] = compiled(rows._sum_kernel, kind, options, target)
        found[f"spread {kind}"] = compiled(rows._spread_kernel, kind, {"BLOCK": rows.WIDTH}, target)
    options = {"STEPS": 15, "ROWS": 2, "BLOCK": 1024}
    return found | {"entmax": compiled(entmax._root_kernel, "fp32", options, target)}


if __name__ == "__main__":
    from triton.backends.compiler import GPUTarget

    chosen = {"products": products, "rows": rows}[sys.argv[2]]
    print(json.dumps(chosen(GPUTarget("cuda", int(sys.argv[1]), 32))))
