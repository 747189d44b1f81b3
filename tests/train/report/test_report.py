"""`polyad report` on whole runs: the page stands alone, and says what the model does."""

import json
import re
import shutil
from collections import Counter

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.parallel.weights import load_model
from polyad.train.report.command import report
from tests.helpers.everyday import everyday
from tests.helpers.pages import Page
from tests.helpers.prepared import windows_of

pytestmark = pytest.mark.distributed

MUMOE = {"kind": "mumoe", "factorization": "cp", "num_experts": [6, 2]}
SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "placement": [1]}


@pytest.fixture(scope="module")
def runs(run_of):
    """A finished run of each kind, by one process."""
    sections = {"mumoe": MUMOE, "smoe": SMOE, "dense": {"kind": "dense"}}
    return {kind: run_of(model__feed_forward=each, log__every=2) for kind, each in sections.items()}


@everyday("kind", ["mumoe", "smoe", "dense"], keep=["smoe"])
def test_the_page_needs_nothing_beside_itself_and_is_always_the_same(runs, tmp_path, kind):
    for name in ("one", "two"):
        report(runs[kind], output=tmp_path / name, tokens=4000)
    text = (tmp_path / "one").read_text()
    assert text == (tmp_path / "two").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    page = Page(text)
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not page.tags & {"iframe", "object", "link", "img", "script"}
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall(r"https?://", text) == []
    assert ("This model has no experts" in text) == (kind == "dense")
    assert ("mark" in page.tags) == (kind != "dense")
    assert ("block 0.1, expert 1:" in text) == (kind == "mumoe")
    assert ("Load of each layer" in text) == (kind != "dense")
    assert ("an assignment is one token given to one expert" in text) == (kind == "smoe")


def test_the_page_tells_the_runs_numbers(runs, tmp_path):
    result = report(runs["smoe"], output=tmp_path / "page.html")
    lines = [json.loads(line) for line in (runs["smoe"] / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert result["loss"] == pytest.approx(sum(losses) / 6)
    assert result["validation_loss"] == lines[-1]["validation_loss"]
    assert (result["step"], result["total_steps"], result["checkpoint_step"]) == (6, 6, 6)
    key = "blocks.1.feed_forward"
    assert list(result["routing"]) == [key]
    assert result["routing"][key]["entropy"] == lines[-1][f"routing/{key}/entropy"]
    model = load_model(runs["smoe"])
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    # Two of four experts: each 2 x 32 x 32 weights and 2 x 32 biases.
    assert result["parameters"] - result["active_parameters"] == 2 * (2 * 32 * 32 + 2 * 32)
    text = (tmp_path / "page.html").read_text()
    for value in (f"{result['parameters']:,}", f"{lines[-1]['tokens']:,}", "of 6"):
        assert value in text


@torch.no_grad()
def coefficients_of_split(path, data, block):
    """What each expert gets of every token of the validation split but the last, written out."""
    model, windows, seen, rows = load_model(path), windows_of(data), {}, []
    part = model.blocks[block].feed_forward
    part.register_forward_pre_hook(lambda module, given: seen.update(given=given))
    for read, _ in windows:
        model(torch.tensor([read]))
        normalized_BTD, residual_BTD = seen["given"][:2]
        if hasattr(part, "gate"):
            rows.append(torch.cat(part.gate(residual_BTD[0]).coefficients, -1))
        else:
            scores = part.router.score(normalized_BTD[0]).softmax(-1)
            best = scores.topk(2, -1)
            weights = best.values / best.values.sum(-1, keepdim=True)
            rows.append(torch.zeros_like(scores).scatter(-1, best.indices, weights))
    ids = [token for read, _ in windows for token in read]
    return torch.cat(rows)[1:], ids[1:]


def best_of_stretches(a_M):
    """The highest weight of each stretch, a window of 32 tokens of which the first has one less."""
    stretches = [a_M[:31], *a_M[31:].split(32)]
    return sorted((stretch.max().item() for stretch in stretches), reverse=True)


TOPS = [("mumoe", 0, ["0.2", "1.1"]), ("smoe", 1, ["0", "3"])]


@everyday(("kind", "block", "experts"), TOPS, keep=TOPS[1:])
def test_top_tokens_are_the_highest_of_the_split(
    runs, prepared_path, tmp_path, kind, block, experts
):
    result = report(
        runs[kind], output=tmp_path / "page.html", layers=[str(block)], experts=experts, top=4
    )
    a_MS, ids = coefficients_of_split(runs[kind], prepared_path, block)
    shown = {row["expert"]: row for row in result["experts"] if row["expert"] in experts}
    assert set(shown) == set(experts)
    assert {row["layer"] for row in shown.values()} == {f"blocks.{block}.feed_forward"}
    assert result["units_read"] == len(a_MS)
    column = {"0.2": 2, "1.1": 7, "0": 0, "3": 3}
    prepared = PreparedData.open(prepared_path)
    decode = prepared.tokenizer().decode
    lengths = prepared.split("validation").document_lengths
    texts = (prepared_path.parent / "validation.jsonl").read_text().splitlines()
    page = (tmp_path / "page.html").read_text()
    for name, expert in shown.items():
        a_M = a_MS[:, column[name]]
        best, ours = best_of_stretches(a_M), [top["weight"] for top in expert["top"]]
        assert max(Counter(top["document"] for top in expert["top"]).values()) <= 2
        # Of equal ones, as entmax has many, any may be shown; 16 are candidates.
        assert ours == sorted(ours, reverse=True)
        assert ours[0] == pytest.approx(best[0], rel=1e-4)
        assert min(ours) >= best[15] * (1 - 1e-4)
        for top in expert["top"]:
            position, document = top["position"], top["document"]
            assert a_M[position].item() == pytest.approx(top["weight"], rel=1e-4)
            assert sum(lengths[:document]) + top["offset"] == position
            assert f"document {document}, token {top['offset']:,}" in page
            token = decode([ids[position]])
            if token != "<|endoftext|>":
                assert token == top["token"] or "\ufffd" in token
                context = top["before"] + top["token"] + top["after"].partition("<|end")[0]
                assert context in json.loads(texts[document])["text"]


def test_a_run_in_progress_is_drawn(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mumoe"], folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:5]) + lines[5][:40])
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("steps: 6", "steps: 60"))
    result = report(folder, tokens=64)
    assert (result["step"], result["total_steps"], result["checkpoint_step"]) == (5, 60, 3)
    losses = [json.loads(line)["loss"] for line in lines[:5]]
    assert result["loss"] == pytest.approx(sum(losses) / 5)
    assert "Loss over steps" in (folder / "report.html").read_text()


def test_without_text_nothing_is_loaded_and_the_data_may_be_gone(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mumoe"], folder)
    for config in folder.rglob("config.yaml"):
        manifest = config.parent / "manifest.json"
        if not manifest.exists():
            config.write_text(re.sub(r"path: .*", "path: gone", config.read_text()))
    result = report(folder, tokens=0)
    assert result["experts"] == []
    assert "Load of each layer" in (folder / "report.html").read_text()


BAD = [
    ("mumoe", ["--layers", "0,2"], "--layers: 2"),
    ("dense", ["--experts", "0"], "--experts: 0"),
    ("dense", ["--data", "DATA"], "--data"),
    ("dense", ["--knockout"], "--knockout"),
    ("smoe", ["--knockout", "--tokens", "0"], "--knockout"),
    ("mumoe", ["--experts", "0.1,0.6"], "--experts: 0.6"),
    ("mumoe", ["--top", "0"], "--top"),
    ("mumoe", ["--output", "DATA"], "--output"),
    ("mumoe", ["--output", "DATA/a/b.html"], "--output"),
    ("mumoe", ["--data", "DATA/gone"], "DATA/gone"),
]


@pytest.mark.parametrize(("kind", "words", "key"), BAD)
def test_bad_input_is_one_line(runs, prepared_path, refused, kind, words, key):
    *words, key = (each.replace("DATA", str(prepared_path)) for each in (*words, key))
    before = sorted(runs[kind].iterdir())
    assert key in refused("report", runs[kind], *words)
    assert before == sorted(runs[kind].iterdir())


def test_a_folder_that_is_not_a_run_is_one_line(runs, prepared_path, tmp_path, refused):
    without = tmp_path / "run"
    shutil.copytree(runs["mumoe"], without)
    (without / "metrics.jsonl").unlink()
    for folder, part in (
        (tmp_path / "none", "no such folder"),
        (prepared_path, "is prepared data"),
        (without, "metrics.jsonl"),
    ):
        assert part in refused("report", folder)
