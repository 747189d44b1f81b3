"""Traces read without their model, and routes of inference servers as traces."""

import json

import numpy as np
import pandas as pd
import pytest

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as command
from polyad.train.measures.routes import TracedText, specialization_of_trace
from polyad.train.measures.trace import Trace
from tests.helpers.runs import both_forms, measured

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trace(trained, tmp_path_factory):
    """A run, and the trace of its whole validation split."""
    file = tmp_path_factory.mktemp("trace") / "trace.parquet"
    both_forms(trained("smoe"), Trace, output=file, tokens=10**6)
    return trained("smoe"), file


def test_counts_are_those_of_the_model(trace):
    run, file = trace
    wanted = measured(run, "specialize")[0]
    result = specialization_of_trace(file)
    assert result.facts["tokens_scored"] == wanted["tokens_scored"] > 1000
    assert "entropies" in result.facts["not_measured"]
    for name in ("labels", "counts"):
        frame, of_model = result.frames[name], pd.DataFrame(wanted[name])
        kept, of_kept = (each[each["by"] != "frequency"] for each in (frame, of_model))
        assert set(kept["by"]) == {"characters", "position"}
        pd.testing.assert_frame_equal(kept, of_kept, check_exact=False, rtol=1e-9)
    # The rarest are counted in what was traced, not in the whole split.
    assert set(result.frames["labels"]["by"]) == {"characters", "position", "frequency"}


def test_the_page_of_a_trace_has_the_experts_of_the_models_page(trace, tmp_path):
    run, file = trace
    pages = [tmp_path / "model.json", tmp_path / "trace.json"]
    for path, page in zip((run, file), pages, strict=True):
        words = ["report", path, "--tokens", 10**6, "--json", page, "--output"]
        assert command([*map(str, words), str(page.with_suffix(".html"))]) == 0
    of_model, of_trace = (json.loads(page.read_text())["experts"] for page in pages)
    shares = [
        {
            row["anchor"]: (pytest.approx(row["share"]), [c["token"] for c in row["top"]][:1])
            for row in rows
        }
        for rows in (of_model, of_trace)
    ]
    assert shares[0] == shares[1]
    assert any(tokens for _, tokens in shares[1].values())
    assert "trace.parquet" in pages[1].with_suffix(".html").read_text()


def routes(data):
    """Routes of 12 texts as a server returns them; the last token of a text was not read."""
    stream, generator = PreparedData.open(data).split("validation"), np.random.default_rng(0)
    rows = []
    for number in range(12):
        ids = stream.read(40 * number, 40 * number + 30 + number)
        experts = generator.permuted(np.tile(np.arange(6), (len(ids) - 1, 3, 1)), axis=-1)
        rows.append({"token_ids": ids.tolist(), "routed_experts": experts[..., :2].tolist()})
    return rows


@pytest.mark.parametrize("ending", ["json", "jsonl", "npy"])
def test_routes_of_a_server_become_a_trace(prepared_path, tmp_path, ending, capfd):
    rows, file = routes(prepared_path), tmp_path / f"routes.{ending}"
    if ending == "json":
        file.write_text(json.dumps(rows))
    elif ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows = rows[:1]
        np.save(file, np.array(rows[0]["routed_experts"]))
        np.save(tmp_path / "routes.tokens.npy", np.array(rows[0]["token_ids"]))
    output, tokenizer = tmp_path / "trace.parquet", str(prepared_path)
    words = ("--routes", file, "--output", output, "--tokenizer", tokenizer)
    assert command(["experts", "trace", *map(str, words)]) == 0
    frame = pd.read_parquet(output).set_index(["window", "position", "layer", "slot"])
    assert len(frame) == sum(6 * len(row["routed_experts"]) for row in rows)
    for window, row in enumerate(rows):
        for position, of_token in enumerate(row["routed_experts"]):
            at = frame.loc[(window, position)]
            assert at["expert"].tolist() == np.array(of_token).flatten().tolist()
            assert set(at["token_id"]) == {row["token_ids"][position]}
    assert command(["experts", "specialize", str(output)]) == 0
    assert "not_measured" in capfd.readouterr().out.replace(" ", "_")
    assert command(["report", str(output)]) == 0
    assert output.with_suffix(".html").stat().st_size > 10_000
    assert TracedText(output, None).rows == len(rows)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"token_ids": [1, 2], "routed_experts": [[0, 1]]}], "whole numbers [tokens, layers"),
        ([{"token_ids": [1, 2, 3], "routed_experts": [[[0]]]}], "3 token_ids and routes of 1"),
        ([{"token_ids": [1], "routed_experts": [[[-1]]]}], "from 0"),
        ([{"token_ids": [1], "routed_experts": [[[0.5]]]}], "whole numbers"),
        ([{"token_ids": [1]}], "routed_experts"),
        ([], "are no routes"),
    ],
)
def test_what_are_no_routes_is_refused(tmp_path, refused, rows, why):
    file = tmp_path / "routes.json"
    file.write_text(json.dumps(rows))
    words = ("experts", "trace", "--routes", file, "--output", tmp_path / "trace.parquet")
    assert why in refused(*words)
    assert not (tmp_path / "trace.parquet").exists()


def test_options_that_need_a_model_are_refused(trace, trained, tmp_path, refused):
    run, file = trace
    assert "either a checkpoint or --routes" in refused("experts", "trace", "--output", "a")
    assert "--layers: means nothing" in refused(
        *("experts", "trace", "--routes", file, "--output", "a", "--layers", "0")
    )
    assert "has no model" in refused("experts", "specialize", file, "--data", "x")
    assert "--knockout: is not allowed" in refused("report", file, "--knockout")
    assert "allowed with a trace alone" in refused("experts", "specialize", run, "--tokenizer", "a")
    shares = tmp_path / "shares.parquet"
    both_forms(trained("cp"), Trace, output=shares, tokens=64)
    assert "weight all experts" in refused("experts", "specialize", shares)
