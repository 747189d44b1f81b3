"""A checkpoint carries its run's tokenizer, of whatever kind, and needs the data no more."""

import json
import shutil

import pytest

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.train.evaluation.generate import Sampling
from polyad.train.exchange.convert import convert
from polyad.train.tasks.vocabulary import need_tokenizer
from tests.helpers.generated import generated
from tests.helpers.prepared import sentencepiece_model

pytestmark = pytest.mark.distributed
KINDS = {"sentencepiece": "tokenizer.model", "words": "tokenizer.json"}


@pytest.fixture(
    scope="module", params=[pytest.param("sentencepiece", marks=pytest.mark.slow), "words"]
)
def trained(request, run_of, tmp_path_factory, texts):
    """The kind, the run's folder, what tokenized its data, and the data's bytes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    spec = "words:900"
    if request.param == "sentencepiece":
        pytest.importorskip("sentencepiece")
        documents = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
        (folder / "any.model").write_bytes(sentencepiece_model("\n".join(documents)))
        spec = str(folder / "any.model")
    prepare(str(texts), spec, folder / "data")
    run = run_of(data__path=str(folder / "data"), train__steps=2)
    tokenizer = PreparedData.open(folder / "data").tokenizer()
    content = (folder / "data" / KINDS[request.param]).read_bytes()
    (folder / "data").rename(folder / "elsewhere")
    return request.param, run, tokenizer, content


def test_its_file_is_the_data_s_and_the_way_to_hugging_face_and_back_keeps_it(trained, tmp_path):
    kind, folder, tokenizer, content = trained
    name, checkpoint = KINDS[kind], find_checkpoint(folder)
    assert (checkpoint / name).read_bytes() == content
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert listed.keys() & KINDS.values() == {name}
    convert(folder, tmp_path / "theirs", "huggingface")
    convert(tmp_path / "theirs", tmp_path / "ours", "polyad")
    assert (tmp_path / "theirs" / name).read_bytes() == content
    again = need_tokenizer(Checkpoint(tmp_path / "ours"), None)
    assert again.fingerprint == tokenizer.fingerprint
    assert type(again) is type(tokenizer)


def test_a_cut_or_changed_file_is_refused_by_name(trained, tmp_path, refused):
    kind, folder, _, content = trained
    path = tmp_path / "step-00000002"
    shutil.copytree(find_checkpoint(folder), path)
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (content[:-1], changed):
        (path / KINDS[kind]).write_bytes(damaged)
        assert f"{KINDS[kind]}: damaged: " in refused("generate", path, "--prompt", "x")


def test_it_generates_away_from_its_data(trained):
    _, folder, tokenizer, _ = trained
    prompt, greedy = "import the", Sampling(temperature=0)
    result = generated(find_checkpoint(folder), prompt, max_tokens=8, sampling=greedy)
    assert result.prompt_ids == tokenizer.encode(prompt)
    whole = tokenizer.decode(result.prompt_ids + result.token_ids)
    assert whole == tokenizer.decode(result.prompt_ids) + result.text


def test_lm_eval_reads_text_with_it(trained):
    pytest.importorskip("lm_eval")
    from polyad.train.evaluation.lm_eval import PolyadLM

    _, folder, tokenizer, _ = trained
    assert PolyadLM(str(folder)).tok_encode("import the") == tokenizer.encode("import the")
