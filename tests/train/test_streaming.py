"""Decoders that are read block by block give what whole ones give."""

import json
import shutil
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

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
from tests.helpers.reference import save_reference
from tests.helpers.runs import both_forms, evaluation, measured
from tests.helpers.started import start

pytestmark = pytest.mark.distributed

TEXTS = [f"def number_{n}(x):\n    return {n} * x + {n * n}\n" * (1 + n % 3) for n in range(16)]
FAMILIES = ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_oss four bits", "granitemoe",
            "llama 3", "gpt2"]  # fmt: skip
WINDOWS = ("model.sequence_length=32", "evaluation.batch_size=3")
mapped = streaming.mapped
FREE = ("seconds", "tokens_per_second")
"""Keys of a result that differ from run to run."""


def folder_and_data(case, tmp_path, settings=None):
    """A folder as the hub has it, and texts in its tokens."""
    name = case.removesuffix(" four bits")
    folder, data = tmp_path / "hub", tmp_path / "data"
    settings = {"intermediate_size": 64} if name != case else settings
    if name == "gpt2":
        save_reference(folder, n_layer=3, n_positions=64, vocab_size=320)
        write_tokenizer(folder)
    else:
        hub_folder(folder, name, settings)
    if name != case:
        in_four_bits(folder)
    prepare(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
    return folder, str(data)


def lasting(result):
    """What of a result is the same in each run."""
    return {key: value for key, value in result.items() if key not in FREE}


@everyday("precision", ["fp32", "bf16"], keep=["bf16"])
@everyday("case", FAMILIES, keep=["gpt_oss four bits"])
def test_perplexity_is_that_of_the_whole_model(case, precision, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    words = (*WINDOWS, "evaluation.stride=20", f"train.precision={precision}")
    wanted = evaluation(folder, data=data, overrides=words)
    with little_memory():
        assert lasting(evaluation(folder, data=data, overrides=words)) == lasting(wanted)
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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["olmoe", "deepseek_v3", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("how", ["zero", "renormalize", "mean", "prune"])
def test_the_atlas_is_that_of_the_whole_model(case, how, tmp_path):
    folder, data = folder_and_data(case, tmp_path)
    options = {"data": data, "overrides": WINDOWS, "how": how}
    wanted, text = both_forms(folder, Atlas, **options)
    assert "significant in" in text
    with little_memory():
        close(both_forms(folder, Atlas, **options)[0], wanted)


def test_an_intervention_is_that_of_the_whole_model(tmp_path):
    folder, data = folder_and_data("olmoe", tmp_path)
    options = {"data": data, "overrides": WINDOWS}
    before = evaluation(folder, **options)["loss"]
    for how in ("prune", "mean"):
        options["interventions"] = [Intervention(layer=1, experts=(0, 3), how=how)]
        wanted = evaluation(folder, **options)["loss"]
        with little_memory():
            close(evaluation(folder, **options)["loss"], wanted)
        assert abs(wanted - before) > 1e-5


def test_what_needs_the_whole_model_says_why(tmp_path, refused, monkeypatch):
    folder, data = folder_and_data("olmoe", tmp_path)
    monkeypatch.setattr(streaming, "free_memory", lambda: 200_000)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=100_000))
    prune = ("experts", "prune", folder, tmp_path / "small", "--data", data, "--by", "reap")
    for words, why in (
        ((*prune, "--keep", "0.5"), "experts are"),
        (("generate", folder, "--prompt", "def"), "what is asked of it runs all blocks"),
    ):
        said = f"200 KB of memory are free, and not block by block: {why}"
        assert said in refused(*words)


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


def olmoe_7b(folder):
    """Writes a folder of OLMoE-1B-7B's sizes with random weights in bf16; returns their bytes."""
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
    torch.manual_seed(0)
    numbers = torch.empty(inner * width, dtype=torch.bfloat16).uniform_(-0.03, 0.03)

    def tensor(*shape):
        if len(shape) == 1:  # of a norm
            return torch.ones(shape, dtype=torch.bfloat16)
        count = shape[0] * shape[1]
        flat = numbers.roll(int(torch.randint(len(numbers), ())))
        return flat.repeat(-(-count // len(flat)))[:count].view(shape)

    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    files = [
        {"model.embed_tokens": (rows, width), "lm_head": (rows, width), "model.norm": (width,)}
    ]
    for block in range(blocks):
        shapes = dict.fromkeys(norms, (width,)) | {"mlp.gate": (experts, width)}
        shapes |= {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
        for expert in range(experts):
            place = f"mlp.experts.{expert}"
            shapes |= {f"{place}.{name}_proj": (inner, width) for name in ("gate", "up")}
            shapes[f"{place}.down_proj"] = (width, inner)
        files.append({f"model.layers.{block}.{name}": shape for name, shape in shapes.items()})
    places = {}
    for number, shapes in enumerate(files):
        tensors = {f"{name}.weight": tensor(*shape) for name, shape in shapes.items()}
        save_file(tensors, folder / f"{number}.safetensors")
        places |= dict.fromkeys(tensors, f"{number}.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_seven_billion_parameters_are_read_in_three_gigabytes(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    if free < 18e9:
        pytest.skip(f"{free / 1e9:.0f} GB of disk are free at {tmp_path}, 18 are needed")
    folder, data = tmp_path / "hub", tmp_path / "data"
    try:
        assert olmoe_7b(folder) > 13.8e9
        prepare(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
        given = ["--data", data, "model.sequence_length=512", "train.precision=bf16", "--json", "-"]
        taken, out, err = bounded(3000, tmp_path / "told.json", "evaluate", folder, *given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert "block by block: 13.8 GB of weights in bf16" in err
    assert json.loads(out)["loss"] == pytest.approx(10.8, abs=0.5)  # nearly ln 50304
    assert len([each for each in taken["seconds"] if each[0].startswith("blocks.")]) == 16
    assert taken["most"] < 2.5e9  # beside the libraries
