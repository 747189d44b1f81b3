"""A checkpoint carries its run's tokenizer, of whatever kind, and needs the data no more."""

import io
import json
import shutil

import pytest
import xxhash

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.train.evaluation.generate import Sampling, generate
from polyad.train.exchange.convert import convert
from polyad.train.tasks.vocabulary import need_tokenizer
from tests.helpers.runs import run, write_config

pytestmark = pytest.mark.distributed
KINDS = {"sentencepiece": "tokenizer.model", "words": "tokenizer.json"}


def sentencepiece_model(texts, path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = [line for text in texts for line in text.splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=600, minloglevel=2,
        byte_fallback=True,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(
    scope="module", params=[pytest.param("sentencepiece", marks=pytest.mark.slow), "words"]
)
def trained(request, workers, tmp_path_factory, texts):
    """The kind, the run's folder, what tokenized its data, and the data's bytes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = "words:900"
    if request.param == "sentencepiece":
        documents = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
        spec = sentencepiece_model(documents, folder / "any.model")
    prepare(str(texts), spec, folder / "data")
    config = write_config(folder / "config.yaml", folder / "data", train__steps=2)
    workers(1).run(run, config)
    tokenizer = PreparedData.open(folder / "data").tokenizer()
    content = (folder / "data" / KINDS[request.param]).read_bytes()
    (folder / "data").rename(folder / "elsewhere")
    return request.param, folder / "run", tokenizer, content


def test_its_file_is_the_data_s_and_the_manifest_lists_it(trained):
    kind, folder, _, content = trained
    checkpoint = find_checkpoint(folder)
    name = KINDS[kind]
    assert (checkpoint / name).read_bytes() == content
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert listed[name] == {"bytes": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    assert not set(KINDS.values()) - {name} & listed.keys()


def test_a_cut_file_is_refused_by_name(trained, tmp_path):
    kind, folder, _, content = trained
    shutil.copytree(find_checkpoint(folder), tmp_path / "step-00000002")
    (tmp_path / "step-00000002" / KINDS[kind]).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=KINDS[kind]):
        Checkpoint(tmp_path / "step-00000002")


def test_a_changed_file_is_refused_by_name_when_it_is_needed(trained, tmp_path, capfd):
    kind, folder, _, content = trained
    shutil.copytree(find_checkpoint(folder), tmp_path / "step-00000002")
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    (tmp_path / "step-00000002" / KINDS[kind]).write_bytes(changed)
    assert polyad(["generate", str(tmp_path / "step-00000002"), "--prompt", "x"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{KINDS[kind]}: damaged: its xxh3 differs" in line


def test_it_generates_away_from_its_data(trained, tmp_path):
    _, folder, tokenizer, _ = trained
    shutil.copytree(find_checkpoint(folder), tmp_path / "step-00000002")
    prompt = "import the"
    result, _ = generate(
        tmp_path / "step-00000002", prompt, max_tokens=8, sampling=Sampling(temperature=0)
    )
    assert result.prompt_ids == tokenizer.encode(prompt)
    whole = tokenizer.decode(result.prompt_ids + result.token_ids)
    assert whole == tokenizer.decode(result.prompt_ids) + result.text


def test_the_way_to_hugging_face_and_back_keeps_it(trained, tmp_path):
    kind, folder, tokenizer, content = trained
    there = convert(folder, tmp_path / "theirs", "huggingface")
    back = convert(tmp_path / "theirs", tmp_path / "ours", "polyad")
    assert KINDS[kind] in there["files"]
    assert (tmp_path / "theirs" / KINDS[kind]).read_bytes() == content
    assert KINDS[kind] in back["files"]
    again = need_tokenizer(Checkpoint(tmp_path / "ours"), None)
    assert again.fingerprint == tokenizer.fingerprint
    assert type(again) is type(tokenizer)


def test_lm_eval_reads_text_with_it(trained):
    pytest.importorskip("lm_eval")
    from polyad.train.evaluation.lm_eval import PolyadLM

    _, folder, tokenizer, _ = trained
    model = PolyadLM(str(folder))
    assert model.tok_encode("import the") == tokenizer.encode("import the")


@pytest.mark.slow
def test_a_mixture_s_checkpoint_has_it(workers, tmp_path, texts):
    documents = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    spec = sentencepiece_model(documents, tmp_path / "any.model")
    for name, lines in (("one", documents[:40]), ("two", documents[40:])):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
        prepare(str(tmp_path / f"{name}.jsonl"), spec, tmp_path / name)
    mixture = [{"path": str(tmp_path / name), "weight": 1} for name in ("one", "two")]
    changes = {"data__path": None, "data__mixture": mixture, "train__steps": 1}
    workers(1).run(run, write_config(tmp_path / "config.yaml", tmp_path, **changes))
    for name in ("one", "two"):
        shutil.rmtree(tmp_path / name)
    model = (tmp_path / "any.model").read_bytes()
    checkpoint = Checkpoint(find_checkpoint(tmp_path / "run"))
    assert need_tokenizer(checkpoint, None).file_bytes() == model
