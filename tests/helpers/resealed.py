"""A checkpoint whose manifest matches whatever is written into it, and the resulting errors."""

import copy
import itertools
import json
import math
import random
import shutil
from pathlib import Path

import xxhash

from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import render
from polyad.parallel.checkpoint.tensor_file import record_of
from tests.helpers.runs import newest

WEIGHT = "token_embedding.weight"


class Resealed:
    """A run whose only checkpoint is rewritten repeatedly."""

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


def without(tree, *path):
    for key in path[:-1]:
        tree = tree[key]
    del tree[path[-1]]


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
    """The error of a rejected command."""
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
