"""A view of a text, against the model's own output and against changed weights."""

import pytest
import torch

import polyad
from polyad.launch.cli import run as command
from polyad.train.errors import ConfigError
from polyad.train.experts.interventions import intervened, parse_intervention
from polyad.train.experts.view import label
from tests.helpers.everyday import everyday
from tests.helpers.pages import Page
from tests.helpers.random_model import random_model
from tests.helpers.runs import FEED_FORWARDS

pytestmark = pytest.mark.distributed
TEXT = "def f(x):\n    return x < 3 and x"
LAYER = "blocks.1.feed_forward"


@pytest.fixture
def smoe(trained):
    """A model whose router sends tokens to different experts, as six steps have not taught one."""
    run = polyad.load(trained("smoe"))
    sparse = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "placement": [1]}
    sizes = {"hidden_size": 32, "sequence_length": 32, "vocab_size": run.tokenizer.vocab_size}
    run.model = random_model(sparse, torch.float32, **sizes)
    return run


def direct(run, text, *interventions):
    """Log-probabilities [T, V] of a forward pass of our own, in fp64, and the token ids."""
    ids = [*run.tokenizer.before, *run.tokenizer.encode(text)]
    changes = list(map(parse_intervention, interventions))
    with torch.no_grad(), intervened(run.model, changes):
        return run.model(torch.tensor([ids])).logits[0].double().log_softmax(-1), ids


def busiest(run, text=TEXT):
    """The expert that most tokens of a text use, but not all."""
    experts = run.show(text).plain.layers[LAYER].experts
    counts = torch.bincount(experts.flatten(), minlength=4)
    return int(counts.where(counts < len(experts), 0).argmax())


def losses_of(logits_TV, ids):
    return [-float(logits_TV[t - 1, ids[t]]) for t in range(1, len(ids))]


@everyday("kind", [kind for kind in FEED_FORWARDS if kind != "dense"], keep=["smoe", "tr"])
def test_losses_experts_and_next_tokens_are_those_of_a_forward_pass(trained, kind):
    run = polyad.load(trained(kind))
    view = run.show(TEXT, top=3)
    log_p_TV, ids = direct(run, TEXT)
    assert view.token_ids == ids
    assert "".join(view.tokens) == TEXT
    assert view.plain.losses[0] is None
    assert view.plain.losses[1:] == pytest.approx(losses_of(log_p_TV, ids), rel=1e-4)
    known = [loss for loss in view.plain.losses if loss is not None]
    assert view.plain.loss == pytest.approx(sum(known) / len(known))
    for p_V, likely in zip(log_p_TV.exp(), view.next_tokens, strict=True):
        given = [each.probability for each in likely]
        assert given == pytest.approx(p_V.topk(10).values.tolist(), rel=1e-4)
        assert given == pytest.approx([float(p_V[each.token_id]) for each in likely], rel=1e-4)
        assert all(each.changed is None for each in likely)
    experts = run.experts(TEXT, top=3).layers
    assert list(view.plain.layers) == list(experts)
    for name, each in experts.items():
        assert view.plain.layers[name].experts.equal(each.experts)
        assert view.plain.layers[name].weights.equal(each.weights)
    assert view.changed is None
    assert not any(map(any, view.moved().values()))


def test_an_intervention_changes_losses_and_leaves_nothing_behind(smoe):
    interventions = [f"layer=1,expert={busiest(smoe)}", "layer=1,expert=0,how=scale,value=2"]
    view = smoe.show(TEXT, interventions=interventions)
    before_TV, ids = direct(smoe, TEXT)
    after_TV, _ = direct(smoe, TEXT, *interventions)
    assert view.plain.losses[1:] == pytest.approx(losses_of(before_TV, ids), rel=1e-4)
    assert view.changed.losses[1:] == pytest.approx(losses_of(after_TV, ids), rel=1e-4)
    assert view.changed.loss != pytest.approx(view.plain.loss, abs=1e-6)
    for t, likely in enumerate(view.next_tokens):
        highest = {*before_TV[t].topk(10).indices.tolist(), *after_TV[t].topk(10).indices.tolist()}
        assert {each.token_id for each in likely} == highest
        for each in likely:
            assert each.probability == pytest.approx(float(before_TV[t, each.token_id].exp()), 1e-4)
            assert each.changed == pytest.approx(float(after_TV[t, each.token_id].exp()), 1e-4)
    assert [str(each) for each in view.interventions] == [
        f"{interventions[0]},how=zero",
        "layer=1,expert=0,how=scale,value=2",
    ]
    assert smoe.show(TEXT).plain.losses == view.plain.losses


def test_the_text_of_a_view_has_its_losses_and_most_probable_tokens(smoe):
    change = f"layer=1,expert={busiest(smoe)},how=prune"
    for changes in ((), (change,)):
        view = smoe.show(TEXT, interventions=changes)
        logits_TV, _ = direct(smoe, TEXT, *changes)
        _, *lines = str(view).splitlines()
        assert len(lines) == len(view.tokens)
        for number, line in enumerate(lines):
            best = view.next_tokens[number]
            wanted = next(e for e in best if e.token_id == int(logits_TV[number].argmax()))
            assert line.endswith(label(wanted.token).rstrip())
        assert f"{view.shown.losses[1]:.4f}" in lines[1]


def test_tokens_of_a_pruned_expert_have_moved_and_no_others(smoe):
    expert = busiest(smoe)
    view = smoe.show(TEXT, interventions=[f"layer=1,expert={expert},how=prune"])
    used = [expert in experts for experts in view.plain.layers[LAYER].experts.tolist()]
    assert any(used)
    assert not all(used)
    assert view.moved()[LAYER] == used


def test_a_notebook_gets_a_table_in_which_text_is_text(smoe):
    text = "<img src=x> & <b>"
    prune = f"layer=1,expert={busiest(smoe, text)},how=prune"
    view = smoe.show(text, interventions=[prune])
    html = view._repr_html_()
    assert Page(html).links == []
    assert "img" not in Page(html).tags
    assert "&lt;" in html
    assert f"{view.changed.loss - view.plain.loss:+.4f}" in html
    assert html.count("<tr") == 1 + len(view.tokens)
    assert "dashed" in html
    assert f"{view.plain.loss:.4f} -> {view.changed.loss:.4f}" in repr(view)
    assert "None" not in smoe.show("x")._repr_html_()  # nothing is predicted of one token


def test_trace_writes_the_view_of_a_text_as_a_page(trained, tmp_path):
    page, change = tmp_path / "text.html", "layer=1,expert=1,how=scale,value=2"
    words = ["--text", TEXT, "--html", str(page), "--intervene", change]
    assert command(["experts", "trace", str(trained("smoe")), *words]) == 0
    view = polyad.load(trained("smoe")).show(TEXT, interventions=[change])
    assert page.read_text() == view.page()
    assert "<title>" in view.page()
    assert Page(view.page()).links == []


def test_what_cannot_be_shown_is_one_line(smoe, finished):
    for text in ("", "x " * 300):
        with pytest.raises(ConfigError, match=r"text: \d+ tokens are not allowed"):
            smoe.show(text)
    with pytest.raises(ConfigError, match="the model is dense: it has no experts"):
        polyad.load(finished).show("x")
