"""Times of operations and collectives against numbers worked out by hand."""

import pytest
import torch

from polyad.parallel.dims import Dims
from polyad.parallel.plan.devices import DEVICES
from polyad.parallel.plan.traffic import Amount, Exchange, sent_bytes
from polyad.parallel.plan.work import Shape, Work
from polyad.train.forecast.forecast import best_saving, lost_share, saving
from polyad.train.forecast.times import Place, exchange_seconds, operation_seconds, step_time

A100 = DEVICES["a100-80gb"]
GB = 1_000_000_000


def product(rows: int, inner: int, columns: int, phase: str = "forward") -> Work:
    bf16 = torch.bfloat16
    shapes = (Shape((rows, inner), (inner, 1), bf16), Shape((inner, columns), (columns, 1), bf16))
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    flops = 2 * rows * inner * columns
    return Work(torch.ops.aten.mm.default, shapes, {}, phase, flops, moved, bf16)


def sum_of(size: int) -> Work:
    shape = Shape((size,), (1,), torch.float32)
    return Work(
        torch.ops.aten.add.Tensor, (shape, shape), {}, "update", 0, 12 * size, torch.float32
    )


def place(dims: Dims, processes_of_node: int = 8, zero_stage: int = 1) -> Place:
    return Place(dims=dims, processes_of_node=processes_of_node, zero_stage=zero_stage)


def test_a_product_is_computed_in_rounds_of_tiles() -> None:
    # 32 x 32 tiles of 128 x 128 on 108 multiprocessors are ten rounds, of which the last has 52.
    wanted = 2 * 4096**3 / (312e12 * 0.75 * 1024 / 1080)
    assert operation_seconds(product(4096, 4096, 4096), A100) == pytest.approx(wanted)
    # 11 x 10 tiles are two more than there are multiprocessors, and take a second round.
    one_round = operation_seconds(product(12 * 128, 8192, 9 * 128), A100)
    two_rounds = operation_seconds(product(11 * 128, 8192, 10 * 128), A100)
    assert two_rounds == pytest.approx(2 * one_round)


def test_what_moves_more_than_it_computes_waits_for_memory() -> None:
    million = 1 << 20
    assert operation_seconds(sum_of(100 * million), A100) == pytest.approx(
        1200 * million / (2039e9 * 0.85)
    )
    thin = product(8 * million, 1, 1)
    assert operation_seconds(thin, A100) == pytest.approx(thin.bytes / (2039e9 * 0.85))
    assert operation_seconds(sum_of(1), A100) == 3e-6


@pytest.mark.parametrize(
    ("kind", "payload", "size", "sent"),
    [
        ("all-reduce", 800, 8, 1400),
        ("reduce", 800, 8, 700),
        ("broadcast", 800, 8, 700),
        ("all-gather", 800, 8, 700),
        ("reduce-scatter", 800, 8, 700),
        ("all-to-all", 800, 8, 700),
        ("send", 800, 2, 800),
        ("recv", 800, 2, 0),
    ],
)
def test_bytes_that_a_process_sends(kind: str, payload: int, size: int, sent: int) -> None:
    assert sent_bytes(kind, payload, size) == sent


def test_a_collective_takes_its_bytes_over_the_slowest_link_and_a_time_for_each_call() -> None:
    one_node, two_nodes = place(Dims(world_size=8)), place(Dims(world_size=16))
    gathered = Exchange("all-gather", "data", "bfloat16")
    amount = Amount(4, GB, sent_bytes("all-gather", GB, 8))
    wanted = 4 * 6e-6 * 3 + 7 / 8 * GB / (300e9 * 0.8)
    assert exchange_seconds(gathered, amount, A100, one_node) == pytest.approx(wanted)
    # Over two nodes eight network adapters of 25 GB/s work at once: 200 GB/s, less than NVLink's.
    amount = Amount(4, GB, sent_bytes("all-gather", GB, 16))
    wanted = 4 * 12e-6 * 4 + 15 / 16 * GB / (200e9 * 0.8)
    assert exchange_seconds(gathered, amount, A100, two_nodes) == pytest.approx(wanted)
    # Rows for experts of the other node leave through this process's own adapter.
    dims = Dims(world_size=16, expert_parallel_size=16)
    amount = Amount(1, GB, sent_bytes("all-to-all", GB, 16))
    wanted = 12e-6 * 4 + 8 / 16 * GB / (25e9 * 0.8)
    rows = Exchange("all-to-all", "expert", "bfloat16")
    assert exchange_seconds(rows, amount, A100, place(dims)) == pytest.approx(wanted)
    alone = place(Dims(world_size=1))
    assert exchange_seconds(gathered, amount, A100, alone) == 0


@pytest.mark.parametrize(("stage", "is_hidden"), [(0, False), (1, True), (3, True)])
def test_gradients_travel_during_the_backward_pass(stage: int, is_hidden: bool) -> None:
    dims = Dims(world_size=8)
    kind = "all-reduce" if stage == 0 else "reduce"
    exchanges = {
        Exchange(kind, "data", "float32"): Amount(1, GB, GB),
        Exchange("all-gather", "data", "bfloat16"): Amount(1, GB, GB),
    }
    work = [(product(8192, 8192, 8192, "backward"), 1), (product(8192, 8192, 8192), 1)]
    took = step_time(work, exchanges, A100, place(dims, zero_stage=stage))
    each = GB / (300e9 * 0.8) + 3 * 6e-6
    backward = took.products / 2
    assert sum(took.exposed.values()) + took.hidden == pytest.approx(2 * each)
    if is_hidden:
        under = 2 * each if stage == 3 else each
        assert took.hidden == pytest.approx(min(under, 0.9 * backward))
    else:
        assert took.hidden == 0
    assert took.total == pytest.approx(took.products + sum(took.exposed.values()))


def test_a_device_waits_for_its_host_between_short_operations() -> None:
    took = step_time([(sum_of(1), 1000)], {}, A100, place(Dims(world_size=1)))
    assert took.memory == pytest.approx(3e-3)
    assert took.idle == pytest.approx(3e-3)


def test_the_best_interval_loses_least() -> None:
    stall, processes, hours = 20.0, 1024, 50_000.0
    best = best_saving(stall, processes, hours)
    assert best.failure_every == pytest.approx(3600 * hours / processes)
    # 2 x 20 s x 175,781 s is 2,651.6 s squared.
    assert best.interval == pytest.approx(2651.6 - 20, abs=0.1)
    around = [saving(best.interval * factor, stall, processes, hours) for factor in (0.7, 1.4)]
    assert best.lost_share < min(each.lost_share for each in around)
    # Two stalls of 10 s in 100 s of work, and a failure in 1,000 s that repeats half of 50 s.
    assert lost_share(50.0, 10.0, 1000.0, 100.0) == pytest.approx(0.2 + 0.135)
    # Whoever fails all the time saves all the time.
    assert best_saving(1e6, 1024, 1.0).interval == 1e6
