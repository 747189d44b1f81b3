"""Checkpoints whose manifest vouches for nonsense: one line and status 2, from every command.

A manifest with right digests can be written by anyone, so what the small files say is checked by
itself. A change that harms nothing may pass, and then nothing else is read than before.
"""

import copy
import itertools
import json
import math
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
import xxhash

from launch.cli import run as polyad
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.checkpoint.contents import read_contents, verify_contents
from parallel.checkpoint.index import Chunk, Tensor
from parallel.checkpoint.manifest import record_of, render
from parallel.checkpoint.records import FormError, parsed
from parallel.checkpoint.state_file import State
from parallel.weights import load_model, open_checkpoint, open_weights
from parallel.zero import _state_fields
from tests.helpers.runs import FEED_FORWARDS, newest, write_config
from train.config.plan import plan_run
from train.loop.optimizer import OptimizerConfig, build_optimizer, state_tensors
from train.state import TrainState
from train.tasks.tokenizers import tokenizer_of

pytestmark = pytest.mark.distributed

WEIGHT = "token_embedding.weight"


class Resealed:
    """A run whose only checkpoint is rewritten again and again."""

    def __init__(self, run: Path, config: Path) -> None:
        self.run, self.config = run, config
        self.checkpoint = newest(run)
        for other in (run / "checkpoints").glob("step-*"):
            if other != self.checkpoint:
                shutil.rmtree(other)
        names = ("index.json", "state.json", "manifest.json")
        self.good = {name: json.loads((self.checkpoint / name).read_text()) for name in names}
        self._records = {
            path.name: record_of(path.read_bytes())
            for path in self.checkpoint.iterdir()
            if path.name != "manifest.json"
        }

    def write(self, name, content):
        """One file with other content; the others are as they were, the manifest fits all."""
        records = dict(self._records)
        for file in ("index.json", "state.json"):
            tree = content if file == name else self.good[file]
            data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
            (self.checkpoint / file).write_bytes(data)
            records[file] = record_of(data)
        manifest = render(self.good["manifest.json"]["step"], records)
        if name == "manifest.json":
            body = json.dumps(content, indent=1)[:-2].encode()
            manifest = body + f',\n "xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()
        (self.checkpoint / "manifest.json").write_bytes(manifest)


@pytest.fixture
def resealed(trained, prepared_path, tmp_path):
    shutil.copytree(trained("smoe"), tmp_path / "run")
    changes = {"model__feed_forward": FEED_FORWARDS["smoe"]}
    config = write_config(tmp_path / "config.yaml", prepared_path, **changes)
    return Resealed(tmp_path / "run", config)


def chunk(tree, **values):
    tree["tensors"][WEIGHT]["master"]["chunks"][0] |= values


def tensor(tree, field="master", **values):
    tree["tensors"][WEIGHT][field] |= values


def twice(tree):
    """A box a second time in place of another one, so that a part of the tensor is nowhere."""
    chunks = max(
        (fields["exp_avg"]["chunks"] for fields in tree["tensors"].values() if "exp_avg" in fields),
        key=len,
    )
    small = min(chunks, key=lambda each: math.prod(each["size"]))
    chunks.insert(0, small)
    chunks.remove(max(chunks, key=lambda each: math.prod(each["size"])))


def shrunk(tree):
    """A smaller tensor, consistent in itself and with nothing else."""
    about = tree["tensors"][WEIGHT]["master"]
    tensor(tree, shape=[1, 32], chunks=[about["chunks"][0] | {"offset": [0, 0], "size": [1, 32]}])


def without(tree, *path):
    for key in path[:-1]:
        tree = tree[key]
    del tree[path[-1]]


INDEX = {
    "outside": lambda tree: chunk(tree, file="../../x.safetensors"),
    "absolute": lambda tree: chunk(tree, file="/tmp/x.safetensors"),
    "passwd": lambda tree: chunk(tree, file="/etc/passwd"),
    "another file": lambda tree: chunk(tree, file="config.yaml"),
    "no such file": lambda tree: chunk(tree, file="rank-00007.safetensors"),
    "control": lambda tree: chunk(tree, file="\x1b[2J\n\0"),
    "another shard": lambda tree: chunk(tree, file="rank-00001.safetensors"),
    "before": lambda tree: chunk(tree, begin=-1),
    "text": lambda tree: chunk(tree, begin="5"),
    "shifted": lambda tree: chunk(
        tree, begin=tree["tensors"][WEIGHT]["master"]["chunks"][0]["begin"] + 4
    ),
    "behind": lambda tree: chunk(tree, begin=10**15),
    "huge size": lambda tree: chunk(tree, size=[10**12, 10**12]),
    "huge shape": lambda tree: tensor(tree, shape=[2**62, 2**62]),
    "axes": lambda tree: chunk(tree, size=[400, 32, 1]),
    "twice": twice,
    "shrunk": shrunk,
    "no digest": lambda tree: without(
        tree, "tensors", WEIGHT, "master", "chunks", 0, "xxh3"
    ),
    "no tensors": lambda tree: tree.update(tensors=[]),
    "empty": lambda tree: tree.update(tensors={}),
    "F8": lambda tree: tensor(tree, dtype="F8"),
    "U8": lambda tree: tensor(tree, dtype="U8"),
    "no chunks": lambda tree: tensor(tree, chunks=[]),
    "chunks null": lambda tree: tensor(tree, chunks=None),
    "step": lambda tree: chunk(tree, step=-1.0),
    "steps": lambda tree: chunk(tree, step=5.0),
    "missing weight": lambda tree: without(tree, "tensors", WEIGHT),
    "missing buffer": lambda tree: [
        without(tree, "tensors", name)
        for name, fields in list(tree["tensors"].items())
        if "buffer" in fields
    ],
    "unknown key": lambda tree: tree.update(more=1),
}  # fmt: skip
STATE = {
    "step text": lambda tree: tree.update(step="x"),
    "step differs": lambda tree: tree.update(step=5),
    "tokens null": lambda tree: tree.update(tokens=None),
    "bool": lambda tree: tree.update(samples=True),
    "negative": lambda tree: tree.update(seconds=-1.0),
    "norm": lambda tree: tree.update(recent_losses=[1.0], recent_grad_norms=[0.0]),
    "lengths": lambda tree: tree.update(recent_losses=[1.0], recent_grad_norms=[]),
    "left out": lambda tree: tree.update(left_out=["x"]),
    "unfinished": lambda tree: tree.update(unfinished={"step": 6}),
    "time": lambda tree: tree.update(saved_at=1e300),
    "fingerprint": lambda tree: tree.update(tokenizer_fingerprint=5),
    "versions": lambda tree: tree.update(versions={"torch": None}),
}
MANIFEST = {
    "name": lambda tree: tree["files"].update({"../x": tree["files"]["index.json"]}),
    "bytes": lambda tree: tree["files"]["index.json"].update(bytes=-1),
    "no digests": lambda tree: tree["files"]["rank-00000.safetensors"].update(xxh3=[]),
    "digest": lambda tree: tree["files"]["index.json"].update(xxh3=[5]),
    "step": lambda tree: tree.update(step=2.5),
    "another step": lambda tree: tree.update(step=3),
    "block": lambda tree: tree.update(block_bytes="1"),
    "version": lambda tree: tree.update(version=True),
}
TABLE = [
    (name, what, change)
    for name, changes in (("index", INDEX), ("state", STATE), ("manifest", MANIFEST))
    for what, change in changes.items()
]
RESUME_ALONE = {
    "missing moments": ("index", lambda tree: without(tree, "tensors", WEIGHT, "exp_avg")),
    "random state": ("index", lambda tree: tree["tensors"]["rank-00000.torch"]["random"].update(
        shape=[0], chunks=tree["tensors"]["rank-00000.torch"]["random"]["chunks"])),
    "steps to come": ("index", lambda tree: [
        each.update(step=7.0)
        for field in ("master", "exp_avg", "exp_avg_sq")
        for each in tree["tensors"][WEIGHT][field]["chunks"]]),
    "no samples": ("state", lambda tree: without(tree, "samples")),
}  # fmt: skip


def changed(resealed, name, change):
    tree = copy.deepcopy(resealed.good[f"{name}.json"])
    if name == "manifest":
        without(tree, "xxh3")
    change(tree)
    resealed.write(f"{name}.json", tree)


def commands(resealed):
    return {
        "validate": ["validate", resealed.config],
        "train": ["train", resealed.config],
        "evaluate": ["evaluate", resealed.run],
        "generate": ["generate", resealed.run, "--prompt", "x"],
        "report": ["report", resealed.run],
        "convert": ["convert", resealed.run, resealed.run.parent / "out", "--to", "safetensors"],
        "verify": ["checkpoint", "verify", resealed.run],
    }


def said(arguments, capfd):
    """What a command says that is refused."""
    status = polyad([str(word) for word in arguments])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    assert status == 2, (captured.out, captured.err)
    if arguments[0] == "checkpoint":
        (line,) = [line for line in captured.out.splitlines() if "damaged: " in line]
        return line
    (line,) = [line for line in captured.err.splitlines() if "polyad: error: " in line]
    assert line.isprintable()
    assert len(line) < 700
    return line.removeprefix("polyad: error: ")


def test_every_command_refuses_a_table_of_nonsense_in_one_line(resealed, capfd):
    refused_by_config = {"missing weight", "missing buffer", "shrunk"}
    for name, what, change in TABLE:
        changed(resealed, name, change)
        lines = {}
        for command, arguments in commands(resealed).items():
            if command == "verify" and what in refused_by_config - {"shrunk"}:
                continue  # whole in itself, and of another model
            lines[command] = said(arguments, capfd)
        assert lines["validate"] == lines["train"], what
        path = str(resealed.checkpoint)
        assert all(line.startswith(path) for line in lines.values()), (what, lines)


def test_what_only_a_run_needs_is_refused_by_validate_as_by_train(resealed, capfd):
    for what, (name, change) in RESUME_ALONE.items():
        changed(resealed, name, change)
        lines = [said(commands(resealed)[each], capfd) for each in ("validate", "train")]
        assert lines[0] == lines[1], what


def test_a_digest_that_is_another_is_found_where_the_bytes_are_read(resealed, capfd):
    changed(resealed, "index", lambda tree: chunk(tree, xxh3="0" * 16))
    for command in ("evaluate", "generate", "verify", "convert"):
        assert "the xxh3 of the chunk at byte" in said(commands(resealed)[command], capfd)


def test_symbolic_links_that_leave_the_folder_are_refused(resealed, tmp_path, capfd):
    for name in ("rank-00000.safetensors", "index.json", "tokenizer.json", "manifest.json"):
        path, outside = resealed.checkpoint / name, tmp_path / name
        path.rename(outside)
        path.symlink_to(outside)
        for arguments in commands(resealed).values():
            assert f"{name}: damaged: is a symbolic link that leaves" in said(arguments, capfd)
        path.unlink()
        outside.rename(path)
    # One that stays inside, and the user's own on the way to the folder.
    path = resealed.checkpoint / "rank-00000.safetensors"
    shutil.copytree(resealed.checkpoint, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert torch.equal(weight(tmp_path / "link"), weight(resealed.checkpoint))
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "leaves the folder" in said(commands(resealed)["verify"], capfd)


def weight(folder):
    return Checkpoint(folder).whole(WEIGHT)


VALUES = [
    None, True, -1, 0, 1, 1.5, -0.5, 2**31, 2**63, 10**30, 1e300, math.nan, math.inf, "", "x",
    "..", "../x.safetensors", "/etc/passwd", "\x1b[2J", [], [[]], [0], [-1, 0], [2**62, 2**62],
    {}, {"": 0},
]  # fmt: skip


def places(tree, path=()):
    """Every place of a JSON value, containers among them."""
    yield path
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield from places(tree[key], (*path, key))


def mutations(tree, seed, count):
    """Some of: each place replaced by each value, deleted, or given one key or item more."""
    found = [path for path in places(tree) if path]
    kinds = [*(("set", value) for value in VALUES), ("delete", None), ("add", 7)]
    every = list(itertools.product(found, kinds))
    random.Random(seed).shuffle(every)
    for path, (kind, value) in every[:count]:
        changed_tree = copy.deepcopy(tree)
        parent = changed_tree
        for key in path[:-1]:
            parent = parent[key]
        if kind == "set":
            parent[path[-1]] = value
        elif kind == "delete":
            del parent[path[-1]]
        elif isinstance(parent[path[-1]], dict):
            parent[path[-1]]["more"] = value
        elif isinstance(parent[path[-1]], list):
            parent[path[-1]].append(value)
        yield f"{'.'.join(map(str, path))[-80:]}: {kind} {value!r:.40}", changed_tree


def outcome(work):
    """None, or the line of an error that a user is given."""
    try:
        work()
    except ValueError as error:
        if getattr(error, "exit_status", None) != 2:
            raise
        line = " ".join(str(error).split())
    else:
        return None
    assert len(line) < 700, line
    return line


def everything(folder):
    """All tensors that a run that goes on would take."""
    checkpoint = Checkpoint(folder)
    return {
        (name, field): checkpoint.whole(name, field)
        for name, fields in checkpoint.tensors.items()
        for field in fields
    }


def fuzz(resealed, count):
    few = {WEIGHT, "blocks.0.attention_norm.bias", "rank-00000.torch"}
    few |= {name for name, f in resealed.good["index.json"]["tensors"].items() if "buffer" in f}
    before, refused, passed = everything(resealed.checkpoint), 0, 0
    for name in ("index.json", "state.json", "manifest.json"):
        tree = resealed.good[name]
        part = copy.deepcopy(tree)
        if name == "index.json":  # a few tensors of each kind; the others stay as they are
            part["tensors"] = {key: part["tensors"][key] for key in sorted(few)}
        if name == "manifest.json":
            del part["xxh3"]
        for what, mutated in mutations(part, name, count):
            if name == "index.json" and isinstance(mutated.get("tensors"), dict):
                mutated["tensors"] = {
                    key: value for key, value in tree["tensors"].items() if key not in few
                } | mutated["tensors"]
            resealed.write(name, mutated)
            opened = outcome(lambda: read_contents(resealed.checkpoint))
            if opened is not None:
                assert opened.startswith(str(resealed.checkpoint)), (name, what, opened)
                refused += 1
                if refused % 5 == 0:  # it takes most of the time
                    planned = outcome(lambda: plan_run(resealed.config, [], 1))
                    assert planned is not None, (name, what)
                continue
            planned = outcome(lambda: plan_run(resealed.config, [], 1))
            passed += 1
            verified = outcome(lambda: verify_contents(resealed.checkpoint))
            found = {}
            read = outcome(lambda found=found: found.update(everything(resealed.checkpoint)))
            assert (verified is None) == (read is None), (name, what)
            for key, value in found.items():
                assert torch.equal(value, before[key]), (name, what, key)
            if planned is None and read is None:
                state = plan_run(resealed.config, [], 1)
                assert state.start_state(state.resume, state.task.kept()).step == 6, (name, what)
    return refused, passed


def test_no_mutation_of_a_field_is_believed(resealed):
    refused, passed = fuzz(resealed, 50)
    assert refused > 80
    assert passed < refused


@pytest.mark.slow
def test_no_mutation_of_many_is_believed(resealed):
    refused, _ = fuzz(resealed, 500)
    assert refused > 1000


def test_json_that_is_none_is_refused(resealed):
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"null"):
        for name in ("index.json", "state.json"):
            resealed.write(name, content)
            line = outcome(lambda: open_checkpoint(resealed.run))
            assert line.startswith(f"{resealed.checkpoint / name}: damaged: "), line


def test_boxes_of_a_tensor_cover_it_once():
    def tiles(shape, *boxes):
        chunks = [
            Chunk(offset=offset, size=size, step=0.0, file="f", begin=0) for offset, size in boxes
        ]
        return outcome_of(lambda: Tensor(shape=shape, dtype="F32", chunks=tuple(chunks)))

    def outcome_of(work):
        try:
            work()
        except ValueError as error:
            return str(error)
        return None

    assert tiles((2, 3), ((0, 0), (1, 3)), ((1, 0), (1, 3))) is None
    assert tiles((2, 3), ((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2))) is None
    assert tiles((), ((), ())) is None
    assert tiles((0, 4), ((0, 0), (0, 4))) is None
    assert "exactly once" in tiles((2, 3), ((0, 0), (1, 3)), ((0, 0), (1, 3)))
    assert "exactly once" in tiles((2, 3), ((0, 0), (1, 3)))
    assert "exactly once" in tiles((2, 2), ((0, 0), (2, 1)), ((1, 0), (1, 2)))
    assert "exactly once" in tiles((), ((), ()), ((), ()))
    assert "not inside" in tiles((2, 3), ((1, 0), (2, 3)))
    # As many rows as processes have, and as many columns: neither takes long.
    many = 20_000
    started = time.monotonic()
    assert tiles((many, 2), *(((n, 0), (1, 2)) for n in range(many))) is None
    assert tiles((1, many), *(((0, n), (1, 1)) for n in range(many))) is None
    columns = [((0, n), (many, 1)) for n in range(many)]
    rows = [((many + n, 0), (1, many)) for n in range(many)]
    tiles((2 * many, many), *columns, *rows)
    assert time.monotonic() - started < 60


def test_a_state_is_what_the_loop_writes():
    """Names, and values of every kind, come through; what is not known is left to newer ones."""
    state = TrainState(
        step=7, recent_losses=[2.5], recent_grad_norms=[0.5], left_out=[3], first_loss=math.nan,
        versions={"torch": "2"}, end_of_text="<eos>", unfinished={
            "step": 7, "loss": math.nan, "grad_norm": math.inf, "learning_rate": 1e-3,
            "step_seconds": 0.1, "mfu": None, "skipped": False, "skipped_steps": 0,
            "tokens_per_second": 5.0, "tokens": 9, "routing/load_max": 1.5,
            "routing/blocks.0/load": [0.5, 0.5], "spike": {"step": 7},
        },
    )  # fmt: skip
    assert (
        State.model_fields.keys() - {"saved_at", "tokens"} == TrainState.__dataclass_fields__.keys()
    )
    content = json.dumps(state.to_json() | {"of_a_newer_version": 1}).encode()
    back = TrainState.from_json(parsed(State, content).model_dump())
    back.versions = state.versions
    assert repr(back) == repr(state)
    for key, value in (("routing/load_max", [1.0]), ("routing/x/y", ["a"]), ("loss", "x")):
        bad = state.to_json() | {"unfinished": state.unfinished | {key: value}}
        with pytest.raises(FormError):
            parsed(State, json.dumps(bad).encode())


def test_what_an_optimizer_keeps_is_known_without_it():
    for config in (
        OptimizerConfig(), OptimizerConfig(kind="sgd"), OptimizerConfig(kind="sgd", momentum=0.9),
    ):  # fmt: skip
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = build_optimizer(config, [("weight", parameter, 1)])
        assert state_tensors(config) == _state_fields(optimizer)


@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_links_out_of_a_folder_of_weights_are_refused(exported, plain, tmp_path, capfd, kind):
    folder = tmp_path / "folder"
    shutil.copytree(exported if kind == "theirs" else plain("dense"), folder)
    for path in sorted(folder.iterdir()):
        outside = tmp_path / path.name
        path.rename(outside)
        path.symlink_to(outside)
        line = said(["generate", folder, "--prompt", "x"], capfd)
        assert line.startswith(f"{path}: is a symbolic link that leaves the folder"), line
        path.unlink()
        outside.rename(path)


def test_a_snapshot_of_the_hub_is_made_of_links(exported, tmp_path):
    """`snapshots/REVISION` holds links to `blobs` beside it, and nowhere else."""
    repository = tmp_path / "models--gpt2"
    snapshot = repository / "snapshots" / "607a30d"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(exported.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    expected = dict(load_model(exported).named_parameters())
    for name, value in load_model(snapshot).named_parameters():
        assert torch.equal(value, expected[name])


def test_mutations_of_a_folder_of_transformers_are_refused_or_harmless(exported, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text())
    index = {"metadata": {"total_size": 1}, "weight_map": {"transformer.wte.weight": "x"}}
    index["weight_map"]["transformer.wte.weight"] = "model.safetensors"
    about = json.loads((folder / "tokenizer_config.json").read_text())
    good = {
        "config.json": config,
        "model.safetensors.index.json": index,
        "tokenizer_config.json": about,
    }
    expected = load_model(exported).state_dict()

    def opened():
        weights = open_weights(folder)
        tokenizer_of(weights)
        assert torch.equal(weights.whole(WEIGHT), expected[WEIGHT])

    refused = 0
    for name, tree in good.items():
        for _, mutated in mutations(tree, name, 80):
            (folder / name).write_text(json.dumps(mutated))
            refused += outcome(opened) is not None
        (folder / name).write_text(json.dumps(tree))
    assert refused > 40
