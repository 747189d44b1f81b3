"""One layer of experts beside a dense MLP and peers: `smoe.py`, `mumoe.py`, `emoe.py`, `mxd.py`."""

from typing import Annotated, Any, Literal

from polyad.launch.command import Argument, Json, UsageError, positive
from polyad.launch.output import results
from tests.benchmarks.emoe import bench_emoe, emoe_table
from tests.benchmarks.expert_parallel import bench_expert_parallel
from tests.benchmarks.mumoe import bench_mumoe, mumoe_table
from tests.benchmarks.mxd import bench_mxd, mxd_table
from tests.benchmarks.script import Device, PrecisionOption, Repeats, Threads, benchmark, start
from tests.benchmarks.smoe import bench_smoe, smoe_table

Kind = Literal["smoe", "mumoe", "emoe", "mxd"]
ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "top_k": ("smoe", "emoe", "mxd"),
    "load": ("smoe",),
    "expert_parallel": ("smoe",),
    "compile": ("mumoe",),
}
"""Options, and the kinds of layers that they are of."""


@benchmark(
    "layer",
    "--precision bf16 --json layer.json",
    "--expert-parallel 2 --precision bf16",
    "--kind mumoe --experts 256 --threads 1",
)
def layer(
    *,
    kind: Annotated[Kind, Argument("kind of layer; default smoe")] = "smoe",
    tokens: Annotated[
        int | None,
        Argument("tokens of a forward pass; default 4096; others than smoe 1024", "N", positive),
    ] = None,
    experts: Annotated[
        list[int] | None,
        Argument(
            "number of experts; default 16; emoe 64; mxd 21490; mumoe takes several, default 64 "
            "256 2048",
            "E",
            positive,
            nargs="+",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        Argument("experts of a token, but for mumoe; default 2; emoe 16, mxd 32", "K", positive),
    ] = None,
    width: Annotated[
        int | None,
        Argument("width of a token; default 256; others than smoe 768", "D", positive),
    ] = None,
    hidden: Annotated[
        int | None,
        Argument(
            "inner width of one expert; default 1024; of mumoe's and emoe's experts together, of "
            "mxd's dense part, and of their dense MLP, 3072",
            "F",
            positive,
        ),
    ] = None,
    precision: PrecisionOption = None,
    load: Annotated[
        Literal["uniform", "skewed"] | None,
        Argument("smoe: skewed sends half of the tokens to one expert; default: both"),
    ] = None,
    expert_parallel: Annotated[
        int | None,
        Argument(
            "smoe: processes of this machine that share the experts, each with N tokens of its "
            "own and --threads, default 1; default: one process",
            "P",
            positive,
        ),
    ] = None,
    repeats: Repeats = 7,
    threads: Threads = None,
    device: Device = "cpu",
    compile: Annotated[bool, Argument("mumoe: compile every variant with torch.compile")] = False,
    json: Json = None,
) -> None:
    """Times a layer of experts, sparse or factorized, beside a dense MLP and peers."""
    asked = {"top_k": top_k, "load": load, "expert_parallel": expert_parallel}
    for name, value in (asked | {"compile": compile or None}).items():
        if value is not None and kind not in ONLY_OF[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: is of --kind {' or '.join(ONLY_OF[name])}, this is {kind}")
    shape = {"tokens": tokens, "top_k": top_k, "width": width, "hidden": hidden}
    given: dict[str, Any] = {
        **{name: value for name, value in shape.items() if value is not None},
        **({"precisions": (precision,)} if precision else {}),
        **({"loads": (load,)} if load else {}),
        **({"threads": threads} if threads else {}),
        **{"repeats": repeats, "device": device},
    }
    if experts and kind != "mumoe":
        if len(experts) > 1:
            numbers = " ".join(map(str, experts))
            raise UsageError(f"--experts: {numbers}: --kind {kind} takes one number")
        given["experts"] = experts[0]
    elif experts:
        given["experts"] = tuple(dict.fromkeys(experts))
    with results(json) as show:
        if kind == "mumoe":
            result = bench_mumoe(**given, compiled=compile)
            show(result, mumoe_table(result))
        elif kind == "mxd":
            result = bench_mxd(**given)
            show(result, mxd_table(result))
        elif kind == "emoe":
            result = bench_emoe(**given)
            show(result, emoe_table(result))
        else:
            processes = expert_parallel or 1
            alone = processes == 1
            result = bench_smoe(**given) if alone else bench_expert_parallel(processes, **given)
            show(result, smoe_table(result))


if __name__ == "__main__":
    start(layer)
