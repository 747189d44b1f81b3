"""Nothing that is read can run code: pickles and YAML objects are planted in every place."""

import ast
import contextlib
import io
import json
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import CheckpointError, record_of, render
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers.runs import write_config

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[3]

_RESOLVED: list[str] = []


def _audit(event, arguments):
    if event == "pickle.find_class":
        _RESOLVED.append(".".join(arguments))


sys.addaudithook(_audit)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


def bombs(marker):
    """The same in each dress: bare, as torch saves it, as numpy does, and in YAML."""
    saved = io.BytesIO()
    torch.save({"weight": torch.ones(3), "bomb": Bomb(marker)}, saved)
    numpy = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    numpy = numpy.ljust(127) + b"\n" + pickle.dumps([Bomb(marker)])
    return {
        "pickle": pickle.dumps(Bomb(marker)),
        "torch": saved.getvalue(),
        "numpy": numpy,
        "yaml": f"a: !!python/object/apply:os.mknod [{marker}]\n".encode(),
    }


def test_the_bombs_go_off(tmp_path):
    """Or the other tests here could not fail."""
    import yaml

    for number, (kind, read) in enumerate(
        {
            "pickle": pickle.loads,
            "torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
            "yaml": lambda data: yaml.load(data, yaml.UnsafeLoader),
        }.items()
    ):
        marker = tmp_path / f"{number}"
        _RESOLVED.clear()
        read(bombs(marker)[kind])
        assert marker.exists()
        assert _RESOLVED or kind == "yaml"
    assert zipfile.is_zipfile(io.BytesIO(bombs(tmp_path / "x")["torch"]))


def assert_one_line_or_fine(arguments, capfd):
    """Runs a command, which says in one line what is wrong, or needs nothing of what is there."""
    _RESOLVED.clear()
    status = polyad([str(word) for word in arguments])
    captured = capfd.readouterr()
    assert _RESOLVED == []
    errors = [line for line in captured.err.splitlines() if line.startswith("polyad: error")]
    assert "Traceback" not in captured.err
    assert (status, len(errors)) in {(0, 0), (2, 1)}, captured.err
    return status


def plant(path, content, *, in_manifest=False):
    path.write_bytes(content)
    folder = path.parent
    if in_manifest:  # by one who writes the manifest as well
        step = json.loads((folder / "manifest.json").read_text())["step"]
        names = [file for file in folder.iterdir() if file.name != "manifest.json"]
        files = {file.name: record_of(file.read_bytes()) for file in names}
        (folder / "manifest.json").write_bytes(render(step, files))


@pytest.mark.parametrize("in_manifest", [False, True], ids=["planted", "and in the manifest"])
def test_in_a_checkpoint(trained, tmp_path, marker, capfd, in_manifest):
    source = complete_checkpoints(trained("dense") / "checkpoints")[-1]
    names = sorted(path.name for path in source.iterdir())
    assert {"tokenizer.json", "config.yaml", "rank-00001.safetensors"} <= set(names)
    for number, name in enumerate(names):
        for kind, content in bombs(marker).items():
            folder = tmp_path / f"{number}-{kind}" / source.name
            shutil.copytree(source, folder)
            planted_in_manifest = in_manifest and name != "manifest.json"
            plant(folder / name, content, in_manifest=planted_in_manifest)
            out = tmp_path / f"{number}-{kind}" / "out"
            command = ["convert", folder, out, "--to", "safetensors"]
            status = assert_one_line_or_fine(command, capfd)
            with contextlib.suppress(CheckpointError):
                load_model(folder)
            assert status == 2, (name, kind)
            assert not marker.exists(), (name, kind)
            shutil.rmtree(folder.parent)


def test_in_the_data(prepared_path, tmp_path, marker, capfd):
    for name in sorted(path.name for path in prepared_path.iterdir() if path.is_file()):
        for kind, content in bombs(marker).items():
            data = tmp_path / "data"
            shutil.copytree(prepared_path, data)
            (data / name).write_bytes(content)
            config = write_config(tmp_path / "config.yaml", data)
            assert_one_line_or_fine(["validate", config], capfd)
            assert not marker.exists(), (name, kind)
            shutil.rmtree(data)


@pytest.mark.slow
def test_in_a_run_folder(trained, prepared_path, tmp_path, marker, capfd):
    source = trained("dense")
    names = [path.name for path in source.iterdir() if path.is_file()] + ["checkpoints/latest"]
    for name in names:
        for kind, content in bombs(marker).items():
            folder = tmp_path / "run"
            shutil.copytree(source, folder)
            (folder / name).write_bytes(content)
            config = write_config(tmp_path / "config.yaml", prepared_path)
            assert_one_line_or_fine(["validate", config], capfd)
            if name in ("metrics.jsonl", "config.yaml", "checkpoints/latest"):
                assert_one_line_or_fine(["report", folder, "--json", "-"], capfd)
            assert_one_line_or_fine(["checkpoint", "list", folder], capfd)
            assert not marker.exists(), (name, kind)
            shutil.rmtree(folder)


def test_in_a_configuration(tmp_path, marker, capfd):
    for kind, content in bombs(marker).items():
        (tmp_path / "config.yaml").write_bytes(content)
        command = ["validate", tmp_path / "config.yaml"]
        assert assert_one_line_or_fine(command, capfd) == 2, kind
    command = ["validate", ROOT / "configs/quickstart/gpt2.yaml", "--without-data"]
    value = f"!!python/object/apply:os.mknod [{marker}]"
    assert assert_one_line_or_fine([*command, f"model.vocab_size={value}"], capfd) == 2


def test_in_a_folder_of_transformers(trained, tmp_path, marker, capfd):
    convert(trained("dense"), tmp_path / "theirs", "huggingface")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    names += ["pytorch_model.bin", "model.safetensors.index.json", "modeling_gpt2.py"]
    for name in names:
        for kind, content in bombs(marker).items():
            folder = tmp_path / "planted"
            shutil.copytree(tmp_path / "theirs", folder)
            (folder / name).write_bytes(content)
            if name in (
                "pytorch_model.bin",
                "model.safetensors.index.json",
            ):  # else they are not read
                (folder / "model.safetensors").unlink()
            command = ["convert", folder, tmp_path / "out", "--to", "polyad"]
            status = assert_one_line_or_fine(command, capfd)
            assert status == 2 or name == "modeling_gpt2.py", (name, kind)
            assert not marker.exists(), (name, kind)
            shutil.rmtree(folder)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)


FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "dill.load", "dill.loads",
    "joblib.load", "marshal.loads", "marshal.load", "shelve.open", "eval", "exec", "compile",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "shutil.unpack_archive",
}  # fmt: skip


def dangers(source: str) -> list[str]:
    """Calls that read code or hand words to a shell."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        words = {word.arg: ast.unparse(word.value) for word in node.keywords}
        loader = words.get("Loader") or (ast.unparse(node.args[1]) if len(node.args) > 1 else "")
        if (
            name in FORBIDDEN
            or name.endswith((".extractall", ".extract"))
            or words.get("shell", "False") != "False"
            or words.get("allow_pickle", "False") != "False"
            or words.get("trust_remote_code", "False") != "False"
            or words.get("weights_only", "True") != "True"
            or (name == "yaml.load" and loader != "_Loader")
        ):
            result.append(f"{node.lineno}: {name}")
    return result


def test_no_source_asks_for_it():
    rooms = [path for room in ("model", "data", "parallel", "train", "launch")
             for path in (ROOT / room).rglob("*.py")]  # fmt: skip
    assert len(rooms) > 100
    result = {str(path.relative_to(ROOT)): dangers(path.read_text()) for path in rooms}
    assert {name: lines for name, lines in result.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)", "pickle.load(file)", "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)", "subprocess.run(words, shell=True)", "tar.extractall()",
        "AutoModel.from_pretrained(name, trust_remote_code=True)", "os.system(command)",
    ],
)  # fmt: skip
def test_that_check_finds(line):
    assert len(dangers(line)) == 1
