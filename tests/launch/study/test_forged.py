"""Results that somebody changed by hand, or forged: shown, or refused in one line."""

import copy
import json
import random
from pathlib import Path

from polyad.launch.cli import run as polyad
from tests.helpers.everyday import everyday

KEPT = sorted(Path("configs/studies/results").glob("*.json"))
OTHERS = [None, True, -1, 10**30, 1e308, "x", "", [], ["x"], {}, {"x": 1}, [[None]], "<b>&"]


def places(tree, path=()):
    """Every place in a tree of JSON."""
    yield path
    items = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else items:
        yield from places(value, (*path, key))


def with_other(tree, path, value):
    if not path:
        return value
    changed = copy.deepcopy(tree)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is KeyError and isinstance(place, dict):
        del place[path[-1]]
    else:
        place[path[-1]] = None if value is KeyError else value
    return changed


@everyday("kept", KEPT, keep=KEPT[:1], ids=lambda path: path.stem)
def test_a_forged_result_is_one_line(tmp_path, capfd, kept):
    tree = json.loads(kept.read_text())
    everywhere = list(places(tree))
    rng, forged = random.Random(3), tmp_path / "forged.json"
    for _ in range(60):
        path = rng.choice(everywhere[:400] if rng.random() < 0.5 else everywhere)
        value = rng.choice([*OTHERS, KeyError])
        forged.write_text(json.dumps(with_other(tree, path, value)))
        status = polyad(["study", str(forged), "--page", str(tmp_path / "page.html")])
        said = capfd.readouterr().err
        assert status in (0, 2), (path, value, said)
        assert len(said.splitlines()) == (status == 2), (path, value, said)
        assert len(said) < 600, (path, value, said)


def test_what_is_no_result_is_one_line(tmp_path, capfd):
    forged = tmp_path / "results.json"
    for content in (b"", b"{", b"[" * 100_000, b'{"study":' * 5000, b"\xff", b"[]", b"1" * 5000):
        forged.write_bytes(content)
        assert polyad(["study", str(forged)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"polyad: error: {forged}")
        assert len(line) < 600
