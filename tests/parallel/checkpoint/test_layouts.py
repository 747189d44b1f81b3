"""Checkpoints are the same on every layout: written on one, read on another, in pieces."""

import pytest
import torch

from polyad.parallel.checkpoint.load import Checkpoint
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state, near
from tests.helpers.training import Case, assert_equal_routing, resave, tensors, train
from tests.parallel.test_parity import MUMOE_LAYOUTS, case_of, over, read

pytestmark = pytest.mark.distributed

ADAMW = {
    "optimizer": "adamw", "learning_rate": 1e-2, "clip": 1.0, "average": 0.9, "last_step": 4
}  # fmt: skip
ON_DENSE = [*over("1, 2, 2 TP2, 4 TP2"), "2 TP2 SP", "4 TP2 SP"]
ON_SPARSE = [
    *over("2 EP2, 4 EP2, 4 EP4, 4 TP2 EP2, 2, 2 TP2", "12"),
    *("4 EP2 Z3", "4 TP2 EP2 Z3", "4 TP2 SP"),
]
ON_EMERGENT = [*over("1, 2, 2 TP2, 4 TP2", "13"), "2 EP2 Z2", "4 EP2", "4 EP4", "4 TP2 EP2 Z2"]
OF_KIND = {
    "many words": [*ON_DENSE, *(f"{each} bf16" for each in over("1, 2, 4 TP2"))],
    "mumoe cp": [*over("2"), *MUMOE_LAYOUTS, "4 TP2 SP"],
    "mumoe tr": [*over("2"), *MUMOE_LAYOUTS],
    **dict.fromkeys(("odd cp", "odd tr"), over("2")),
    "smoe, all state": ON_SPARSE,
    "decoder latent": ["4 EP2 Z2 muon"],
    "decoder sinks": ["4 TP2 EP2 stacked", "4 EP2 Z3 stacked"],
    "emoe cosine": ON_EMERGENT,
    "bert": ["4 TP2"],
    "bert sparse": ["4 TP2 EP2"],
    "mixer cp": ["4 TP2"],
    "vit sparse attention": ["4 TP2 EP2"],
    "mixture attentive, BatchNorm": ["2 Z3"],
    "lora dense": ["4 TP2 Z3", "4 TP2 Z3 bf16"],
}


def row(name: str, layout: str, **changes: object) -> tuple[Case, int]:
    """A kind on a layout, and the number of processes."""
    processes, ours, _, both = read(layout)
    ranks = processes // ours.get("tensor", 1)
    return case_of(name, ranks, **ADAMW | both | ours | changes), processes


@everyday(
    ("name", "layout"),
    [(name, layout) for name, layouts in OF_KIND.items() for layout in layouts],
    keep=[
        ("many words", "4 TP2 Z3 bf16"),
        ("odd cp", "2 Z3"),
        ("smoe, all state", "4 TP2 EP2 Z2"),
        ("decoder sinks", "4 TP2 EP2 stacked"),
        ("vit sparse attention", "4 TP2 EP2"),
        ("lora dense", "4 TP2 Z3 bf16"),
    ],
    ids=", ".join,
)
def test_any_layout_loads_what_another_wrote(workers, whole_runs, tmp_path, name, layout):
    case, processes = row(name, layout)
    one, _ = row(name, "1", precision=case.precision, optimizer=case.optimizer)
    _, written = whole_runs(one)
    there, back = tmp_path / "there", tmp_path / "back"
    workers(processes).run(resave, case.but(first_step=4, resume=str(written), save_to=str(there)))
    path = there / "step-00000004"
    assert_equal_state(path, written)
    workers(1).run(resave, one.but(first_step=4, resume=str(path), save_to=str(back)))
    assert_equal_state(back / "step-00000004", written)
    fields = Checkpoint(path).tensors
    assert {"master", "exp_avg", "exp_avg_sq", "ema"} <= {key for _, key in tensors(path)}
    moments = [each["exp_avg"].chunks for each in fields.values() if "exp_avg" in each]
    assert {chunk.step for chunks in moments for chunk in chunks} == {4.0}
    if case.precision == "bf16":  # of weights in fp32
        masters = [value for (_, field), value in tensors(path).items() if field == "master"]
        assert not all(torch.equal(value, value.bfloat16().float()) for value in masters)


# As OLMoE, DeepSeek-V3 and gpt-oss are; what only training has changes from step to step, too.
PUBLISHED = ("decoder norm over heads", "decoder latent", "decoder sinks")
ON_EXPERTS = ["2 EP2", "4 EP4", "4 TP2 EP2 Z2", "4 TP2 EP2 SP", "4 EP2 Z3"]
IN_PIECES = [
    *(("many words", f"{each}{end}") for each in ON_DENSE for end in ("", " bf16")),
    *((name, each) for name in ("mumoe cp", "mumoe tr") for each in ("1", "2 Z2 bf16", "2 Z3")),
    *((name, "1 muon") for name in ("dense", "odd cp", "odd tr", "smoe, all state")),
    *(("pools of any size", each) for each in ("1", "2 TP2")),
    *(("smoe, all state", f"{each}{end}") for each in ON_EXPERTS for end in ("", " bf16")),
    *(
        (name, f"{each}{('', ' bf16')[(number + turn) % 2]}")
        for number, name in enumerate(PUBLISHED)
        for turn, each in enumerate(ON_EXPERTS)
    ),
]


@everyday(("name", "layout"), IN_PIECES, keep=[("many words", "2 Z1 bf16")], ids=", ".join)
def test_a_run_in_two_pieces_is_bitwise_the_run_in_one(workers, tmp_path, name, layout):
    case, processes = row(name, layout, dropout=0.1, learning_rate=1e-3)
    pool = workers(processes)
    whole = pool.run(train, case.but(last_step=7, save_to=str(tmp_path / "whole")))[0]
    first = pool.run(train, case.but(last_step=4, save_to=str(tmp_path / "half")))[0]
    pool.stop()  # the next call starts new processes
    middle = str(tmp_path / "half" / "step-00000004")
    rest = case.but(first_step=4, last_step=7, resume=middle, save_to=str(tmp_path / "rest"))
    second = pool.run(train, rest)[0]
    for key in ("losses", "norms"):
        assert first[key] + second[key] == whole[key], key
    if any(whole["routing"]):
        assert_equal_routing(first["routing"] + second["routing"], whole["routing"])
    end = "step-00000007"
    assert_equal_state(tmp_path / "rest" / end, tmp_path / "whole" / end)
    found = tensors(tmp_path / "rest" / end)
    if name == "decoder latent":
        layer = "blocks.1.feed_forward"
        loads = torch.tensor([step[f"routing/{layer}/load"] for step in whole["routing"]])
        moved = 0.001 * (0.25 - loads).sign().sum(0)
        bias = found[f"{layer}.router.selection.balancing_bias", "buffer"]
        assert torch.allclose(bias, moved, atol=1e-6)
    if name == "smoe, all state":
        entropy = found["blocks.0.feed_forward.router.graph.head_entropy", "buffer"]
        assert not torch.equal(entropy, entropy.bfloat16().float())


GOING_ON = [
    *((name, each) for name in ("many words", "mumoe cp", "mumoe tr") for each in ON_DENSE),
    *(("smoe, all state", each) for each in ON_SPARSE),
    *(("emoe cosine", each) for each in ON_EMERGENT),
]


@everyday(
    ("name", "layout"),
    GOING_ON,
    keep=[("many words", "4 TP2 Z3"), ("emoe cosine", "2 TP2 Z3")],
    ids=", ".join,
)
def test_training_goes_on_alike_on_another_layout(workers, whole_runs, name, layout):
    one, (case, processes) = row(name, "1")[0], row(name, layout)
    rest = {"first_step": 4, "last_step": 7, "resume": str(whole_runs(one.but(last_step=4))[1])}
    expected, _ = whole_runs(one.but(**rest))
    result = workers(processes).run(train, case.but(**rest))[0]
    chooses = name in ("smoe, all state", "emoe cosine")
    assert near(result["losses"], expected["losses"], 1e-3 if chooses else 1e-5)


@everyday(
    ("before", "after"),
    [(a, b) for a in ("1", "2", "2 TP2", "4 TP2") for b in ("2", "2 TP2", "4 TP2")],
    keep=[("2", "2 TP2")],
)
def test_processes_that_share_layers_drop_the_same_on_any_layout(workers, tmp_path, before, after):
    wanted = {"dropout": 0.2, "report_randomness": True}
    case, processes = row("dense", before, last_step=2, save_to=str(tmp_path), **wanted)
    saved = workers(processes).run(train, case)
    path = str(tmp_path / "step-00000002")
    case, processes = row("dense", after, first_step=2, last_step=5, resume=path, **wanted)
    found = workers(processes).run(train, case)
    assert len({each["norm_weight"].numpy().tobytes() for each in found}) == 1
    draws = {each["rank"]: each["next_draw"] for each in found}
    for (_, data), draw in draws.items():
        assert draw == draws[0, data]
        assert all(draw != draws[0, other] for _, other in draws if other != data)
    loaded = workers(processes).run(train, case.but(last_step=2))
    goes_on = [each["next_draw"] for each in saved] == [each["next_draw"] for each in loaded]
    assert goes_on == (before == after)
