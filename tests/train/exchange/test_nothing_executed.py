"""Nothing that is read can run code: pickles and YAML objects are planted in every place."""

import ast
import contextlib
import io
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers.runs import reseal, write_config

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
    for kind, read in {
        "pickle": pickle.loads,
        "torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
        "yaml": lambda data: yaml.load(data, yaml.UnsafeLoader),
    }.items():
        marker = tmp_path / kind
        _RESOLVED.clear()
        read(bombs(marker)[kind])
        assert marker.exists()
        assert _RESOLVED or kind == "yaml"
    assert zipfile.is_zipfile(io.BytesIO(bombs(tmp_path / "x")["torch"]))


@pytest.fixture
def run(capfd):
    """Runs a command, which says in one line what is wrong, or needs nothing of what is there."""

    def status_of(*words):
        _RESOLVED.clear()
        status = polyad([str(word) for word in words])
        captured = capfd.readouterr()
        assert _RESOLVED == []
        errors = [line for line in captured.err.splitlines() if line.startswith("polyad: error")]
        assert "Traceback" not in captured.err
        assert (status, len(errors)) in {(0, 0), (2, 1)}, captured.err
        return status

    return status_of


def planted(source, names, tmp_path, marker):
    """Copies of a folder, each with a bomb in place of one of these files."""
    for name in names:
        for kind, content in bombs(marker).items():
            folder = tmp_path / f"{kind}-{Path(name).stem}" / source.name
            shutil.copytree(source, folder)
            (folder / name).write_bytes(content)
            yield name, folder
            assert not marker.exists(), (name, kind)
            shutil.rmtree(folder.parent)


@pytest.mark.parametrize("sealed", [False, True], ids=["planted", "and in the manifest"])
def test_in_a_checkpoint(trained, tmp_path, marker, run, sealed):
    source = complete_checkpoints(trained("dense") / "checkpoints")[-1]
    names = sorted(path.name for path in source.iterdir())
    assert {"tokenizer.json", "config.yaml", "rank-00001.safetensors"} <= set(names)
    for name, folder in planted(source, names, tmp_path, marker):
        if sealed and name != "manifest.json":
            reseal(folder)  # as one who writes the manifest as well
        assert run("convert", folder, folder.parent / "out", "--to", "safetensors") == 2, name
        with contextlib.suppress(CheckpointError):
            load_model(folder)


def test_in_the_data(prepared_path, tmp_path, marker, run):
    names = sorted(path.name for path in prepared_path.iterdir() if path.is_file())
    for _, data in planted(prepared_path, names, tmp_path, marker):
        run("validate", write_config(data.parent / "config.yaml", data))


@pytest.mark.slow
def test_in_a_run_folder(trained, prepared_path, tmp_path, marker, run):
    source = trained("dense")
    names = [path.name for path in source.iterdir() if path.is_file()] + ["checkpoints/latest"]
    for name, folder in planted(source, names, tmp_path, marker):
        run("validate", write_config(folder.parent / "config.yaml", prepared_path))
        if name in ("metrics.jsonl", "config.yaml", "checkpoints/latest"):
            run("report", folder, "--json", "-")
        run("checkpoint", "list", folder)


def test_in_a_configuration(tmp_path, marker, run):
    (tmp_path / "configs").mkdir()
    for name, folder in planted(tmp_path / "configs", ["config.yaml"], tmp_path, marker):
        assert run("validate", folder / name) == 2
    value = f"model.vocab_size=!!python/object/apply:os.mknod [{marker}]"
    assert run("validate", ROOT / "configs/quickstart/gpt2.yaml", "--without-data", value) == 2


def test_in_a_folder_of_transformers(trained, tmp_path, marker, run):
    convert(trained("dense"), tmp_path / "theirs", "huggingface")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    unread = ["pytorch_model.bin", "model.safetensors.index.json"]  # beside model.safetensors
    names += [*unread, "modeling_gpt2.py"]
    for name, folder in planted(tmp_path / "theirs", names, tmp_path, marker):
        if name in unread:
            (folder / "model.safetensors").unlink()
        status = run("convert", folder, folder.parent / "out", "--to", "polyad")
        assert status == 2 or name == "modeling_gpt2.py", name


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


DANGEROUS = """
torch.load(path); pickle.load(file); numpy.load(path, allow_pickle=True); os.system(command)
yaml.load(text, yaml.Loader); subprocess.run(words, shell=True); tar.extractall()
AutoModel.from_pretrained(name, trust_remote_code=True)
"""


def test_that_check_finds():
    assert len(dangers(DANGEROUS)) == 8
