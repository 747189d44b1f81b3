"""Compiles all kernels in Triton to machine code of a GPU that need not be there.

Run as a program, without TRITON_INTERPRET; its argument is a compute capability, as 80 or 90.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polyad.model.kernels.triton import entmax, grouped, rows

SIZES = {"BM": grouped.ROWS, "BN": grouped.COLUMNS, "PRECISION": "ieee"}
POINTERS = {
    "groups": "*i64", "firsts": "*i64", "ends": "*i64", "row": "*i64", "assignment": "*i64",
    **dict.fromkeys(
        ("a", "b", "out", "rows", "weights", "gradient", "for_rows", "for_weights", "x", "s"), "*"
    ),
}  # fmt: skip


def compiled(kernel: Any, kind: str, constants: dict[str, Any], target: Any) -> dict[str, Any]:
    """What a kernel became: whether it multiplies with tensor cores, and the memory it shares."""
    signature = {}
    for name in kernel.arg_names:
        pointer = POINTERS.get(name)
        signature[name] = pointer + kind if pointer == "*" else pointer or "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options={"num_warps": 8})
    return {"tensor_cores": "mma" in made.asm["ptx"], "shared_bytes": made.metadata.shared}


def main() -> None:
    """Prints what each kernel became as JSON."""
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    found = {}
    for kind, terms in (("bf16", 64), ("fp32", 32)):
        for kernel in (grouped._rows_kernel, grouped._sums_kernel):
            name = f"{kernel.__name__} {kind}"
            found[name] = compiled(kernel, kind, SIZES | {"BK": terms}, target)
        options = {"WEIGHTS": True, "BLOCK": rows.WIDTH}
        found[f"sum {kind}"] = compiled(rows._sum_kernel, kind, options, target)
        found[f"spread {kind}"] = compiled(rows._spread_kernel, kind, {"BLOCK": rows.WIDTH}, target)
    options = {"STEPS": 15, "ROWS": 2, "BLOCK": 1024}
    found["entmax"] = compiled(entmax._root_kernel, "fp32", options, target)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
