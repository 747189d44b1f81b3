"""Every shipped configuration is valid, complete and explained."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from polyad.launch.cli import run
from polyad.model.build import count_parameters
from polyad.model.config import flatten
from polyad.train.config.adaptation import model_of, unused_parameters
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config, shipped_configs
from polyad.train.study import StudyConfig, load_study, progress, results_of
from tests.helpers.everyday import everyday
from tests.helpers.written import from_data

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
SHIPPED = sorted(set(shipped_configs()) - set(STUDIES))
NAMES = [str(path.relative_to(ROOT / "configs")) for path in SHIPPED]
STUDY_NAMES = [path.name for path in STUDIES]

# The vocabulary of the tokenizer or the classes of the data, of a folder and of some files.
OF_DATA = {
    "gpt2": 50257, "mixer": 1000, "vit": 1000, "finetune": 1000, "mixture": 10, "quickstart": 8192,
    "wikitext103": 267735,
    "bert/base.yaml": 30522, "bert/small.yaml": 8192, "decoder/deepseek-v2-lite.yaml": 102400,
    "decoder/gpt-oss-20b.yaml": 201088, "decoder/granite-3.1-3b-a800m.yaml": 49155,
    "decoder/mixtral-8x7b.yaml": 32000, "decoder/olmoe-1b-7b.yaml": 50304,
    "decoder/qwen3-0.6b-upcycled.yaml": 151936, "decoder/qwen3-30b-a3b.yaml": 151936,
    "decoder/small.yaml": 8192, "finetune/bert-base-sst2.yaml": 2,
    "finetune/bert-large-sst2.yaml": 2, "finetune/clip-b32-celeba-cp.yaml": 40,
    "finetune/domainbed-vit-s16-emoe.yaml": 7, "finetune/domainbed-vit-s16.yaml": 7,
    "finetune/gpt2-124m-banking77.yaml": 77, "finetune/gpt2-124m-sst2.yaml": 2,
    "finetune/gpt2-small-banking77.yaml": 77, "finetune/gpt2-small-sst2.yaml": 2,
    "finetune/olmoe-1b-7b-lora.yaml": 50304, "finetune/smoe-medium-sst2.yaml": 2,
    "mixture/cifar100-attentive.yaml": 100, "mixture/cifar100.yaml": 100,
    "quickstart/mixer.yaml": 10, "quickstart/vmoe.yaml": 10,
}  # fmt: skip
# Where the head of a file does not say it; 124m and its like have no biases, 1558m is OpenAI's.
PARAMETERS = {
    "bert/base.yaml": 109_514_298, "bert/small.yaml": 1_677_056,
    "finetune/bert-base-sst2.yaml": 109_483_778, "finetune/bert-large-sst2.yaml": 335_143_938,
    "finetune/gpt2-124m-banking77.yaml": 124_396_800, "finetune/gpt2-124m-sst2.yaml": 124_339_200,
    "finetune/gpt2-small-banking77.yaml": 5_341_952, "finetune/gpt2-small-sst2.yaml": 5_322_752,
    "finetune/smoe-medium-sst2.yaml": 121_305_984, "gpt2/124m-block-8.yaml": 157_469_938,
    "gpt2/124m-emoe.yaml": 124_337_664, "gpt2/124m-mumoe-cp.yaml": 124_744_224,
    "gpt2/124m-mumoe-tr.yaml": 125_113_824, "gpt2/124m-mxd.yaml": 124_359_168,
    "gpt2/124m-wikitext103.yaml": 124_337_664, "gpt2/124m.yaml": 124_337_664,
    "gpt2/1558m.yaml": 1_557_611_200, "gpt2/355m.yaml": 354_823_168, "gpt2/774m.yaml": 774_030_080,
    "quickstart/gpt2-smoe.yaml": 11_641_376, "quickstart/gpt2.yaml": 5_322_240,
}  # fmt: skip


def expected(name: str) -> tuple[int, int, int]:
    """The processes that a file's command names, what its data says, and its parameters."""
    head = (ROOT / "configs" / name).read_text().partition("\n\n")[0]
    counts = (re.search(rf"--{word} (\d+)", head) for word in ("nodes", "processes-per-node"))
    processes = math.prod(int(each[1]) for each in counts if each)
    size = re.search(r"^# Size +([\d,]+) parameters", head, re.M)
    parameters = int(size[1].replace(",", "")) if size else PARAMETERS[name]
    return processes, OF_DATA.get(name, OF_DATA.get(name.partition("/")[0], 0)), parameters


# Of a study whose data comes from elsewhere: its runs.
EXPECTED_TASKS = {
    f"{data}-{model}{lora}.yaml": 3 * tasks * (3 + 3 * 6)
    for data, tasks in (("glue", 8), ("sst5-banking77", 2))
    for model in ("gpt2", "bert-base", "bert-large")
    for lora in ("", "-lora")
} | {
    "emergent.yaml": 96, "emergent-lora.yaml": 96, "domainbed-vit-s16.yaml": 4 * 3 * (1 + 3 * 3),
    "smoe-finetune.yaml": 3 * 3 * 5,
}  # fmt: skip
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
    assert OF_DATA.keys() | PARAMETERS.keys() <= {*NAMES, *(n.partition("/")[0] for n in NAMES)}
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
    processes, of_data, parameters = expected(name)
    path = ROOT / "configs" / name
    config = load_config(path, from_data(path, of_data))
    validate(config, processes)
    model = model_of(config)
    assert count_parameters(model) == parameters
    head = path.read_text().partition("\n\n")[0]
    if active := re.search(r"^# Size .*, ([\d,]+) active per", head, re.M):
        assert active[1] == f"{parameters - unused_parameters(model):,}"


@everyday("name", NAMES, keep=["decoder/small.yaml"])
def test_a_shipped_config_is_described_with_the_memory_that_its_head_says(name, capfd):
    processes, of_data, _ = expected(name)
    path = ROOT / "configs" / name
    arguments = ["validate", str(path), "--without-data", "--json", "-"]
    status = run([*arguments, "--processes", str(processes), *from_data(path, of_data)])
    captured = capfd.readouterr()
    assert (status, captured.err) == (0, "")
    described = json.loads(captured.out)
    head = path.read_text().partition("\n\n")[0]
    exports = re.search(r"^# Exports +(.*)", head, re.M)[1]
    if described["exports_to"].startswith("safetensors"):
        assert exports.startswith("safetensors under Polyad's names alone: ")
    else:
        assert exports == described["exports_to"]
    memory = described["memory_bytes_per_process"]
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
    assert expected(f"wikitext103/{name}.yaml")[2] / 1e6 == pytest.approx(millions, abs=0.6)
