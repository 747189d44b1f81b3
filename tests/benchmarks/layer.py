"""One layer of experts beside a dense MLP and peers: `smoe.py` and `mumoe.py`."""

from typing import Annotated, Any, Literal

from polyad.launch.command import Argument, Json, UsageError, positive
from polyad.launch.output import results
from tests.benchmarks.mumoe import bench_mumoe, mumoe_table
from tests.benchmarks.script import Device, PrecisionOption, Repeats, Threads, benchmark, start
from tests.benchmarks.smoe import bench_smoe, smoe_table

Kind = Literal["smoe", "mumoe"]
ONLY_OF: dict[str, Kind] = {"top_k": "smoe", "load": "smoe", "compile": "mumoe"}
"""Options, and the kind of layer that they are of."""


@benchmark(
    "layer",
    "--precision bf16 --json layer.json",
    "--kind mumoe --experts 256 --threads 1",
)
def layer(
    *,
    kind: Annotated[Kind, Argument("kind of layer; default smoe")] = "smoe",
    tokens: Annotated[
        int | None,
        Argument("tokens of a forward pass; default 4096; mumoe 1024", "N", positive),
    ] = None,
    experts: Annotated[
        list[int] | None,
        Argument(
            "number of experts; default 16; mumoe takes several, default 64 256 2048",
            "E",
            positive,
            nargs="+",
        ),
    ] = None,
    top_k: Annotated[
        int | None, Argument("smoe: experts of a token; default 2", "K", positive)
    ] = None,
    width: Annotated[
        int | None, Argument("width of a token; default 256; mumoe 768", "D", positive)
    ] = None,
    hidden: Annotated[
        int | None,
        Argument(
            "inner width of one expert; default 1024; of mumoe's experts together, and of their "
            "dense MLP, 3072",
            "F",
            positive,
        ),
    ] = None,
    precision: PrecisionOption = None,
    load: Annotated[
        Literal["uniform", "skewed"] | None,
        Argument("smoe: skewed sends half of the tokens to one expert; default: both"),
    ] = None,
    repeats: Repeats = 7,
    threads: Threads = None,
    device: Device = "cpu",
    compile: Annotated[bool, Argument("mumoe: compile every variant with torch.compile")] = False,
    json: Json = None,
) -> None:
    """Times a layer of experts, sparse or factorized, beside a dense MLP and peers."""
    asked = {"top_k": top_k, "load": load}
    for name, value in (asked | {"compile": compile or None}).items():
        if value is not None and kind != ONLY_OF[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: is of --kind {ONLY_OF[name]}, this is {kind}")
    shape = {"tokens": tokens, "top_k": top_k, "width": width, "hidden": hidden}
    given: dict[str, Any] = {
        **{name: value for name, value in shape.items() if value is not None},
        **({"precisions": (precision,)} if precision else {}),
        **({"loads": (load,)} if load else {}),
        **({"threads": threads} if threads else {}),
        **{"repeats": repeats, "device": device},
    }
    if experts and kind == "smoe":
        if len(experts) > 1:
            numbers = " ".join(map(str, experts))
            raise UsageError(f"--experts: {numbers}: --kind smoe takes one number")
        given["experts"] = experts[0]
    elif experts:
        given["experts"] = tuple(dict.fromkeys(experts))
    with results(json) as show:
        if kind == "mumoe":
            result = bench_mumoe(**given, compiled=compile)
            show(result, mumoe_table(result))
        else:
            result = bench_smoe(**given)
            show(result, smoe_table(result))


if __name__ == "__main__":
    start(layer)
