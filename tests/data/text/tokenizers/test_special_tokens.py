"""Special tokens that are written in a text, and conversations: as transformers reads them."""

import json

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.launch.commands.data import prepared_table
from tests.helpers.decoders import BEGIN, END, write_tokenizer
from tests.helpers.prepared import jsonl

TURN = "<|endoftext|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|return|>{% if not loop.last %}\n{% endif %}{% endfor %}"
)
CHATS = [
    [
        {"role": "user", "content": f"hello {number}"},
        {"role": "assistant", "content": "<think>how</think> fine \U0001f642"},
    ]
    for number in range(30)
]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer as the hub has it: special tokens, one that is added only, a chat template."""
    folder = tmp_path / "hub"
    folder.mkdir()
    write_tokenizer(folder, add_bos_token=True, chat_template=TEMPLATE)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def first_document(path):
    return PreparedData.open(path).split("train").read_document(0).tolist()


def test_conversations_are_rendered_and_read_as_transformers_does(folder, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(CHATS[0], return_dict=False)
    assert ids[0] == theirs.bos_token_id != ids[1]
    assert ids[-1] == theirs.eos_token_id  # neither is added a second time
    rendered = [theirs.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)
    )
    jsonl(tmp_path / "texts.jsonl", rendered)
    options = {"special_tokens": "parse", "test_fraction": 0.0}
    of_texts = prepare(str(tmp_path / "texts.jsonl"), str(folder), tmp_path / "texts", **options)
    options["text_key"] = "messages"
    of_chats = prepare(str(tmp_path / "chats.jsonl"), str(folder), tmp_path / "chats", **options)
    assert first_document(tmp_path / "texts") == first_document(tmp_path / "chats") == ids
    assert of_chats.splits == of_texts.splits
    assert of_chats.special_tokens == {TURN: 60, END: 60, BEGIN: 30}


def test_as_text_they_are_characters_which_is_counted_and_told(folder, tmp_path):
    jsonl(tmp_path / "texts.jsonl", [f"a {TURN} b {END} {n}" for n in range(30)])
    manifest = prepare(str(tmp_path / "texts.jsonl"), str(folder), tmp_path / "out")
    assert manifest.special_tokens == {TURN: 30, END: 30}
    table = prepared_table(manifest, "out", 1.0)
    assert (
        f"special tokens in the text: {TURN} 30, {END} 30: read as characters; --special" in table
    )
    ids = first_document(tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    assert ids.count(tokenizer.end_of_text_id) == 1
    assert tokenizer.decode(ids).count(END) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"text_key": "messages"}, "line 1: 'messages' is a list; --special-tokens parse renders"),
        ({"tokenizer": "train:300", "special_tokens": "parse"}, "parse needs a tokenizer that exi"),
        ({"text_key": "messages", "special_tokens": "parse"}, "chat_template is not set"),
        ({"text_key": "messages", "special_tokens": "parse", "template": "{{ raise_exception('no sy"
          "stem') }}"}, "line 1: 'messages': the chat template of .* render it: no system"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(folder, tmp_path, options, why):
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about["chat_template"] = options.pop("template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    row = {"text": "a", "messages": CHATS[0]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 30)
    tokenizer = options.pop("tokenizer", str(folder))
    with pytest.raises(DataError, match=why):
        prepare(str(tmp_path / "rows.jsonl"), tokenizer, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
