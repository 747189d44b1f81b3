"""Decoders that are read block by block give what whole ones give, also after a stop."""

import json
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch

from polyad.data.files import locked
from polyad.launch.cli import run as command
from polyad.model.build import build_model
from polyad.parallel.families import FamilyWeights
from polyad.parallel.streamed import Streamed, parts_of
from polyad.train import streaming
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action
from polyad.train.experts.interventions import Intervention
from polyad.train.measures import streamed_knockout
from polyad.train.measures.atlas import Atlas
from polyad.train.report.command import report
from polyad.train.streaming import StreamError
from tests.helpers import bounded as bounded_command
from tests.helpers.decoders import hub_folder, in_four_bits, write_tokenizer
from tests.helpers.everyday import everyday
from tests.helpers.prepared import jsonl, silent
from tests.helpers.runs import both_forms, evaluation, measured
from tests.helpers.started import start

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

TEXTS = [f"def number_{n}(x):\n    return {n} * x + {n * n}\n" * (1 + n % 3) for n in range(16)]
FAMILIES = ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_oss four bits", "granitemoe",
            "llama 3", "gpt2"]  # fmt: skip
WINDOWS = ("model.sequence_length=32", "evaluation.batch_size=3")
on_disk = streaming._OnDisk
FREE = ("seconds", "tokens_per_second")
"""Keys of a result that differ from run to run."""


class Stopped(Exception):
    """Stands for a signal."""


def gpt2_folder(folder):
    """Writes a GPT-2 of transformers: learned positions, a head that is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=3, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(folder)
    write_tokenizer(folder)


def folder_and_data(case, tmp_path, settings=None):
    """A folder as the hub has it, and texts in its tokens."""
    name = case.removesuffix(" four bits")
    folder, data = tmp_path / "hub", tmp_path / "data"
    settings = {"intermediate_size": 64} if name != case else settings
    if name == "gpt2":
        gpt2_folder(folder)
    else:
        hub_folder(folder, name, settings)
    if name != case:
        in_four_bits(folder)
    silent(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
    return folder, str(data)


def lasting(result):
    """What of a result is the same in each run."""
    return {key: value for key, value in result.items() if key not in FREE}


@contextmanager
def stopped_at(monkeypatch, begins):
    """Ends the reading where weights are wanted whose names begin so."""
    part = Streamed.part

    def stop(self, *names):
        if names == (begins,):
            raise Stopped
        return part(self, *names)

    with monkeypatch.context() as patch:
        patch.setattr(Streamed, "part", stop)
        try:
            yield
        except Stopped:
            return
    raise AssertionError(f"nobody wanted {begins}")


@everyday(
    ("case", "precision"),
    [(case, precision) for case in FAMILIES for precision in ("fp32", "bf16")],
    keep=[("olmoe", "fp32"), ("gpt_oss four bits", "bf16"), ("gpt2", "fp32")],
)
def test_perplexity_is_that_of_the_whole_model(case, precision, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    asked = {
        "data": data,
        "overrides": (*WINDOWS, "evaluation.stride=20", f"train.precision={precision}"),
    }
    wanted = evaluation(folder, **asked)
    found = evaluation(folder, stream=tmp_path / "kept", **asked)
    assert lasting(found) == lasting(wanted)
    assert wanted["tokens_scored"] > 200
    assert not (tmp_path / "kept").exists()


@everyday("case", FAMILIES[:-2], keep=["deepseek_v3"])
def test_measures_and_pages_are_those_of_the_whole_model(case, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    asked = {"data": data, "overrides": WINDOWS}
    wanted = measured(folder, "specialization", **asked)[0]
    found = measured(folder, "specialization", stream=tmp_path / "kept", **asked)[0]
    assert lasting(found) == lasting(wanted)
    pages = [
        report(folder, data=data, tokens=tokens, layers=["all"], stream=stream)
        for tokens in (150, 10**6)
        for stream in (None, tmp_path / "kept")
    ]
    assert pages[0] == pages[1]
    assert pages[2] == pages[3]
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("begins", ["token_embedding.", "blocks.0.", "blocks.2.", "final_norm."])
def test_an_evaluation_goes_on_where_it_was_stopped(begins, tmp_path, monkeypatch):
    folder, data = folder_and_data("deepseek_v3", tmp_path)
    asked = {"data": data, "overrides": WINDOWS}
    wanted, kept = evaluation(folder, **asked), tmp_path / "kept"
    order = parts_of(build_model(FamilyWeights(folder).config))
    [names] = [part for part in order if part[0] == begins]
    parts, part = [], Streamed.part

    def stop(self, *given):
        if given == names and len(parts) < 9:
            parts.extend([None] * 9)
            raise Stopped
        parts.append(given)
        return part(self, *given)

    monkeypatch.setattr(Streamed, "part", stop)
    with pytest.raises(Stopped):
        evaluation(folder, stream=kept, **asked)
    before = [each for each in parts if each]
    parts[:] = [None] * 9
    assert lasting(evaluation(folder, stream=kept, **asked)) == lasting(wanted)
    after = [each for each in parts if each]
    assert len(order) == 5
    assert before == order[: order.index(names)]
    assert before + after == order
    assert not kept.exists()


@pytest.mark.slow
def test_a_measure_goes_on_with_what_it_had_added_up(tmp_path, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    asked = {"data": data, "overrides": WINDOWS}
    wanted, kept = measured(folder, "specialization", **asked)[0], tmp_path / "kept"
    for block in ("blocks.1.", "blocks.2."):
        with stopped_at(monkeypatch, block):
            measured(folder, "specialization", stream=kept, **asked)
    found = measured(folder, "specialization", stream=kept, **asked)[0]
    assert lasting(found) == lasting(wanted)
    page = report(folder, data=data, tokens=150)
    with stopped_at(monkeypatch, "blocks.2."):
        report(folder, data=data, tokens=150, stream=kept)
    assert report(folder, data=data, tokens=150, stream=kept) == page


def test_what_was_kept_of_another_reading_is_refused(tmp_path, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    kept, asked = tmp_path / "kept", {"data": data, "overrides": WINDOWS}
    with stopped_at(monkeypatch, "blocks.1."):
        evaluation(folder, stream=kept, **asked)
    for said, changed in (
        ("precision 'fp32' there, 'bf16' here", {"overrides": (*WINDOWS, "train.precision=bf16")}),
        ("reading '.* validation' there, '.* train' here", {"split": "train"}),
        ("inputs '.*' there, '.*' here", {"overrides": WINDOWS[:1]}),
    ):
        with pytest.raises(StreamError, match=f"is of another reading: {said}"):
            evaluation(folder, stream=kept, **(asked | changed))
    with pytest.raises(StreamError, match="is of another reading: reading 'evaluate validation'"):
        measured(folder, "specialization", stream=kept, **asked)
    shutil.copytree(folder, tmp_path / "again")
    weights = tmp_path / "again" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(StreamError, match="is of another reading: weights"):
        evaluation(tmp_path / "again", stream=kept, **asked)
    [file] = (kept / "reading-1").glob("after-*.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(StreamError, match=r"after-1\.bin: is damaged or missing"):
        evaluation(folder, stream=kept, **asked)
    (kept / "reading-1" / "state.json").write_text("{")
    with pytest.raises(StreamError, match=r"state\.json: is not JSON"):
        evaluation(folder, stream=kept, **asked)


def test_a_file_that_is_half_written_is_not_used(tmp_path, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    kept, asked = tmp_path / "kept", {"data": data, "overrides": WINDOWS}
    wanted = evaluation(folder, **asked)
    through = streaming._through

    def stop(model, block, activations, seen, told):
        for number, x_BTD in enumerate(through(model, block, activations, seen, told)):
            if (block, number) == (1, 2):
                raise Stopped
            yield x_BTD

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "_through", stop)
        with pytest.raises(Stopped):
            evaluation(folder, stream=kept, **asked)
    names = sorted(path.name for path in (kept / "reading-1").iterdir())
    assert names == ["after-1.bin", "after-2.bin", "state.json"]
    state = json.loads((kept / "reading-1" / "state.json").read_text())
    assert (state["blocks"], state["after"]["name"]) == (1, "after-1.bin")
    assert lasting(evaluation(folder, stream=kept, **asked)) == lasting(wanted)


def test_a_model_without_room_is_streamed_by_itself(tmp_path, monkeypatch, capfd):
    folder, data = folder_and_data("olmoe", tmp_path)
    asked = {"data": data, "overrides": WINDOWS}
    wanted = evaluation(folder, **asked)
    assert "block by block" not in capfd.readouterr().err
    for free, files in ((400_000, 0), (200_000, 1)):  # what blocks give is in memory, or in a file
        made: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "free_memory", lambda free=free: free)
            patch.setattr(streaming, "_OnDisk", lambda *a, m=made: m.append(a) or on_disk(*a))
            assert lasting(evaluation(folder, **asked)) == lasting(wanted)
        error = capfd.readouterr().err
        assert f"polyad: reading {folder} block by block: " in error
        assert f" KB of weights in fp32, {free // 1000} KB of free memory" in error
        assert len(made) == files
    monkeypatch.setattr(streaming, "free_memory", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"its largest part has \d+ KB in fp32, and 50 KB of mem"):
        evaluation(folder, **asked)


def close(one, two):
    """Whether results are alike, number by number."""
    if isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            if key not in FREE:
                close(one[key], two[key])
    elif isinstance(one, list):
        assert len(one) == len(two)
        for pair in zip(one, two, strict=True):
            close(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    else:
        assert one == two


@everyday(
    ("case", "how"),
    [
        (case, how)
        for case in ("olmoe", "deepseek_v3", "gpt_oss", "granitemoe")
        for how in ("contribution", "route-around", "mean", "prune")
    ],
    keep=[],
)
def test_the_atlas_is_that_of_the_whole_model(case, how, tmp_path, monkeypatch):
    """Also where windows without experts of one block alone are held at a time."""
    folder, data = folder_and_data(case, tmp_path)
    asked = {"data": data, "overrides": WINDOWS, "how": how, "unembed": 3}
    wanted, text = both_forms(folder, Atlas, **asked)
    found, _ = both_forms(folder, Atlas, stream=tmp_path / "kept", **asked)
    close(found, wanted)
    assert "predictive in" in text
    monkeypatch.setattr(streamed_knockout, "free_memory", lambda: 0)
    found, _ = both_forms(folder, Atlas, stream=tmp_path / "kept", **asked)
    close(found, wanted)


def test_an_intervention_is_that_of_the_whole_model(tmp_path, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    asked = {"data": data, "overrides": WINDOWS}
    before = evaluation(folder, **asked)["loss"]
    for how in ("prune", "mean"):
        changed = [Intervention(layer=1, experts=(0, 3), action=Action(how=how))]
        wanted = evaluation(folder, interventions=changed, **asked)
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "free_memory", lambda: 300_000)
            found = evaluation(folder, interventions=changed, **asked)
        close(found["loss"], wanted["loss"])
        assert abs(found["loss"] - before) > 1e-5


def test_what_needs_the_whole_model_says_why(tmp_path, capfd, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    kept = tmp_path / "kept"
    for words, said in (
        (
            ["experts", "steer", "--steer", "layer=0,expert=1,strength=1"],
            "is not allowed with --steer",
        ),
        (["evaluate", "--intervene", "layer=0,expert=1"], "with --intervene nothing is kept"),
        (["report", "--tokens", "0"], "--stream: is not allowed with --tokens 0"),
    ):
        at = 2 if words[0] == "experts" else 1
        given = [*words[:at], folder, *words[at:], "--data", data, "--stream", kept]
        assert command(list(map(str, given))) == 2
        assert said in capfd.readouterr().err
    monkeypatch.setattr(streaming, "free_memory", lambda: 200_000)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=100_000))
    given = [folder, tmp_path / "small", "--data", data, "--by", "reap", "--keep", "0.5"]
    assert command(["experts", "prune", *map(str, given)]) == 2
    said = "KB of weights in fp32, 200 KB of memory are free, and not block by block: experts are"
    assert said in capfd.readouterr().err
    assert command(["generate", str(folder), "--prompt", "def"]) == 2
    assert "and not block by block: each new token runs all blocks" in capfd.readouterr().err
    monkeypatch.undo()
    kept.mkdir()
    (kept / "thesis.tex").touch()
    with pytest.raises(StreamError, match=r"kept: holds thesis\.tex, which no reading has left"):
        evaluation(folder, data=data, stream=kept)
    assert (kept / "thesis.tex").exists()
    (kept / "thesis.tex").unlink()
    with (
        locked(kept / "lock", wait=False),
        pytest.raises(StreamError, match="another process is reading there"),
    ):
        evaluation(folder, data=data, stream=kept)


def killed(number, words, kept, blocks):
    """Runs a command until so many blocks are done, and ends it by a signal."""
    process = start([sys.executable, "-m", "polyad.launch", *map(str, words)])
    state, end = kept / "reading-1" / "state.json", time.monotonic() + 120
    while not state.exists() or json.loads(state.read_text())["blocks"] < blocks:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number


@pytest.mark.slow
def test_a_reading_that_is_killed_goes_on(tmp_path):
    settings = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 256}
    folder, data = folder_and_data("olmoe", tmp_path, settings)
    kept = tmp_path / "kept"
    for words in (["evaluate"], ["experts", "specialize"]):
        given = [*words, folder, "--data", data, *WINDOWS]
        files = [tmp_path / f"{name}.json" for name in ("whole", "found")]
        assert command([*map(str, given), "--json", str(files[0])]) == 0
        for number, blocks in ((signal.SIGTERM, 2), (signal.SIGKILL, 6)):
            killed(number, [*given, "--stream", kept], kept, blocks)
        blocks = json.loads((kept / "reading-1" / "state.json").read_text())["blocks"]
        assert 6 <= blocks < 12
        assert command([*map(str, given), "--stream", str(kept), "--json", str(files[1])]) == 0
        whole, found = (lasting(json.loads(file.read_text())) for file in files)
        assert found == whole
        assert not kept.exists()


def bounded(mib, told, *words):
    """What a command took that may take so much more than its libraries; and its output."""
    process = start([sys.executable, bounded_command.__file__, *map(str, (mib, told, *words))])
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(told.read_text()), out, err


@pytest.mark.slow
def test_a_model_several_times_as_large_as_memory_is_read(tmp_path):
    settings = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 520,
                "num_experts": 32}  # fmt: skip
    folder, data = folder_and_data("olmoe", tmp_path, settings)
    size = (folder / "model.safetensors").stat().st_size
    for words, most in ((["evaluate"], size // 3), (["experts", "specialize"], size // 2)):
        given = [*words, folder, "--data", data, *WINDOWS, "--json"]
        files = [tmp_path / f"{name}.json" for name in ("whole", "found")]
        assert command([*map(str, given), str(files[0])]) == 0
        taken, _, err = bounded(most / 2**20, tmp_path / "told.json", *given, files[1])
        assert "block by block" in err  # by itself, since the limit is what it may take
        assert 0 < taken["most"] < most
        whole, found = (lasting(json.loads(file.read_text())) for file in files)
        assert found == whole
        print(f"{size / 1e6:.0f} MB of weights, {taken['most'] / 1e6:.0f} MB of memory at most")


def olmoe_7b(folder):
    """Writes a folder of OLMoE-1B-7B's sizes with random weights in bf16; returns their bytes."""
    from safetensors.torch import save_file

    width, inner, experts, blocks, rows = 2048, 1024, 64, 16, 50304
    tree = {
        "model_type": "olmoe", "hidden_size": width, "intermediate_size": inner,
        "num_experts": experts, "num_experts_per_tok": 8, "num_hidden_layers": blocks,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": rows,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "clip_qkv": None,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.empty(inner * width, dtype=torch.bfloat16).uniform_(
        -0.03, 0.03, generator=generator
    )

    def matrix(*shape):
        shift = int(torch.randint(len(numbers), (), generator=generator))
        flat = numbers.roll(shift)
        count = shape[0] * shape[1]
        return flat.repeat(-(-count // len(flat)))[:count].view(shape)

    files = {"embed.safetensors": {
        "model.embed_tokens.weight": matrix(rows, width), "lm_head.weight": matrix(rows, width),
        "model.norm.weight": torch.ones(width, dtype=torch.bfloat16),
    }}  # fmt: skip
    places = {}
    for block in range(blocks):
        before = f"model.layers.{block}."
        tensors = files.setdefault(f"block-{block}.safetensors", {})
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm",
                     "self_attn.k_norm"):  # fmt: skip
            tensors[f"{before}{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        for name in "qkvo":
            tensors[f"{before}self_attn.{name}_proj.weight"] = matrix(width, width)
        tensors[f"{before}mlp.gate.weight"] = matrix(experts, width)
        for expert in range(experts):
            for name, shape in (("gate", (inner, width)), ("up", (inner, width)),
                                ("down", (width, inner))):  # fmt: skip
                tensors[f"{before}mlp.experts.{expert}.{name}_proj.weight"] = matrix(*shape)
        for name in list(files):
            tensors = files.pop(name)
            save_file(tensors, folder / name)
            places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_seven_billion_parameters_are_read_in_three_gigabytes(tmp_path, capsys):
    free = shutil.disk_usage(tmp_path).free
    if free < 18e9:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free at {tmp_path}, 18 are needed")
    folder, data = tmp_path / "hub", tmp_path / "data"
    try:
        size = olmoe_7b(folder)
        assert size > 13.8e9
        silent(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
        given = ["--data", data, "model.sequence_length=512", "train.precision=bf16"]
        taken, out, err = bounded(
            3000, tmp_path / "told.json", "evaluate", folder, *given, "--json", "-"
        )
        assert "block by block: 13.8 GB of weights in bf16" in err
        assert json.loads(out)["loss"] == pytest.approx(10.8, abs=0.5)  # nearly ln 50304
        blocks = [each[1:] for each in taken["seconds"] if each[0].startswith("blocks.")]
        assert len(blocks) == 16
        weights, computing = (sum(each) / 16 for each in zip(*blocks, strict=True))
        assert taken["most"] < 2.5e9  # beside the libraries
        with capsys.disabled():
            print(
                f"\n{size / 1e9:.1f} GB of weights: {weights:.2f} s a block to read them, "
                f"{computing:.2f} s to compute {json.loads(out)['tokens_scored']} tokens, "
                f"{taken['most'] / 1e9:.2f} GB of memory at most"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
