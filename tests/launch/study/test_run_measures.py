"""What is measured of a study's finished runs, in real processes: noise, leaks, experts."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from polyad.launch.cli import run
from tests.helpers.started import SMALL
from tests.launch.study.conftest import LEAKY, small_study
from tests.launch.study.test_checks import refused
from tests.launch.study.test_run import Capture, start, write

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_measures_are_taken_of_finished_runs_and_then_kept(
    tmp_path: Path, data: Path, capfd: Capture
) -> None:
    plain = LEAKY | {"graph": "none"}
    variants = {"plain": {"model.feed_forward": plain}, "leaky": {"model.feed_forward": LEAKY}}
    changes = {"variants": variants, "baseline": "plain"}
    path = write(tmp_path, data, **changes)
    process = start(path)
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    runs = tmp_path / "study" / "runs"
    weights = {p: p.stat().st_mtime_ns for p in runs.rglob("*.safetensors")}
    assert len(weights) == 4
    # Asked for later: nothing is trained.
    changes |= {"attack": {"rate": 0.5}}
    path = write(tmp_path, data, **changes)
    assert run(["study", str(path), "--dry-run"]) == 0
    assert "2 measures of them: 0 taken, 2 to take" in capfd.readouterr().out
    process = start(path, "--json", "-", "--figure", str(tmp_path / "figure.svg"))
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "== run" not in err
    assert "== measure 1 of 2: attack of plain, seed 1\n" in err
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("*.safetensors")} == weights
    result = json.loads(out)
    leaky = result["variants"]["leaky"]
    assert leaky["differences"]["attacked_loss"]["pairs"] == 1
    # What each says is what the command alone says.
    attack = ["--attack", "word-swap", "--rate", "0.5"]
    assert run(["evaluate", str(runs / "plain" / "seed-1"), *attack, "--json", "-"]) == 0
    alone = json.loads(capfd.readouterr().out)
    known = result["variants"]["plain"]["measures"]
    assert known["attacked_loss"]["mean"] == pytest.approx(alone["loss"])
    ElementTree.parse(tmp_path / "figure.svg")
    # Kept, until they are asked for otherwise; a damaged one is named.
    assert run(["study", str(path)]) == 0
    assert "== measure" not in capfd.readouterr().err
    path = write(tmp_path, data, **changes | {"attack": {"rate": 0.25}})
    assert run(["study", str(path), "--dry-run"]) == 0
    assert "4 measures of them: 2 taken, 2 to take" in capfd.readouterr().out
    (runs / "plain" / "seed-1.attack.json").write_text("{}")
    assert "seed-1.attack.json: has no loss, so it was not written by a study" in refused(
        path, capfd
    )


def test_a_study_of_images_prepares_them_and_measures_noise_and_experts_left_out(tmp_path: Path):
    head = {"kind": "mumoe", "num_experts": [4], "rank": 4}
    vision = {
        **{"kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 16},
        **{"num_heads": 2},
    }
    network = {"convolutions": [1], "hidden_sizes": [8, 8]}
    mixture = {
        **{"kind": "mixture", "image_size": 8, "num_experts": 3, "expert": network},
        **{"gate_network": network},
    }
    frozen = [{"match": "mixture.experts.*", "freeze": True}]
    base = {
        **SMALL,
        "model": vision,
        "data": {"kind": "images", "path": "nowhere"},
        "evaluation": {"every": 0},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    data = {"path": str(tmp_path / "digits"), "source": "digits", "validation_fraction": 0.1}
    tree = small_study(tmp_path, tmp_path / "base.yaml", tmp_path) | {
        "data": data,
        "attack": {"rate": 0.2},
        "specialization": True,
        "variants": {
            "dense": None,
            "head": {"model.head": head},
            "distilled": {"model": mixture, "optimizer.groups": frozen},
            "attentive": {"model": mixture | {"gate": "attentive"}},
        },
        "from_runs": {"distilled": {"checkpoint.init_from": "attentive"}},
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    process = start(path, "--json", "-", "--figure", str(tmp_path / "figure.svg"))
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "== measure 3 of 7: specialization of head, seed 1" in err
    assert "from the weights of" in err
    variants = json.loads(out)["variants"]
    assert list(variants) == ["dense", "head", "distilled", "attentive"]
    mixtures = [variants[name]["measures"] for name in ("distilled", "attentive")]
    for measures in mixtures:
        assert "polysemanticity" not in measures  # whole networks are not left out
        assert 0 <= measures["entropy_bits"]["mean"] <= measures["usage_entropy_bits"]["mean"] < 1.6
        assert 0 <= measures["information_bits"]["mean"] < 1.6  # log2(3) = 1.585
        assert measures["experts_used"]["mean"] in (1, 2, 3)
    known = {name: variants[name]["measures"] for name in ("dense", "head")}
    assert 0 < known["head"]["experts_that_matter"]["mean"] <= 1
    assert known["head"]["polysemanticity"]["mean"] >= 0
    assert "polysemanticity" not in known["dense"]
    for name in known:
        attack = ("--attack", "gaussian-noise", "--rate", "0.2", "--json", str(tmp_path / "a.json"))
        folder = tmp_path / "study" / "runs" / name / "seed-1"
        assert run(["evaluate", str(folder), *attack]) == 0
        alone = json.loads((tmp_path / "a.json").read_text())
        assert known[name]["attacked_top1"]["mean"] == pytest.approx(alone["top1"])
    assert run(["study", str(path)]) == 0  # nothing is left
    words = {"data": data | {"tokenizer": "words"}}
    for wrong, said in (
        (words, "data.tokenizer: is not allowed with data.kind: images"),
        ({"knockout": {}}, "knockout: is not allowed with data.kind: images; text, masked_text"),
    ):
        path.write_text(yaml.safe_dump(tree | wrong, sort_keys=False))
        process = start(path)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert said in err


def test_a_study_says_what_each_expert_of_text_is_for(
    tmp_path: Path, data: Path, capfd: Capture
) -> None:
    path = write(tmp_path, data, knockout={"tokens": 640, "layers": [1]})
    process = start(path, "--json", "-")
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    assert "== measure 1 of 1: knockout of cp, seed 1" in err
    variants = json.loads(out)["variants"]
    assert "effective_classes_characters" not in variants["dense"]["measures"]
    measures = variants["cp"]["measures"]
    folder = tmp_path / "study" / "runs" / "cp" / "seed-1"
    options = ["--knockout", "--probe-tokens", "640", "--layers", "1", "--json", "-"]
    assert run(["evaluate", str(folder), *options]) == 0
    (layer,) = json.loads(capfd.readouterr().out)["layers"].values()
    for by in ("characters", "frequency"):
        focus = layer["focus"][f"read {by}"]
        share = focus.pop("experts_that_matter") / len(layer["experts"])
        assert measures[f"experts_that_matter_{by}"]["mean"] == pytest.approx(share)
        for name, value in focus.items():
            known = measures.get(f"{name}_{by}")
            assert (known and known["mean"]) == (value and pytest.approx(value))
    kept = json.loads(folder.with_suffix(".knockout.json").read_text())
    assert sorted(kept["layers"]["blocks.1.feed_forward"]) == ["experts", "focus"]
    # Asked for otherwise it is taken anew.
    path = write(tmp_path, data, knockout={"tokens": 320, "layers": [1]})
    assert run(["study", str(path), "--dry-run"]) == 0
    assert "1 measures of them: 0 taken, 1 to take" in capfd.readouterr().out
