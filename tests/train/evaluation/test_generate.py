"""Generation: with a cache and without, against transformers, windows, choice and streaming."""

import json
import shutil

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.train.errors import ConfigError
from polyad.train.evaluation.generate import (
    Sampling,
    TextStream,
    choose,
    generate_ids,
    probabilities,
)  # fmt: skip
from tests.helpers.decoders import write_tokenizer
from tests.helpers.everyday import everyday
from tests.helpers.generated import any_token, generated, uncached
from tests.helpers.random_model import random_model
from tests.helpers.reference import reference_of, save_reference

GREEDY = Sampling(temperature=0)
DENSE = {"kind": "dense"}


def small_model(dtype=torch.float32, feed_forward=DENSE, **sizes):
    return random_model(feed_forward, dtype, hidden_size=32, **{"sequence_length": 16} | sizes)


def ids_of(model, prompt, count=40, sampling=GREEDY, tokenizer=None, **options):
    tokenizer, options["sampling"] = tokenizer or any_token(), sampling
    return list(generate_ids(model, tokenizer, prompt, max_tokens=count, **options))


KINDS = [
    (torch.float32, DENSE),
    (torch.float64, DENSE),
    (torch.float64, {"kind": "mumoe", "factorization": "cp", "num_experts": [8]}),
    (torch.float32, {"kind": "mumoe", "factorization": "tr", "num_experts": [4, 3]}),
]


SAMPLINGS = [GREEDY, Sampling(seed=3), Sampling(temperature=1.5, top_p=0.9, seed=4)]
PROMPTS = [[3], [5, 6, 7, 8], list(range(15)), list(range(16)), [9] * 40]


@pytest.mark.parametrize(("dtype", "section"), KINDS)
@everyday("prompt", PROMPTS, keep=[[5, 6, 7, 8], [9] * 40])
@everyday("sampling", SAMPLINGS, keep=[Sampling(seed=3)])
def test_a_cache_changes_no_token(dtype, section, prompt, sampling):
    # 60 tokens of a window of 16: it slides several times.
    model = small_model(dtype, feed_forward=section)
    tokens = ids_of(model, prompt, 60, sampling)
    assert tokens == uncached(model, prompt, 60, sampling)
    assert len(tokens) == 60
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_windows_work(length):
    model = small_model(sequence_length=length)
    assert ids_of(model, [1, 2, 3], 9) == uncached(model, [1, 2, 3], 9, GREEDY)


def test_greedy_tokens_equal_transformers():
    model = small_model(sequence_length=64)
    reference, _ = reference_of(model)
    prompt = torch.tensor([[4, 8, 15, 16, 23, 42]])
    mask = torch.ones_like(prompt)
    expected = reference.eval().generate(
        prompt, attention_mask=mask, max_new_tokens=50, do_sample=False, eos_token_id=None
    )
    assert ids_of(model, prompt[0].tolist(), 50) == expected[0, 6:].tolist()


def test_it_ends_before_a_token_that_stops_it_and_never_chooses_beyond_the_vocabulary():
    model = small_model()
    tokens = ids_of(model, [3])
    stop = tokens[5]
    assert ids_of(model, [3], tokenizer=any_token(stop_ids=(stop,))) == tokens[: tokens.index(stop)]
    drawn = ids_of(model, [3], sampling=Sampling(temperature=9.0), tokenizer=any_token(7))
    assert max(drawn) < 7


def test_choice_follows_probability():
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()

    def shares(sampling):
        generator = torch.Generator().manual_seed(sampling.seed)
        drawn = [choose(logits, sampling, generator) for _ in range(4000)]
        return [drawn.count(token) / 4000 for token in range(4)]

    assert shares(Sampling()) == pytest.approx([0.3, 0.05, 0.5, 0.15], abs=0.03)
    # The first two make 0.8 >= 0.7.
    assert shares(Sampling(top_p=0.7)) == pytest.approx([0.375, 0, 0.625, 0], abs=0.03)
    assert shares(GREEDY) == [0, 0, 1, 0]
    assert shares(Sampling(temperature=1e-310)) == [0, 0, 1, 0]  # below what 1 / x has room for


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, [0, 0, 1, 0]),
        ({"top_k": 2}, [3 / 8, 0, 5 / 8, 0]),  # 0.3 and 0.5 of 0.8
        ({"top_k": 3}, [6 / 19, 0, 10 / 19, 3 / 19]),  # of 0.95
        ({"top_k": 10**30}, [0.3, 0.05, 0.5, 0.15]),
        ({"top_p": 1e-9}, [0, 0, 1, 0]),
        # Temperature first: the squares 0.09, 0.25 and 0.0225 of 0.3625, the fourth is left out.
        ({"top_k": 3, "temperature": 0.5}, [0.09 / 0.3625, 0, 0.25 / 0.3625, 0.0225 / 0.3625]),
        # Then top-k, then top-p of what it leaves. The first has 0.5 of all and 10/19 = 0.526 of
        # three: at 0.52 it is enough of three alone, of all the second one has to come along.
        ({"top_k": 3, "top_p": 0.52}, [0, 0, 1, 0]),
        ({"top_p": 0.52}, [3 / 8, 0, 5 / 8, 0]),
        # At 0.8 of three: 10/19 is not enough, 16/19 is.
        ({"top_k": 3, "top_p": 0.8}, [3 / 8, 0, 5 / 8, 0]),
        # Squares: the first has 0.25 of 0.365 = 0.685 of all, and 0.25 of 0.34 = 0.735 of two.
        ({"top_k": 2, "top_p": 0.7, "temperature": 0.5}, [0, 0, 1, 0]),
        ({"top_p": 0.7, "temperature": 0.5}, [0.09 / 0.34, 0, 0.25 / 0.34, 0]),
    ],
)
def test_temperature_top_k_and_top_p_work_in_this_order_by_hand(options, expected):
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15], dtype=torch.float64).log()
    assert probabilities(logits, Sampling(**options)).tolist() == pytest.approx(expected, abs=1e-12)


def test_of_equally_likely_tokens_exactly_k_are_left():
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert probabilities(logits, Sampling(top_k=2)).tolist() == [0, 0.5, 0.5, 0]


def test_a_seed_gives_the_same_tokens_whatever_was_drawn_before():
    model = small_model()
    first = ids_of(model, [3], sampling=Sampling(seed=5))
    torch.rand(7)
    assert ids_of(model, [3], sampling=Sampling(seed=5)) == first
    assert ids_of(model, [3], sampling=Sampling(seed=6)) != first


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, float("nan"))),
        ("top_k", (0, -3)),
        ("top_p", (0.0, 1.1)),
        ("seed", (-1,)),
    ],
)
def test_bad_numbers_are_refused(name, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: {value}"):
            Sampling(**{name: value})


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_weights_that_are_not_finite_choose_no_token(sampling):
    model = small_model()
    with torch.no_grad():
        next(model.parameters())[3, 0] = torch.nan
    with pytest.raises(ConfigError, match="a model of mine: its logits are not finite"):
        ids_of(model, [3], sampling=sampling, name="a model of mine")


def test_text_comes_in_whole_characters(prepared):
    tokenizer = prepared.tokenizer()
    text = "x = '漢字 🙂🙂'  # ünï\n\ndef"
    ids = tokenizer.encode(text)
    assert len(ids) > 10
    for cut in range(len(ids)):
        prompt = ids[:cut]
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        stream = TextStream(tokenizer, prompt)
        pieces = [stream.push(token) for token in ids[cut:]]
        assert "\ufffd" not in "".join(pieces)
        assert tokenizer.decode(prompt) + "".join(pieces) + stream.end() == text
    stream = TextStream(tokenizer, [])
    emoji = tokenizer.encode("🙂")
    assert [stream.push(token) for token in emoji[:-1]] == [""] * (len(emoji) - 1)
    assert "\ufffd" in stream.end()


@pytest.mark.distributed
def test_the_command_streams_text_that_equals_its_json(finished, capfd, tmp_path):
    command = ["generate", str(finished), "--prompt", "def f(", "--max-tokens", "60"]
    assert polyad([*command, "--json", "-", "--seed", "2"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["prompt"] == "def f("
    assert len(result["token_ids"]) == 60 or result["ended_by"] == "end_of_text"
    assert polyad([*command, "--seed", "2", "--json", str(tmp_path / "x.json")]) == 0
    captured = capfd.readouterr()
    assert captured.out == result["prompt"] + result["text"] + "\n"
    assert "tokens/s" in captured.err
    again = json.loads((tmp_path / "x.json").read_text())
    assert again["token_ids"] == result["token_ids"]
    assert polyad([*command, "--temperature", "2", "--top-k", "1", "--json", "-"]) == 0
    likeliest = json.loads(capfd.readouterr().out)
    assert (likeliest["top_k"], result["top_k"]) == (1, None)
    greedy = generated(finished, "def f(", max_tokens=60, sampling=GREEDY)
    assert likeliest["token_ids"] == greedy.token_ids


@pytest.mark.distributed
def test_an_empty_prompt_begins_a_document(finished, prepared):
    result = generated(finished, "", max_tokens=3, sampling=GREEDY)
    assert result.prompt_ids == [prepared.tokenizer().end_of_text_id]


@pytest.mark.distributed
def test_bad_input_is_one_line(finished, tmp_path, prepared_path, refused):
    theirs, tokenizer = tmp_path / "theirs", prepared_path / "tokenizer.json"
    save_reference(theirs, vocab_size=300)
    write_tokenizer(tmp_path)
    for folder, words, part in (
        (tmp_path / "none", (), "no such folder"),
        (finished, ("--top-p", 2), "--top-p: 2.0"),
        (finished, ("--max-tokens", 0), "at least 1"),
        (finished, ("--tokenizer", tmp_path / "none"), "no such tokenizer"),
        (finished, ("--tokenizer", tmp_path / "tokenizer.json"), "is not the one that"),
        (theirs, (), "name one with --tokenizer"),
        (theirs, ("--tokenizer", tokenizer), "the tokenizer has 400 tokens, the model 300"),
    ):
        assert part in refused("generate", folder, "--prompt", "x", *words)
    shutil.copy(tokenizer, theirs)
    for end, part in (('"<no>"', "'<no>'"), ("5", "to end a document, 5")):
        (theirs / "tokenizer_config.json").write_text(f'{{"eos_token": {end}}}')
        assert part in refused("generate", theirs, "--prompt", "x")
    with pytest.raises(ConfigError, match="UTF-8"):
        generated(finished, "\udcff", max_tokens=1)
