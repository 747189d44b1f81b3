"""`polyad predict`, against models that read one input at a time and against `polyad evaluate`."""

import csv
import json

import pytest
import torch
import transformers

import polyad
from polyad.launch.cli import run as command
from polyad.train.errors import ConfigError
from tests.helpers.bert import their_bert
from tests.helpers.fine_tuned import EVIL, NAMES, SETTINGS, one_by_one, others, table
from tests.helpers.images import CLASSES, class_folders
from tests.helpers.runs import evaluation, run, write_config

pytestmark = pytest.mark.distributed
CLASS_NAMES = sorted(NAMES.values())


@pytest.fixture(scope="module")
def classifier(fine_tuned):
    return fine_tuned("smoe", table(60, 0), table(20, 1))


@pytest.fixture(scope="module")
def images(workers, tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    source = class_folders(root / "all", 20)
    mixer = {"kind": "mixer", "image_size": 8, "patch_size": 2, "num_layers": 1, "hidden_size": 16}
    config = write_config(
        root / "config.yaml", source, data__kind="images", data__held_out=0.3, model=mixer,
        optimizer__learning_rate=0.01,
    )  # fmt: skip
    workers(1).run(run, config)
    return root


def found_by(capfd, *words):
    """The JSON that the command writes."""
    assert command(["predict", *map(str, words), "--json", "-"]) == 0
    return json.loads(capfd.readouterr().out)


def assert_classes(predictions, texts, probabilities_NK):
    assert [each["input"] for each in predictions] == texts
    for each, p_K in zip(predictions, probabilities_NK, strict=True):
        best = p_K.argsort(descending=True).tolist()
        assert list(each["probabilities"]) == [CLASS_NAMES[k] for k in best]
        assert each["label"] == CLASS_NAMES[best[0]]
        assert list(each["probabilities"].values()) == pytest.approx(p_K[best].tolist(), abs=1e-5)


@pytest.mark.slow
def test_labels_are_those_of_one_text_at_a_time(classifier, tmp_path, capfd):
    texts = [row["text"] for row in table(40, 7)]  # more than a batch, of any length
    logits_NK, _ = one_by_one(classifier, texts)
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    result = found_by(capfd, classifier, "--file", tmp_path / "new.csv")
    assert result["truncated"] == 0
    assert_classes(result["predictions"], texts, logits_NK.softmax(-1))
    few = found_by(capfd, classifier, "--text", texts[0], "--text", texts[1])
    assert_classes(few["predictions"], texts[:2], logits_NK[:2].softmax(-1))
    ours = polyad.load(classifier).predict(texts[:2])
    assert [each.label for each in ours] == [each["label"] for each in few["predictions"]]


def test_a_person_reads_the_best_classes_and_the_text(classifier, capfd):
    long = "a very long film " * 20
    assert command(["predict", str(classifier), "--text", EVIL, "--text", long]) == 0
    first, second, note = capfd.readouterr().out.splitlines()
    assert first.endswith(EVIL)
    assert second.endswith(f"{long[:60]}...".replace("  ", " "))
    assert first.split()[0] in {name.split()[0] for name in CLASS_NAMES}
    assert note == "1 texts are longer than the model reads: truncated"


@pytest.mark.parametrize("name", SETTINGS)
def test_pairs_numbers_and_choices(fine_tuned, capfd, refused, name):
    rows = others()[name]
    folder = fine_tuned(name, rows[:16], rows[16:27], data=SETTINGS[name])
    file = folder.parent / "table" / "dev.csv"
    predictions = found_by(capfd, folder, "--file", file)["predictions"]
    assert [each["input"] for each in predictions] == [row["s1"] for row in rows[16:27]]
    columns = ["c0", "c1"] if name == "choices" else ["s2"]
    outputs = [
        one_by_one(folder, [row["s1"] for row in rows[16:27]], second=[r[c] for r in rows[16:27]])
        for c in columns
    ]
    output_NK = torch.cat([logits for logits, _ in outputs], dim=-1)
    for each, output_K in zip(predictions, output_NK, strict=True):
        if name == "numbers":
            assert each["value"] == pytest.approx(output_K.item(), abs=1e-5)
            assert each["label"] is None
        else:
            labels = ["0", "1"] if name == "choices" else ["a", "b"]
            assert each["label"] == labels[int(output_K.argmax())]
            expected = dict(zip(labels, output_K.softmax(-1).tolist(), strict=True))
            assert each["probabilities"] == pytest.approx(expected, abs=1e-5)
    if name != "choices":
        words = [word for row in rows[16:18] for word in ("--text", row["s1"], "--pair", row["s2"])]
        typed = found_by(capfd, folder, *words)["predictions"]
        in_python = polyad.load(folder).predict([(row["s1"], row["s2"]) for row in rows[16:18]])
        for one, other, third in zip(typed, in_python, predictions[:2], strict=True):
            assert one["label"] == other.label == third["label"]
            assert one["value"] == other.value == pytest.approx(third["value"])
    else:
        assert "chooses among c0, c1" in refused("predict", folder, "--text", "one")


def test_labels_of_image_files_are_those_that_evaluate_counts(images, workers, capfd):
    folder = images / "run"
    result = found_by(capfd, folder, "--image", images / "all")["predictions"]
    right = sum(each["input"].split("/")[-2] == each["label"] for each in result)
    counted = 0
    for split in ("train", "validation"):
        (scores,) = workers(1).run(evaluation, folder, split=split)
        counted += scores["top1"] * scores["images_scored"]
    assert len(result) == 60
    assert right == pytest.approx(counted)
    assert all(sum(each["probabilities"].values()) == pytest.approx(1) for each in result)
    one = images / "all" / "bee" / "003.jpg"
    (single,) = polyad.load(folder).predict([one])
    assert single.input == str(one)
    assert single.label in CLASSES
    same = next(each for each in result if each["input"] == str(one))
    assert single.probabilities == pytest.approx(same["probabilities"], abs=1e-5)


def test_a_folder_of_transformers_bert_gives_its_probabilities(tmp_path, capfd):
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    labels = dict(enumerate(CLASS_NAMES))
    theirs = their_bert("BertForSequenceClassification", id2label=labels)
    theirs.save_pretrained(tmp_path)
    texts = ["hello there", "bad"]
    with torch.no_grad():
        logits_NK = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    capfd.readouterr()  # what transformers says of its files
    result = found_by(capfd, tmp_path, "--text", texts[0], "--text", texts[1])
    assert_classes(result["predictions"], texts, logits_NK.softmax(-1))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], "--text"),
        (["--text", "a", "--pair", "b", "--pair", "c"], "--pair"),
        (["--text", "a", "--pair", "b"], "single texts"),
        (["--image", "x.jpg"], "not images"),
        (["--file", "no.csv"], "no.csv"),
        (["--file", "{folder}/config.yaml"], "config.yaml"),
        (["--file", "{other}"], "'text'"),
    ],
)
def test_what_does_not_fit_is_one_line(classifier, tmp_path, refused, words, key):
    (tmp_path / "other.csv").write_text("review\nfine\n")
    places = {"folder": classifier, "other": tmp_path / "other.csv"}
    assert key in refused("predict", classifier, *(word.format(**places) for word in words))


def test_in_python_inputs_are_a_list_of_texts_or_pairs(classifier):
    loaded = polyad.load(classifier)
    assert [each.input for each in loaded.predict(["a", "b c"])] == ["a", "b c"]
    for inputs in ("a b", ["a", ["a", "b", "c"]], ["a", None], ["a", 3], ["a", ("a", None)]):
        with pytest.raises(ConfigError, match=r"inputs: .+ is not allowed: a (list|text)"):
            loaded.predict(inputs)


def test_a_language_model_and_one_of_images_say_what_they_read(trained, images, tmp_path, refused):
    image = images / "all" / "bee" / "003.jpg"
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8,
    )  # fmt: skip
    transformers.ViTModel(vit).save_pretrained(tmp_path)
    for folder, words, part in (
        (trained("smoe"), ("--text", "a"), "predicts tokens, not labels"),
        (tmp_path, ("--image", image), "has no head that predicts classes"),
        (images / "run", ("--text", "a"), "the model reads images, not text"),
        (images / "run", ("--image", "nowhere"), "nowhere: no such file or folder"),
    ):
        assert part in refused("predict", folder, *words)
