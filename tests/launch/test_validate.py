"""`polyad validate`: a run checked and described without being started."""

import json

from polyad.launch.cli import run


def test_validate_describes_the_run_to_a_person_and_writes_json(config, tmp_path, capfd):
    assert run(["validate", str(config), "--processes", "2", "--json", str(tmp_path / "d")]) == 0
    captured = capfd.readouterr()
    description = json.loads((tmp_path / "d").read_text())
    assert captured.err == ""
    assert "(a new run)" in captured.out
    assert f"{description['model']['parameters']:,}" in captured.out
    assert "processes 2, data parallel size 2, " in captured.out
    assert description["training"]["epochs"] > 0
    assert not (tmp_path / "run").exists()


def test_validate_takes_the_number_of_processes_from_torchrun(config, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["validate", str(config), "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"]["processes"] == 2


def test_without_data_the_vocabulary_has_to_be_given(config, capfd):
    arguments = ["validate", str(config), "--without-data", "data.path=/no/such/data"]
    assert run(arguments) == 2
    assert "model.vocab_size" in capfd.readouterr().err
    assert run([*arguments, "model.vocab_size=400"]) == 0
    assert "not checked" in capfd.readouterr().out
