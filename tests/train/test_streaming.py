"""Decoders that are read block by block give what whole ones give."""

import json
import shutil
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as command
from polyad.train import streaming
from polyad.train.errors import ConfigError
from polyad.train.experts.interventions import Intervention
from polyad.train.measures.atlas import Atlas
from polyad.train.report.command import report
from tests.helpers import bounded as bounded_command
from tests.helpers.decoders import hub_folder, in_four_bits, write_tokenizer
from tests.helpers.everyday import everyday
from tests.helpers.little_memory import little_memory
from tests.helpers.prepared import jsonl
from tests.helpers.runs import both_forms, evaluation, measured
from tests.helpers.started import start

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

TEXTS = [f"def number_{n}(x):\n    return {n} * x + {n * n}\n" * (1 + n % 3) for n in range(16)]
FAMILIES = ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_oss four bits", "granitemoe",
            "llama 3", "gpt2"]  # fmt: skip
WINDOWS = ("model.sequence_length=32", "evaluation.batch_size=3")
mapped = streaming.mapped
FREE = ("seconds", "tokens_per_second")
"""Keys of a result that differ from run to run."""


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
    prepare(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
    return folder, str(data)


def lasting(result):
    """What of a result is the same in each run."""
    return {key: value for key, value in result.items() if key not in FREE}


@everyday(
    ("case", "precision"),
    [(case, precision) for case in FAMILIES for precision in ("fp32", "bf16")],
    keep=[("gpt_oss four bits", "bf16")],
)
def test_perplexity_is_that_of_the_whole_model(case, precision, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    options = {
        "data": data,
        "overrides": (*WINDOWS, "evaluation.stride=20", f"train.precision={precision}"),
    }
    wanted = evaluation(folder, **options)
    with little_memory():
        result = evaluation(folder, **options)
    assert lasting(result) == lasting(wanted)
    assert wanted["tokens_scored"] > 200


@everyday("case", FAMILIES[:-2], keep=["deepseek_v3"])
def test_measures_and_pages_are_those_of_the_whole_model(case, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    options = {"data": data, "overrides": WINDOWS}
    wanted = measured(folder, "specialize", **options)[0]
    page, whole = ({"data": data, "tokens": tokens, "layers": ["all"]} for tokens in (150, 10**6))
    pages = [report(folder, **each) for each in (page, whole)]
    with little_memory():
        result = measured(folder, "specialize", **options)[0]
        assert [report(folder, **each) for each in (page, whole)] == pages
    assert lasting(result) == lasting(wanted)


def test_a_model_without_room_is_streamed_by_itself(tmp_path, monkeypatch, capfd):
    folder, data = folder_and_data("olmoe", tmp_path)
    options = {"data": data, "overrides": WINDOWS}
    wanted = evaluation(folder, **options)
    assert "block by block" not in capfd.readouterr().err
    for free, files in ((400_000, 0), (200_000, 1)):  # what blocks give is in memory, or in a file
        made: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "free_memory", lambda free=free: free)
            patch.setattr(streaming, "mapped", lambda *a, m=made: m.append(a) or mapped(*a))
            assert lasting(evaluation(folder, **options)) == lasting(wanted)
        error = capfd.readouterr().err
        assert f"polyad: reading {folder} block by block: " in error
        assert f" KB of weights in fp32, {free // 1000} KB of free memory" in error
        assert len(made) == files
    monkeypatch.setattr(streaming, "free_memory", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"its largest part has \d+ KB in fp32, and 50 KB of mem"):
        evaluation(folder, **options)


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
def test_the_atlas_is_that_of_the_whole_model(case, how, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    options = {"data": data, "overrides": WINDOWS, "how": how}
    wanted, text = both_forms(folder, Atlas, **options)
    assert "significant in" in text
    with little_memory():
        close(both_forms(folder, Atlas, **options)[0], wanted)


def test_an_intervention_is_that_of_the_whole_model(tmp_path, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    options = {"data": data, "overrides": WINDOWS}
    before = evaluation(folder, **options)["loss"]
    for how in ("prune", "mean"):
        changed = [Intervention(layer=1, experts=(0, 3), how=how)]
        wanted = evaluation(folder, interventions=changed, **options)
        with monkeypatch.context() as patch:
            patch.setattr(streaming, "free_memory", lambda: 300_000)
            result = evaluation(folder, interventions=changed, **options)
        close(result["loss"], wanted["loss"])
        assert abs(result["loss"] - before) > 1e-5


def test_what_needs_the_whole_model_says_why(tmp_path, capfd, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    monkeypatch.setattr(streaming, "free_memory", lambda: 200_000)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=100_000))
    given = [folder, tmp_path / "small", "--data", data, "--by", "reap", "--keep", "0.5"]
    assert command(["experts", "prune", *map(str, given)]) == 2
    message = (
        "KB of weights in fp32, 200 KB of memory are free, and not block by block: experts are"
    )
    assert message in capfd.readouterr().err
    assert command(["generate", str(folder), "--prompt", "def"]) == 2
    assert "and not block by block: each new token runs all blocks" in capfd.readouterr().err


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
        whole, result = (lasting(json.loads(file.read_text())) for file in files)
        assert result == whole
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
        prepare(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
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
