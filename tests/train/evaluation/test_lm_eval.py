"""lm-eval on a checkpoint: its requests against transformers, and whole tasks on local data."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyad.parallel.weights import load_model
from polyad.train.errors import ConfigError
from polyad.train.evaluation.lm_eval import PolyadLM
from tests.helpers.bert import their_bert
from tests.helpers.prepared import jsonl

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def reference(exported):
    model = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(exported, local_files_only=True)


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=number)
        for number, given in enumerate(arguments)
    ]


def scored(model, kind, *arguments):
    return getattr(model, kind)(requests(kind, *arguments), disable_tqdm=True)


def log_likelihood(model, context, continuation):
    """Token by token, each with as many of the 32 tokens before it as its window has."""
    ids, total, greedy = context + continuation, 0.0, True
    for number in range(len(continuation)):
        # The window that scores it: windows of 32 targets, the last one moved back.
        stop = min(len(continuation), (number // 32 + 1) * 32) + len(context)
        position = len(context) + number
        begin = max(0, stop - 33)
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:position]])).logits[0, -1].double()
        total += logits.log_softmax(-1)[ids[position]].item()
        greedy &= int(logits.argmax()) == ids[position]
    return total, greedy


TEXTS = [
    ("def f(x):", " return x"),
    ("import os\n", "import sys\n" * 3),
    ("", "class A:"),
    ("x " * 60, "= 1"),  # a context longer than the window
    ("a", " b" * 50),  # a continuation longer than the window
    ("trailing space ", "moves over"),
]


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("dense", 1), ("dense", 4), ("smoe", 4), ("cp", 4), ("tr", 3)]
)
def test_log_likelihoods_equal_transformers(trained, reference, kind, batch_size):
    model, (theirs, tokenizer) = PolyadLM(str(trained(kind)), batch_size=batch_size), reference
    if kind != "dense":  # what transformers does not have: our model, a token at a time
        theirs = load_model(trained(kind))
    answers = scored(model, "loglikelihood", *TEXTS)
    for (context, continuation), (total, greedy) in zip(TEXTS, answers, strict=True):
        whole = tokenizer(context + continuation)["input_ids"]
        first = tokenizer(context.rstrip())["input_ids"]
        behind = whole[len(first) :]
        expected = log_likelihood(theirs, first or [tokenizer.eos_token_id], behind)
        assert total == pytest.approx(expected[0], abs=1e-3, rel=1e-5)
        assert greedy == expected[1]
    texts = [("x",), ("import os\n" * 40,)]
    for total, (text,) in zip(scored(model, "loglikelihood_rolling", *texts), texts, strict=True):
        ids = tokenizer(text)["input_ids"]
        expected, _ = log_likelihood(theirs, [tokenizer.eos_token_id], ids)
        assert total == pytest.approx(expected, abs=1e-3, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_there_is_always_a_context_and_something_to_score(finished, reference, batch_size):
    model = PolyadLM(str(finished), batch_size=batch_size)
    encode, end = model.tok_encode, model.eot_token_id
    assert len(encode("in")) == len(encode("i")) == 1  # lm-eval leaves nothing of "n"
    cases = {
        (" ", "x"): ([end], encode(" x")),
        ("\n \n", "x"): ([end], encode("\n \nx")),
        ("i", "n"): (encode("i"), encode("n")),
    }
    answers = scored(model, "loglikelihood", *cases)
    for (total, greedy), (context, continuation) in zip(answers, cases.values(), strict=True):
        expected = log_likelihood(reference[0], context, continuation)
        assert total == pytest.approx(expected[0], abs=1e-3, rel=1e-5)
        assert greedy == expected[1]


def test_everything_equals_lm_evals_own_hugging_face_model(finished, exported):
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(exported), device="cpu", batch_size=2, max_length=32)
    ours = PolyadLM(str(finished), batch_size=2)
    texts = [pair for pair in TEXTS if len(pair[1]) < 60]  # theirs refuses longer ones
    expected = theirs.loglikelihood(requests("loglikelihood", *texts))
    for a, b in zip(ours.loglikelihood(requests("loglikelihood", *texts)), expected, strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-3, rel=1e-5)
        assert a[1] == b[1]
    long = requests("loglikelihood_rolling", ("import os\n" * 40,), ("x",))
    expected = theirs.loglikelihood_rolling(long)
    assert ours.loglikelihood_rolling(long) == pytest.approx(expected, abs=1e-3, rel=1e-5)
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    request = requests("generate_until", ("def f(x):\n", options), ("import os\n" * 9, options))
    assert ours.generate_until(request) == theirs.generate_until(request)


def test_generation_ends_before_the_first_mark_and_within_its_length(finished):
    model = PolyadLM(str(finished))

    def say(**options):
        return scored(model, "generate_until", ("import ", options))[0]

    free = say(max_gen_toks=20)
    assert free
    mark = free[len(free) // 2]
    assert say(max_gen_toks=20, until=[mark, "never"]) == free[: free.index(mark)]
    assert say(max_gen_toks=20, until=mark) == free[: free.index(mark)]
    assert free.startswith(say(max_new_tokens=5))
    assert say(max_gen_toks=20, temperature=0.9, do_sample=False) == free
    assert say(max_gen_toks=20, temperature=None, top_p=None, until=None) == free
    assert say(max_gen_toks=20, do_sample=True, temperature=2.0, top_p=0.99) != free


def test_bad_arguments_are_refused(finished, tmp_path):
    their_bert("BertForMaskedLM").save_pretrained(tmp_path)
    for arguments, part in (
        ({"batch_size": "many"}, "batch_size: 'many'"),
        ({"precision": "fp16"}, "precision: 'fp16' is not allowed: fp32, bf16"),
        ({"checkpoint": "nowhere"}, "nowhere: there is no such folder"),
        ({"checkpoint": str(tmp_path)}, r"model\.kind: bert"),
    ):
        with pytest.raises(ValueError, match=part) as caught:
            PolyadLM(**{"checkpoint": str(finished)} | arguments)
        assert caught.value.exit_status == 2
    model = PolyadLM(str(finished))
    for options, part in (
        ({"num_beams": 4}, "num_beams: 4"),
        ({"max_gen_toks": "x"}, "max_gen_toks': 'x'"),
        ({"temperature": [1]}, r"temperature': \[1\]"),
    ):
        with pytest.raises(ConfigError, match=part):
            scored(model, "generate_until", ("x", options))


def test_the_harness_runs_a_task_offline(finished, tmp_path, reference):
    (model, tokenizer), texts = reference, ["import os\n", "x = 1\n" * 30]
    jsonl(tmp_path / "rows.jsonl", texts)
    task = {
        "task": "polyad_rolling", "output_type": "loglikelihood_rolling",
        "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    (tmp_path / "rolling.yaml").write_text(yaml.safe_dump(task))
    command = [
        sys.executable, "-m", "polyad.train.evaluation.lm_eval", "--model", "polyad",
        "--model_args", f"checkpoint={finished}", "--include_path", str(tmp_path),
        "--tasks", "polyad_rolling", "--batch_size", "2",
        "--output_path", str(tmp_path / "results"),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | offline
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    nats = bytes_ = 0.0
    for text in texts:
        nats -= log_likelihood(model, [tokenizer.eos_token_id], tokenizer(text)["input_ids"])[0]
        bytes_ += len(text.encode())
    bits = results["polyad_rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / math.log(2) / bytes_, rel=1e-5)


def test_the_registry_has_polyad_beside_lm_evals_own():
    assert get_model("polyad") is PolyadLM
    assert get_model("dummy").__name__ == "DummyLM"
