"""Every shipped configuration is valid, complete and explained."""

import json
import re
from pathlib import Path

import pytest
import yaml

from polyad.launch.cli import run
from polyad.model.build import count_parameters
from polyad.train.config.adaptation import model_of, unused_parameters
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config, shipped_configs
from polyad.train.config.text import flatten
from polyad.train.study import StudyConfig, load_study, progress, results_of
from tests.helpers.everyday import everyday
from tests.helpers.written import from_data

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
SHIPPED = sorted(set(shipped_configs()) - set(STUDIES))
NAMES = [str(path.relative_to(ROOT / "configs")) for path in SHIPPED]
STUDY_NAMES = [path.name for path in STUDIES]

# Those whose step is counted every day: one of each kind.
COUNTED = [
    "decoder/small.yaml",
    "finetune/gpt2-small-sst2.yaml",
    "gpt2/124m-smoe-16.yaml",
    "mixer/s16.yaml",
    "mixture/digits-distilled.yaml",
    "quickstart/gpt2-smoe.yaml",
    "quickstart/mixer.yaml",
    "quickstart/vmoe.yaml",
    "vit/vmoe-s32-similarity.yaml",
    "wikitext103/smoe-medium-attention.yaml",
]
# The processes that a configuration names, the vocabulary of its tokenizer or the classes of its
# data, and its parameters.
EXPECTED = {
    "bert/base.yaml": (8, 30522, 109_514_298),  # as Google's, without the second task
    "bert/small.yaml": (1, 8192, 1_677_056),
    "decoder/deepseek-v2-lite.yaml": (32, 102400, 15_706_484_224),
    "decoder/gpt-oss-20b.yaml": (32, 201088, 20_914_757_184),
    "decoder/granite-3.1-3b-a800m.yaml": (8, 49155, 3_298_793_472),
    "decoder/mixtral-8x7b.yaml": (64, 32000, 46_702_792_704),
    "decoder/olmoe-1b-7b.yaml": (16, 50304, 6_919_161_856),
    "decoder/qwen3-0.6b-upcycled.yaml": (8, 151936, 2_445_967_360),
    "decoder/qwen3-30b-a3b.yaml": (64, 151936, 30_532_122_624),
    "decoder/small.yaml": (2, 8192, 19_820_544),
    "finetune/bert-base-sst2.yaml": (8, 2, 109_483_778),
    "finetune/bert-large-sst2.yaml": (8, 2, 335_143_938),
    "finetune/clip-b32-celeba-cp.yaml": (1, 40, 88_034_816),
    "finetune/clip-b32-linear.yaml": (8, 1000, 88_225_768),
    "finetune/clip-b32-mumoe-cp.yaml": (8, 1000, 88_226_289),
    "finetune/clip-b32-mumoe-tr.yaml": (8, 1000, 88_228_696),
    "finetune/dino-s16-linear.yaml": (8, 1000, 22_050_664),
    "finetune/dino-s16-mumoe-cp.yaml": (8, 1000, 22_051_041),
    "finetune/dino-s16-mumoe-tr.yaml": (8, 1000, 22_051_364),
    "finetune/domainbed-vit-s16-emoe.yaml": (1, 7, 21_668_359),  # the dense model's
    "finetune/domainbed-vit-s16.yaml": (1, 7, 21_668_359),
    "finetune/gpt2-124m-banking77.yaml": (8, 77, 124_396_800),
    "finetune/gpt2-124m-sst2.yaml": (8, 2, 124_339_200),
    "finetune/gpt2-small-banking77.yaml": (1, 77, 5_341_952),
    "finetune/gpt2-small-sst2.yaml": (1, 2, 5_322_752),
    "finetune/olmoe-1b-7b-lora.yaml": (8, 50304, 6_996_756_480),
    "finetune/smoe-medium-sst2.yaml": (2, 2, 121_305_984),
    "gpt2/10b-mumoe-cp.yaml": (64, 50257, 9_880_178_176),
    "gpt2/10b-smoe-64.yaml": (64, 50257, 10_176_696_320),
    "gpt2/124m-block-8.yaml": (1, 50257, 157_469_938),
    "gpt2/124m-emo.yaml": (8, 50257, 981_941_760),
    "gpt2/124m-emoe.yaml": (8, 50257, 124_337_664),  # the dense model's
    "gpt2/124m-mumoe-cp.yaml": (8, 50257, 124_744_224),
    "gpt2/124m-mumoe-tr.yaml": (8, 50257, 125_113_824),
    "gpt2/124m-mxd.yaml": (8, 50257, 124_359_168),
    "gpt2/124m-smoe-16.yaml": (8, 50257, 520_846_848),
    "gpt2/124m-smoe-64.yaml": (8, 50257, 1_880_243_712),
    "gpt2/124m-wikitext103.yaml": (8, 50257, 124_337_664),
    "gpt2/124m.yaml": (8, 50257, 124_337_664),
    "gpt2/1558m.yaml": (32, 50257, 1_557_611_200),  # as OpenAI's, with biases
    "gpt2/355m.yaml": (8, 50257, 354_823_168),
    "gpt2/774m.yaml": (16, 50257, 774_030_080),
    "mixer/s16-mumoe-cp-64x2.yaml": (8, 1000, 18_658_936),
    "mixer/s16-mumoe-cp.yaml": (8, 1000, 18_630_616),
    "mixer/s16-mumoe-tr-64x2.yaml": (8, 1000, 18_659_944),
    "mixer/s16-mumoe-tr.yaml": (8, 1000, 18_290_792),
    "mixer/s16.yaml": (8, 1000, 18_528_264),
    "mixture/cifar10-attentive.yaml": (1, 10, 8_484_114),
    "mixture/cifar10-distilled.yaml": (1, 10, 8_354_327),
    "mixture/cifar10.yaml": (1, 10, 8_354_327),
    "mixture/cifar100-attentive.yaml": (1, 100, 22_267_344),
    "mixture/cifar100.yaml": (1, 100, 22_141_412),
    "mixture/digits-attentive.yaml": (1, 10, 10_376),
    "mixture/digits-distilled.yaml": (1, 10, 8_493),
    "mixture/digits.yaml": (1, 10, 8_493),
    "mixture/fashion-mnist-attentive.yaml": (1, 10, 777_780),
    "mixture/fashion-mnist.yaml": (1, 10, 775_897),
    "mixture/mnist-attentive.yaml": (1, 10, 34_856),
    "mixture/mnist-distilled.yaml": (1, 10, 32_973),
    "mixture/mnist.yaml": (1, 10, 32_973),
    "quickstart/gpt2-smoe.yaml": (2, 8192, 11_641_376),
    "quickstart/gpt2.yaml": (2, 8192, 5_322_240),
    "quickstart/mixer.yaml": (1, 10, 569_994),
    "quickstart/vmoe.yaml": (2, 10, 402_650),
    "vit/b16.yaml": (8, 1000, 87_158_248),
    "vit/s32.yaml": (8, 1000, 27_595_240),
    "vit/vmoe-b16-attention.yaml": (8, 1000, 153_284_584),
    "vit/vmoe-b16-similarity.yaml": (8, 1000, 153_284_584),
    "vit/vmoe-b16.yaml": (8, 1000, 153_284_584),
    "vit/vmoe-s32-attention.yaml": (8, 1000, 56_999_400),  # as Google's
    "vit/vmoe-s32-similarity.yaml": (8, 1000, 56_999_400),
    "vit/vmoe-s32.yaml": (8, 1000, 56_999_400),
    "wikitext103/glam-medium-attention.yaml": (8, 267735, 200_609_760),
    "wikitext103/glam-medium-similarity.yaml": (8, 267735, 200_609_760),
    "wikitext103/glam-medium.yaml": (8, 267735, 200_609_760),
    "wikitext103/smoe-dropout-medium.yaml": (8, 267735, 215_514_112),
    "wikitext103/smoe-large-attention.yaml": (8, 267735, 388_014_272),
    "wikitext103/smoe-large-similarity.yaml": (8, 267735, 388_014_272),
    "wikitext103/smoe-large.yaml": (8, 267735, 388_014_272),
    "wikitext103/smoe-medium-attention.yaml": (8, 267735, 215_548_000),
    "wikitext103/smoe-medium-similarity.yaml": (8, 267735, 215_548_000),
    "wikitext103/smoe-medium.yaml": (8, 267735, 215_548_000),
    "wikitext103/switch-medium.yaml": (8, 267735, 215_548_000),
    "wikitext103/xmoe-medium.yaml": (8, 267735, 215_531_782),
}
# Of a study whose data comes from elsewhere: its runs.
EXPECTED_TASKS = (
    {
        f"glue-{model}{lora}.yaml": 8 * 3 * (3 + 3 * 6)
        for model in ("gpt2", "bert-base", "bert-large")
        for lora in ("", "-lora")
    }
    | {
        f"sst5-banking77-{model}{lora}.yaml": 2 * 3 * (3 + 3 * 6)
        for model in ("gpt2", "bert-base", "bert-large")
        for lora in ("", "-lora")
    }
    | {
        "emergent.yaml": 96,
        "emergent-lora.yaml": 96,
        "domainbed-vit-s16.yaml": 4 * 3 * (1 + 3 * 3),
        "smoe-finetune.yaml": 3 * 3 * 5,
    }
)
# Sizes of the study whose page names them.
MUMOE_SIZES = {"dense": 2_615_424, "mumoe-cp": 2_612_688, "mumoe-tr": 2_627_104}
# Of a study: its runs, and how many parameters its variants have.
EXPECTED_STUDIES: dict[str, tuple[int, set[int]]] = {
    "attention.yaml": (18, {6_187_456}),
    "balance.yaml": (27, {6_187_456}),
    "cifar10-mixture.yaml": (70, {100_215, 102_098}),
    "digits-mixture.yaml": (70, {8_493, 10_376}),
    "distilled-blocks.yaml": (27, {2_615_424, 3_205_244, 3_206_784, 3_208_556}),
    "expert-counts.yaml": (
        27,
        {
            2_611_880,
            2_612_688,
            2_615_368,
            2_615_424,
            2_616_624,
            2_620_816,
            2_639_296,
            3_803_536,
            10_918_336,
        },
    ),
    "graphs-swept.yaml": (30, {6_187_456}),
    "mixer.yaml": (27, {569_994, 572_322, 575_946}),
    "mumoe-choices.yaml": (105, {2_612_688, 2_615_424, 2_617_888, 2_627_104, 3_744_288}),
    "mumoe-long.yaml": (15, {2_612_688, 2_615_424, 2_627_104}),
    "mumoe-longest.yaml": (9, {2_612_688, 2_615_424, 2_627_104}),
    "mumoe-muon.yaml": (51, {2_612_688, 2_615_424, 2_617_888, 2_627_104, 3_744_288, 4_387_968}),
    "mumoe-rates.yaml": (30, {2_612_688, 2_615_424, 2_627_104}),
    "mumoe-start.yaml": (15, {2_612_688, 2_615_424, 2_617_888}),
    "mumoe.yaml": (15, {*MUMOE_SIZES.values()}),
    "mxd-gpu.yaml": (26, {17_504_640, 17_505_664, 17_506_224}),
    "mxd-long.yaml": (12, {2_612_688, 2_615_424}),
    "mxd.yaml": (21, {2_612_688, 2_615_424}),
    "readable-experts.yaml": (24, {2_615_424, 10_918_336}),
    "smoe-graphs.yaml": (12, {6_187_456}),
    "smoe-rates.yaml": (18, {2_612_688, 2_615_424, 3_803_536, 10_918_336}),
    "smoe-start.yaml": (21, {2_615_424, 3_803_536}),
    "vmoe.yaml": (27, {414_170}),
}


def test_every_shipped_config_is_listed_here():
    assert sorted(EXPECTED) == NAMES
    assert sorted(EXPECTED_STUDIES | EXPECTED_TASKS) == STUDY_NAMES


@everyday("name", EXPECTED_TASKS, keep=list(EXPECTED_TASKS)[:1])
def test_a_shipped_study_of_tasks_is_valid(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # its base is relative to that
    study = load_study(ROOT / "configs" / "studies" / name)
    assert progress(study, results_of(study))[0] == EXPECTED_TASKS[name]


@everyday("name", EXPECTED_STUDIES, keep=["smoe-graphs.yaml"])
def test_a_shipped_study_is_valid(name, tmp_path, capfd):
    path = ROOT / "configs" / "studies" / name
    runs, parameters = EXPECTED_STUDIES[name]
    tree = yaml.safe_load(path.read_text())
    assert (ROOT / tree["base"]).is_file()
    # Elsewhere: here the study may have been run.
    tree |= {"base": str(ROOT / tree["base"]), "folder": str(tmp_path / "study")}
    tree["common"]["data.path"] = str(tmp_path / "data")
    if load_config(Path(tree["base"])).data.kind == "images":  # of as many classes
        tree["common"]["data.path"] = "digits"
    else:  # as many tokens as its tokenizer is to have
        (size,) = re.findall(r"--tokenizer train:(\d+)", path.read_text())
        tree["common"] |= {"model.vocab_size": int(size), "model.end_of_text_id": 0}
    (tmp_path / path.name).write_text(yaml.safe_dump(tree))
    status = run(["study", str(tmp_path / path.name), "--dry-run", "--json", "-"])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    plan = json.loads(captured.out)
    assert plan["num_runs"] == runs
    sizes = {each["variant"]: each["parameters"] for each in plan["sizes"]}
    assert set(sizes.values()) == parameters
    assert name != "mumoe.yaml" or sizes.items() >= MUMOE_SIZES.items()


@pytest.mark.parametrize("path", STUDIES, ids=STUDY_NAMES)
def test_a_shipped_study_has_every_key(path):
    assert yaml.safe_load(path.read_text()).keys() == StudyConfig.model_fields.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_is_valid_and_has_its_parameters(name):
    processes, of_data, parameters = EXPECTED[name]
    path = ROOT / "configs" / name
    config = load_config(path, from_data(path, of_data))
    validate(config, processes)
    model = model_of(config)
    assert count_parameters(model) == parameters
    head = path.read_text().partition("\n\n")[0]
    if size := re.search(r"^# Size +([\d,]+) parameters", head, re.M):  # as it stands there
        assert size[1] == f"{parameters:,}"
    if active := re.search(r"^# Size .*, ([\d,]+) active per", head, re.M):
        assert active[1] == f"{parameters - unused_parameters(model):,}"


@everyday("name", NAMES, keep=COUNTED[:1])
def test_a_shipped_config_is_described_with_the_memory_that_its_head_says(name, capfd):
    processes, of_data, parameters = EXPECTED[name]
    path = ROOT / "configs" / name
    arguments = ["validate", str(path), "--without-data", "--json", "-"]
    status = run([*arguments, "--processes", str(processes), *from_data(path, of_data)])
    captured = capfd.readouterr()
    assert (status, captured.err) == (0, "")
    described = json.loads(captured.out)
    model, memory = described["model"], described["memory_bytes_per_process"]
    assert model["parameters"] == parameters
    head = path.read_text().partition("\n\n")[0]
    if active := re.search(r"^# Size .*, ([\d,]+) active per", head, re.M):
        assert active[1] == f"{model['active_parameters']:,}"
    computed = r"^# Memory .*about ([\d.]+) ([GMK])B.*, beside the libraries' own"
    # That of a distilled one has the teacher, which the command names.
    if (stands := re.search(computed, head, re.M)) and "-distilled" not in name:
        said = float(stands[1]) * {"G": 1e9, "M": 1e6, "K": 1e3}[stands[2]]
        assert said == pytest.approx(memory["total"], rel=0.12)


@pytest.mark.parametrize("path", SHIPPED, ids=NAMES)
def test_a_shipped_config_has_every_key(path):
    written = set(flatten(yaml.safe_load(path.read_text())))
    wanted = set(flatten(load_config(path).model_dump(mode="json")))
    assert wanted - written == set()
    assert written - wanted == set()


@pytest.mark.parametrize("path", [*SHIPPED, *STUDIES], ids=[*NAMES, *STUDY_NAMES])
def test_a_shipped_config_explains_every_key_and_how_it_is_run(path):
    bare = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.strip().startswith("#") and not line.partition(" # ")[2]
    ]
    assert bare == []
    head = path.read_text().partition("\n\n")[0]
    for word in ("# Command", "polyad ", "# Hardware", "# Time", "# Memory"):
        assert word in head, word


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smoe-medium", 215), ("smoe-large", 388), ("glam-medium", 201), ("switch-medium", 215)],
)
def test_sizes_are_those_that_the_paper_reports(name, millions):
    # Nguyen et al. 2025, table 5: with the vocabulary, twice.
    assert EXPECTED[f"wikitext103/{name}.yaml"][2] / 1e6 == pytest.approx(millions, abs=0.6)


@pytest.mark.parametrize("size", ["smoe-medium", "smoe-large", "glam-medium"])
@pytest.mark.parametrize("graph", ["similarity", "attention"])
def test_a_graph_is_all_that_differs(size, graph):
    folder = ROOT / "configs" / "wikitext103"
    plain, mixed = (
        flatten(yaml.safe_load((folder / f"{name}.yaml").read_text()))
        for name in (size, f"{size}-{graph}")
    )
    differing = {key for key in plain if plain[key] != mixed[key]}
    assert differing == {"run.folder", "model.feed_forward.graph"}
