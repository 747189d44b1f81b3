"""`polyad report` on whole runs: the page stands alone, and says what the model does."""

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from polyad.train.experts.probing import routed_layers
from polyad.train.measures.measure import Subject
from polyad.train.measures.specialization import Specialization
from polyad.train.reading import read
from polyad.train.report.command import report
from polyad.train.report.snippets import has_word
from polyad.train.report.top_text import TopText
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import TextSamples
from tests.helpers.everyday import everyday
from tests.helpers.pages import Page
from tests.helpers.runs import run, write_config

pytestmark = pytest.mark.distributed

MUMOE = {"kind": "mumoe", "factorization": "cp", "num_experts": [6, 2]}
SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "placement": [1]}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs(workers, tmp_path_factory, prepared_path):
    """A finished run of each kind, by one process."""
    folders = {}
    for kind, section in (("mumoe", MUMOE), ("smoe", SMOE), ("dense", {"kind": "dense"})):
        folder = tmp_path_factory.mktemp(kind)
        changes = {"model__feed_forward": section, "log": {"every": 2}}
        workers(1).run(run, write_config(folder / "config.yaml", prepared_path, **changes))
        folders[kind] = folder / "run"
    return folders


@everyday("kind", ["mumoe", "smoe", "dense"], keep=["smoe"])
def test_the_page_needs_nothing_beside_itself_and_is_always_the_same(runs, tmp_path, kind):
    for name in ("one", "two"):
        result = report(runs[kind], output=tmp_path / name, tokens=4000)
    text = (tmp_path / "one").read_text()
    assert text == (tmp_path / "two").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    page = Page(text)
    page.check_scripts()
    assert not page.tags & {"iframe", "object", "link", "img"}
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall(r"https?://", text) == []
    assert ("This model has no experts" in text) == (kind == "dense")
    assert (page.peaks > 0) == (kind != "dense")
    assert ("Effective experts per token" in text) == (kind == "mumoe")
    for heading in ("Load over time", "Entropy over time"):
        assert (heading in text) == (kind != "dense")
    assert ("level 1" in text) == (kind == "mumoe")
    # 0.5 is named where an expert of the page has such a weight, and nowhere else.
    layers = result["text"]["layers"] if result["text"] else {}
    shown = [expert for layer in layers.values() for expert in layer]
    assert ("of at least 0.5" in text) == any(expert["dominant"] > 0 for expert in shown)
    assert ("An assignment is one token given to one expert" in text) == (kind == "smoe")
    assert ("so these percentages may add up to more than 100%" in text) == (kind != "dense")


def test_a_weight_of_one_half_is_named_only_where_an_expert_shown_has_one(runs, tmp_path):
    result = report(runs["smoe"], output=tmp_path / "all", tokens=4000)
    (layer,) = result["text"]["layers"].values()
    rest = [expert["expert"] for expert in layer if not expert["dominant"]]
    assert rest
    report(runs["smoe"], output=tmp_path / "rest", tokens=4000, experts=rest)
    said = ["of at least 0.5" in (tmp_path / name).read_text() for name in ("all", "rest")]
    assert said == [True, False]


@pytest.mark.slow
def test_a_check_box_without_a_script_shows_tokens_that_are_no_words(runs, tmp_path):
    result = report(runs["mumoe"], output=tmp_path / "page.html", tokens=4000)
    text = (tmp_path / "page.html").read_text()
    # What the rule's selectors need: the box, unchecked, before the blocks, all in one parent.
    (section,) = re.findall(r'<section id="layers">(.*?)</section>', text, re.S)
    before, box, after = section.partition('<input type="checkbox" id="every-token"')
    assert (bool(box), "<details" in before, "<details" in after) == (True, False, True)
    assert "checked" not in after.partition(">")[0]
    assert '<label for="every-token">' in after
    assert "#every-token:checked ~ details .words-only" in text
    assert "#every-token:not(:checked) ~ details .all-only" in text
    experts = [expert for layer in result["text"]["layers"].values() for expert in layer]
    every, words = (
        [{top["position"] for top in expert[key]} for expert in experts]
        for key in ("top", "top_words")
    )
    assert section.count('<li class="all-only">') == sum(
        len(a - b) for a, b in zip(every, words, strict=True)
    )
    assert section.count('<li class="words-only">') == sum(
        len(b - a) for a, b in zip(every, words, strict=True)
    )
    assert 'class="all-only"' in section


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


def coefficients_of_split(path, data, block):
    """What each expert gets of every token of the validation split but the last, written out."""
    model, prepared = load_model(path), PreparedData.open(data)
    stream = prepared.split("validation")
    ids = torch.from_numpy(stream.read(0, stream.num_tokens))
    ids = torch.cat([torch.tensor([prepared.manifest.tokenizer.end_of_text_id]), ids])[:-1]
    seen = {}
    part = model.blocks[block].feed_forward
    part.register_forward_pre_hook(lambda module, given: seen.update(given=given))
    rows = []
    for window_T in ids.split(32):
        with torch.no_grad():
            model(window_T[None])
            normalized_BTD, residual_BTD = seen["given"][:2]
            if hasattr(part, "gate"):
                rows.append(torch.cat(part.gate(residual_BTD[0]).coefficients, -1))
            else:
                scores = part.router.score(normalized_BTD[0]).softmax(-1)
                best = scores.topk(2, -1)
                weights = best.values / best.values.sum(-1, keepdim=True)
                rows.append(torch.zeros_like(scores).scatter(-1, best.indices, weights))
    return torch.cat(rows)[1:], ids[1:], prepared


@everyday(
    ("kind", "block", "experts"),
    [("mumoe", 0, ["0.2", "1.1"]), ("smoe", 1, ["0", "3"])],
    keep=[],
)
def test_top_tokens_are_the_highest_of_the_split(
    runs, prepared_path, tmp_path, kind, block, experts
):
    result = report(
        runs[kind], output=tmp_path / "page.html", layers=[str(block)], experts=experts, top=4
    )
    a_MS, ids_M, prepared = coefficients_of_split(runs[kind], prepared_path, block)
    (shown,) = result["text"]["layers"].values()
    assert [expert["expert"] for expert in shown] == experts
    assert result["text"]["tokens"] == len(a_MS)
    column = {"0.2": 2, "1.1": 7, "0": 0, "3": 3}
    decode = prepared.tokenizer().decode
    for expert in shown:
        a_M = a_MS[:, column[expert["expert"]]]
        size = {"0": 6, "1": 2}[expert["expert"][0]] if kind == "mumoe" else 4
        assert expert["load"] == pytest.approx(size * a_M.mean().item(), rel=1e-4)
        # Windows of 32 tokens are one stretch each, the first a token shorter.
        stretches = [a_M[:31], *a_M[31:].split(32)]
        highest = sorted((stretch.max().item() for stretch in stretches), reverse=True)[:4]
        assert [top["coefficient"] for top in expert["top"]] == pytest.approx(highest, rel=1e-4)
        is_word_M = torch.tensor([has_word(decode([token])) for token in ids_M.tolist()])
        is_word_M &= ids_M != prepared.manifest.tokenizer.end_of_text_id
        word_a_M = a_M.where(is_word_M, 0.0)
        stretches = [word_a_M[:31], *word_a_M[31:].split(32)]
        highest = sorted((stretch.max().item() for stretch in stretches), reverse=True)[:4]
        found = [top["coefficient"] for top in expert["top_words"]]
        assert found == pytest.approx(highest, rel=1e-4)
        assert all(is_word_M[top["position"]] for top in expert["top_words"])
        for top in expert["top"]:
            position = top["position"]
            assert a_M[position].item() == pytest.approx(top["coefficient"], rel=1e-4)
            token = decode([int(ids_M[position])])
            assert token in ("<|endoftext|>", top["token"]) or "\ufffd" in token
            lengths = prepared.split("validation").document_lengths
            assert sum(lengths[: top["document"]]) + top["offset"] == position


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(runs):
    task = LanguageModelling.open(load_config(runs["mumoe"] / "config.yaml").for_task())
    model = load_model(runs["mumoe"])
    layers = routed_layers(model)

    def most_numbers(tokens):
        """Most numbers in tensors that are alive between batches, and how many tokens were read."""
        text = TextSamples(task, "train", tokens, with_first=False)
        top = TopText(layers, text, 3, "cpu")
        division = Specialization(Subject(model, layers, text, 2))
        alive = []
        gc.collect()  # what other tests have left

        def count(share):
            # By type: a dead weak proxy, of another test, has no class to ask for.
            tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
            alive.append(sum(tensor.numel() for tensor in tensors))

        read(model, layers, text, [top, division], batch_size=2, report=count)
        return max(alive), top.tokens

    # Intervals are over at most 200 groups of windows, which the shorter text has too. Of a window
    # 16 numbers are kept: its group in two layers and four tables, and eight distances.
    (short, few), (long, many) = most_numbers(32 * 256), most_numbers(32 * 1024)
    assert many > 3.9 * few
    assert long <= short + 16 * (many - few) // 32


@pytest.mark.slow
def test_text_that_looks_like_markup_is_text(runs, prepared_path, tmp_path):
    source = tmp_path / "source.jsonl"
    evil = "</pre></details><script>alert('é漢')</script><img src=x onerror=alert(1)>\n" * 3
    source.write_text("".join(json.dumps({"text": f"{i} {evil}"}) + "\n" for i in range(40)))
    tokenizer = prepared_path / "tokenizer.json"
    prepare(str(source), str(tokenizer), tmp_path / "data", report=lambda line: None)
    output = tmp_path / "page.html"
    result = report(runs["mumoe"], output=output, data=str(tmp_path / "data"), split="train")
    text = output.read_text()
    page = Page(text)
    page.check_scripts()
    assert "img" not in page.tags
    assert "&lt;" in text
    assert "\ufffd" not in text
    tops = [top for layer in result["text"]["layers"].values() for e in layer for top in e["top"]]
    assert any("script" in top["text"] for top in tops)


def test_a_run_in_progress_and_one_that_went_on_are_drawn(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mumoe"], folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    again = [json.dumps(json.loads(line) | {"loss": 2.5}) + "\n" for line in lines[3:5]]
    metrics.write_text("".join([*lines, *again]) + lines[5][:40])
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("steps: 6", "steps: 60"))
    result = report(folder, tokens=64)
    assert (result["step"], result["total_steps"], result["checkpoint_step"]) == (5, 60, 3)
    losses = [json.loads(line)["loss"] for line in lines[:3]]
    assert result["loss"] == pytest.approx((sum(losses) + 5.0) / 5)
    assert "1 incomplete lines" in (folder / "report.html").read_text()


def test_a_run_of_which_no_loss_was_finite_is_drawn(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mumoe"], folder)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) | {"loss": None} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert lines[-1]["validation_loss"] is not None
    result = report(folder, tokens=0)
    assert result["loss"] is None
    assert "validation" in (folder / "report.html").read_text()


def test_without_text_nothing_is_loaded_and_the_data_may_be_gone(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["mumoe"], folder)
    for config in folder.rglob("config.yaml"):
        manifest = config.parent / "manifest.json"
        if not manifest.exists():
            config.write_text(re.sub(r"path: .*", "path: gone", config.read_text()))
    result = report(folder, tokens=0)
    assert result["text"] is None
    assert "Load over time" in (folder / "report.html").read_text()


def test_the_command_writes_the_page_and_json(runs, tmp_path, capfd):
    output = tmp_path / "page.html"
    options = ["--output", str(output), "--tokens", "100", "--layers", "1", "--json", "-"]
    assert polyad(["report", str(runs["smoe"]), *options, "--checkpoint", "3"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["output"] == str(output)
    assert result["checkpoint_step"] == 3
    assert "tok/s" in captured.err
    assert "left" in captured.err
    assert output.exists()


def test_bad_input_is_one_line(runs, prepared_path, tmp_path, capfd):
    def refused(path, *options):
        before = sorted(path.iterdir()) if path.is_dir() else None
        assert polyad(["report", str(path), *map(str, options)]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert before == (sorted(path.iterdir()) if path.is_dir() else None)
        return line

    mumoe, dense = runs["mumoe"], runs["dense"]
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "has no config.yaml" in refused(prepared_path)
    assert "--checkpoint 3" in refused(mumoe / "checkpoints" / "step-00000003")
    assert "--checkpoint: 4 is not allowed" in refused(mumoe, "--checkpoint", 4)
    assert "has 3, 6" in refused(mumoe, "--checkpoint", 4)
    assert "--layers: 2 is not allowed: blocks with experts are 0, 1" in refused(
        mumoe, "--layers", "0,2"
    )
    assert "blocks with experts are 1" in refused(runs["smoe"], "--layers", 0)
    assert "no block of this run has experts" in refused(dense, "--layers", 0)
    assert "the run has no experts" in refused(dense, "--experts", 0)
    for option, value in (("--data", prepared_path), ("--split", "test")):
        line = refused(dense, option, value)
        assert f"{option}: {value} is not allowed" in line
        assert "has no experts, so its report reads no data" in line
    line = refused(mumoe, "--experts", "0.1,0.6")
    assert "--experts: 0.6 is not allowed: block 0 has 0.0 to 1.1 (LEVEL.EXPERT)" in line
    assert "block 1 has 0 to 3" in refused(runs["smoe"], "--experts", 4)
    assert "'0,,1' is not a list" in refused(mumoe, "--layers", "0,,1")
    assert "at least 1" in refused(mumoe, "--top", 0)
    assert f"--output: {tmp_path} is a folder" in refused(mumoe, "--output", tmp_path)
    assert "there is no folder" in refused(mumoe, "--output", tmp_path / "a" / "b.html")
    if Path("/proc/self").is_dir():  # where not even root can make a file
        line = refused(mumoe, "--output", "/proc/report.html")
        assert "--output: /proc/report.html cannot be written" in line
    line = refused(mumoe, "--data", tmp_path / "gone")
    assert "no such folder of prepared data" in line
    assert "use --tokens 0 to read no text" in line

    without = tmp_path / "run"
    shutil.copytree(mumoe, without)
    (without / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    assert "has no metrics.jsonl" in refused(without)
    shutil.rmtree(without / "checkpoints")
    assert "holds no complete checkpoint" in refused(without)


def test_weights_that_are_not_finite_are_one_line(runs):
    task = LanguageModelling.open(load_config(runs["mumoe"] / "config.yaml").for_task())
    model = load_model(runs["mumoe"])
    with torch.no_grad():
        model.blocks[0].feed_forward.gate.weight[0] = torch.nan
    layers, text = routed_layers(model)[:1], TextSamples(task, "test", 100)
    top = TopText(layers, text, 8, "cpu")
    read(model, layers, text, [top], batch_size=2)
    with pytest.raises(ValueError, match=r"it: the coefficients of blocks.0.feed_forward are not"):
        top.result(model, (), 2, "it")
