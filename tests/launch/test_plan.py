"""`polyad plan` as a user calls it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polyad.launch.cli import run
from tests.launch.test_cli import error_line

Polyad = Callable[..., subprocess.CompletedProcess[str]]
GPT2, SMOE = "configs/gpt2/124m.yaml", "configs/gpt2/124m-smoe-16.yaml"
SMALL = ("model.vocab_size=1000", "model.num_layers=2", "model.hidden_size=128")
SMALL += ("model.num_heads=2", "model.sequence_length=64", "train.micro_batch_size=4")
SMALL += ("train.global_batch_size=256",)

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("no_process_group")]


def planned(*arguments: str, capfd: pytest.CaptureFixture[str]) -> dict:
    assert run(["plan", *arguments, "--json", "-"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_plan_needs_no_data_and_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    result = planned(GPT2, "--nodes", "2", "--device", "h100", *SMALL, capfd=capfd)
    assert result["prediction"] is True
    assert result["layout"]["processes"] == 16
    assert result["layout"]["accumulation_steps"] == 4
    step, memory = result["step"], result["memory_bytes"]
    parts = (step["products"], step["attention"], step["memory"], step["idle"])
    assert sum(parts) + sum(step["exchanges"].values()) == pytest.approx(step["seconds"])
    assert memory["total"] == sum(memory.values()) - memory["total"] - memory["device"]
    # Weights in bf16; three numbers of fp32 for each, which are cut over 16 processes.
    assert memory["weights"] == pytest.approx(2 * result["parameters"], rel=0.1)
    assert memory["optimizer"] == pytest.approx(12 * result["parameters"] / 16, rel=0.1)
    assert result["tokens_per_second"] == pytest.approx(256 * 64 / step["seconds"])
    assert 0 < result["mfu"] < 1
    assert result["recompute"]["block"]["activations"] < result["recompute"]["none"]["activations"]
    kinds = {(each["kind"], each["axis"]) for each in result["exchanges"]}
    assert ("reduce", "data") in kinds
    assert ("all-gather", "data") in kinds
    assert all(each["link"] == "network" for each in result["exchanges"] if each["processes"] == 16)


@pytest.mark.slow
def test_a_folder_of_weights_is_planned_as_a_run_that_goes_on_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.helpers.decoders import theirs

    model = theirs("deepseek_v3")
    model.save_pretrained(tmp_path)
    capfd.readouterr()  # what transformers says
    on_four = ("--processes-per-node", "4", "parallel.expert_parallel_size=2")
    result = planned(str(tmp_path), *on_four, "parallel.tensor_parallel_size=2", capfd=capfd)
    assert result["parameters"] == sum(each.numel() for each in model.parameters())
    layout = result["layout"]
    assert (layout["processes"], layout["micro_batch_size"], layout["global_batch_size"]) == (
        4,
        1,
        4,
    )
    routed = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    most = 2 * (result["parameters"] - routed + routed / 4)
    # In bf16, and a word's row more for each of 2 x 128; experts over EP and TP, the rest over TP.
    assert 0.5 * most < result["memory_bytes"]["weights"] < most + 2 * 2 * 256 * 32
    reading = result["reading"]
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    assert reading["weights_bytes"] == 2 * result["parameters"]
    assert reading["largest_part_bytes"] == 2 * max(sizes)
    computed = reading["streamed_bytes"] - reading["largest_part_bytes"] - 2_000_000_000
    assert 2 * 64 * 32 < computed < 100 * 2 * 64 * 32  # of 64 tokens, 32 wide
    assert reading["whole_bytes"] - reading["streamed_bytes"] == pytest.approx(
        reading["weights_bytes"] - reading["largest_part_bytes"], rel=0.2
    )
    assert reading["between_blocks_bytes_per_million_tokens"] == 2 * 32 * 10**6
    assert reading["weights_seconds"] == pytest.approx(reading["weights_bytes"] / 2e9)
    assert reading["fits_whole"] is True


@pytest.mark.slow
def test_a_table_says_that_it_is_a_prediction(capfd: pytest.CaptureFixture[str]) -> None:
    expert = "parallel.expert_parallel_size=2"
    assert run(["plan", SMOE, "--processes-per-node", "2", *SMALL, expert, "--imbalance", "2"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("predicted, not measured: ")
    for words in ("all-to-all", "experts", "best checkpoint.every", "MFU", "device hours"):
        assert words in out


@pytest.mark.slow
def test_rows_of_the_busiest_process_take_memory_and_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    wide = ("--processes-per-node", "2", *SMALL, "parallel.expert_parallel_size=2")
    even = planned(SMOE, *wide, capfd=capfd)
    uneven = planned(SMOE, *wide, "--imbalance", "1.5", capfd=capfd)
    # Of the buffers of rows the half that arrives grows.
    grown = uneven["largest_bytes"]["experts"] / even["largest_bytes"]["experts"]
    assert 1.2 < grown < 1.5
    assert uneven["step"]["seconds"] > even["step"]["seconds"]


@pytest.mark.slow
def test_what_does_not_fit_ends_with_status_2_and_says_what_would(
    capfd: pytest.CaptureFixture[str],
) -> None:
    large = (*SMALL, "model.num_layers=8", "model.hidden_size=4096", "model.num_heads=32")
    large += ("model.sequence_length=2048", "train.micro_batch_size=32")
    large += ("train.global_batch_size=32",)
    assert run(["plan", GPT2, "--processes-per-node", "1", *large]) == 2
    printed = capfd.readouterr()
    line = error_line(printed.err)
    for words in ("memory: ", "of a100-80gb", "train.micro_batch_size=", "model.recompute=block"):
        assert words in line
    assert "memory per process" in printed.out
    # What would fit does.
    assert run(["plan", GPT2, "--processes-per-node", "1", *large, "model.recompute=block"]) == 0


@pytest.mark.slow
def test_the_fastest_layouts_are_looked_for(capfd: pytest.CaptureFixture[str]) -> None:
    two = ("--processes-per-node", "2", *SMALL, "parallel.expert_parallel_size=2")
    result = planned(SMOE, *two, "--search", capfd=capfd)
    rates = [each["units_per_second"] for each in result["layouts"]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] >= result["tokens_per_second"]
    best = result["layouts"][0]
    again = planned(SMOE, *two, *best["change"], capfd=capfd)
    assert again["step"]["seconds"] == pytest.approx(best["step_seconds"], rel=1e-6)
    assert again["memory_bytes"]["total"] == pytest.approx(best["memory_bytes"], rel=1e-6)
    assert "%" in best["why"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "differing",
    [
        "model.feed_forward={kind: emoe, num_experts: 16, blocks: 3}",
        "model.feed_forward={kind: emoe, num_experts: 16, blocks: [5]}",
        "optimizer.groups=[{match: blocks.5.*, freeze: true}]",
    ],
)
def test_layouts_of_blocks_that_are_not_alike_are_looked_for(
    capfd: pytest.CaptureFixture[str], differing: str
) -> None:
    two = ("--processes-per-node", "2", *SMALL, "model.num_layers=6", differing)
    assert planned(GPT2, *two, "--search", capfd=capfd)["layouts"]


@pytest.mark.slow
def test_a_figure_shows_up_to_1024_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.svg"
    result = planned(GPT2, "--device", "h200", "--figure", str(path), *SMALL, capfd=capfd)
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "Predicted, not measured" in text
    weak, strong = result["scaling"]["weak"], result["scaling"]["strong"]
    assert [each["processes"] for each in weak] == [2**n for n in range(11)]
    assert strong[-1]["processes"] == 256  # samples of the batch
    for points in (weak, strong):
        assert points[0]["efficiency"] == 1
        # With ZeRO 1 each of two processes updates half: that can be worth more than its exchanges.
        assert all(0 < each["efficiency"] <= 1.2 for each in points)
        of_first = points[0]["units_per_second"]
        last = points[-1]
        assert last["efficiency"] == pytest.approx(
            last["units_per_second"] / last["processes"] / of_first
        )


@pytest.mark.slow
def test_operations_of_this_machine_are_timed(polyad: Polyad) -> None:
    done = polyad(
        *("plan", SMOE, "--device", "cpu-here", "--processes-per-node", 2, "--check", 2),
        *("--json", "-", *SMALL, "model.compile=false", "parallel.expert_parallel_size=2"),
        *("train.global_batch_size=8", "train.micro_batch_size=4"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["layout"]["device"] == "cpu-here"
    assert result["layout"]["processes"] == 2
    assert result["mfu"] is None
    measured = result["measured"]
    assert measured["prediction_off_by"] == pytest.approx(
        result["step"]["seconds"] / measured["step_seconds"] - 1
    )
    # Both are times of the same steps; how near they are is measured on a quiet machine.
    assert 0.2 < result["step"]["seconds"] / measured["step_seconds"] < 5
    assert result["step"]["exchanges"]["expert"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "a100"], ["--device: a100 is not allowed", "a100-80gb, h100"]),
        (["--imbalance", "0.5"], ["--imbalance: 0.5", "1 to 100"]),
        (["--imbalance", "nan"], ["--imbalance: nan", "1 to 100"]),
        (["--storage", "0"], ["--storage: 0"]),
        (["--failures", "inf"], ["--failures: inf"]),
        (["--nodes", "0"], ["--nodes", "0"]),
        (["--check", "2"], ["--check", "cpu-here"]),
        (["--device", "cpu-here", "--nodes", "2"], ["--nodes: 2", "cpu-here"]),
        (["--device", "cpu-here", "--search"], ["--search", "cpu-here"]),
        (["--device", "cpu-here", "--storage", "3"], ["--storage: 3", "cpu-here"]),
        (["--figure", "x.png"], ["x.png", ".svg"]),
        (["--json", "no/such/folder/x.json"], ["--json", "no/such/folder"]),
        (["--nodes", "3", "parallel.tensor_parallel_size=16"], ["tensor_parallel_size: 16", "24"]),
        (["--nodes", "5"], ["train.global_batch_size: 256", "4 x 40"]),
        (["model.vocab_size=null"], ["model.vocab_size", "runs/openwebtext"]),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", GPT2, *SMALL, *arguments]) == 2
    line = error_line(capfd.readouterr().err)
    for word in words:
        assert word in line, line
