"""Any configuration and any override is either valid or refused in one line, whatever is in it.

Whole command lines go through `polyad validate`, in this process: a fault of the program would be
status 1 and a traceback.
"""

import contextlib
import copy
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyad.launch.cli import run
from polyad.model.config import flatten
from polyad.train.config.run import RunConfig
from polyad.train.config.text import keys
from tests.helpers.runs import FEED_FORWARDS

BASE: dict[str, Any] = {
    "run": {"folder": "no-such-folder/run"},
    "model": {
        "kind": "gpt2", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50,
        "sequence_length": 32, "feed_forward": {"kind": "dense"},
    },
    "data": {"path": "no-such-data"},
    "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2},
}  # fmt: skip
KNOWN = sorted({*keys(RunConfig), *flatten(RunConfig.model_validate(BASE).model_dump(mode="json"))})
NUMBERS = [0, -1, 1, 2, 3, 7, 64, 10**6, 2**31, 2**63, 10**30, -(2**64)]
FLOATS = [0.0, -0.5, 1e-300, 0.1, 1.0, 1.5, 1e30, math.inf, -math.inf, math.nan]
WORDS = ["", "none", "warn", "auto", "block", "smoe", "mumoe", "dense", "adamw", "sgd", "gpt2", "~"]

scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(FLOATS),
    st.sampled_from(WORDS), st.integers(-3, 70), st.floats(allow_nan=True), st.text(max_size=8),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "path", "weight", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)
dotted = st.one_of(
    st.sampled_from(KNOWN),
    st.sampled_from(KNOWN).map(lambda key: key[:-1]),
    st.text(alphabet="abcdefghij_.0", min_size=1, max_size=12),
    st.sampled_from(["model.feed_forward.graph", "data.mixture.0.path", "data.mixture.x", "a.b.c"]),
)
DEFAULTS = flatten(RunConfig.model_validate(BASE).model_dump(mode="json"))


def alike(default: Any) -> st.SearchStrategy[Any]:
    """What may be meant in the place of a default."""
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(1, 8)
    if isinstance(default, float):
        return st.floats(0, 2)
    return st.sampled_from([None, "none", "warn", "auto", "adamw", "cosine", "bf16", 4])


plausible = st.sampled_from(sorted(DEFAULTS)).flatmap(
    lambda key: st.tuples(st.just(key), st.just(DEFAULTS[key]) | alike(DEFAULTS[key]))
)
as_yaml = values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())
overrides = st.lists(
    st.one_of(
        plausible.map(lambda pair: f"{pair[0]}={yaml.safe_dump(pair[1], default_flow_style=True)}"),
        st.tuples(dotted, as_yaml).map("=".join),
        st.tuples(dotted, st.text(max_size=10)).map("=".join),
        st.text(max_size=10).filter(lambda text: not text.startswith("-")),
    ),
    max_size=2,
)
changes = st.lists(plausible | st.tuples(dotted, values | st.just("DELETE")), max_size=3)


def changed(kind: str, edits: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = copy.deepcopy(BASE)
    tree["model"]["feed_forward"] = dict(FEED_FORWARDS[kind])
    for key, value in edits:
        *sections, last = key.split(".")
        place: Any = tree
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            if value == "DELETE":
                place.pop(last, None)
            else:
                place[last] = value
    return tree


def check(text: str | bytes, words: list[str], processes: int = 2) -> str:
    """Runs it; gives the one line, or nothing where it is valid."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        arguments = ["validate", str(path), "--without-data", "--processes", str(processes)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run([*arguments, "--json", f"{folder}/out.json", *words])
    said = err.getvalue()
    assert status in {0, 2}, f"status {status}: {said}"
    if status == 0:
        assert said == ""
        return ""
    assert said.startswith("polyad: error: "), said
    assert said.count("\n") == 1, said
    assert said.endswith("\n")
    assert len(said) < 700, said
    return said


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=examples < 1000, database=None,
    )  # fmt: skip


text_inputs = given(
    st.one_of(
        st.text(max_size=60),
        st.binary(max_size=40),
        st.lists(st.sampled_from(["a:", " ", "\n", "- ", "{", "}", "[", "&x ", "*x", "!!", "1"]))
        .map("".join),
    )
)  # fmt: skip


@fuzz(100)
@text_inputs
def test_any_text(text):
    check(text, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FEED_FORWARDS))
@fuzz(1000)
@given(changes, overrides)
def test_a_thousand_changed_configurations(kind, edits, words):
    check(yaml.safe_dump(changed(kind, edits)), words)


@pytest.mark.parametrize("kind", sorted(FEED_FORWARDS))
def test_the_base_is_valid(kind):
    assert check(yaml.safe_dump(changed(kind, [])), []) == ""
