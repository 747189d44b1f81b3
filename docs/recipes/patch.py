"""Which experts carry an answer? The output of an expert in a clean run enters a corrupted one.

Pairs are a JSON list of {"clean", "corrupted", "right", "wrong"}: two prompts of equally many
tokens and two answers. An expert recovers the share of the difference of the answers' logits that
its clean output brings back at all tokens (2606.03780). The experts that recover most are a family:
patched at once on other pairs, beside random families of the same layers (2606.25092).

    python docs/recipes/patch.py runs/quickstart/run pairs.json other-pairs.json
"""

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import torch

import polyad
from polyad.train.experts.probing import deciding, routed_layers


@torch.inference_mode()
def read(run: polyad.Run, file: str) -> list[dict]:
    """Reads pairs: token ids, those of the answers, and what experts decide in the clean run."""
    encode, pairs = run.tokenizer.encode, json.loads(Path(file).read_text("utf-8"))
    for pair in pairs:
        pair["answers"] = [encode(pair[name])[0] for name in ("right", "wrong")]
        for name in ("clean", "corrupted"):
            pair[name] = torch.tensor([run.tokenizer.begun(encode(pair[name]))])
        if pair["clean"].shape != pair["corrupted"].shape:
            raise SystemExit(f"{file}: the prompts before {pair['right']!r} differ in length")
        with deciding(run.model, routed_layers(run.model)) as pair["decisions"]:
            run.model(pair["clean"])
    return pairs


@torch.inference_mode()
def score(run: polyad.Run, pair: dict, family: dict, prompt: str = "corrupted") -> pd.Series:
    """Scores the answers after a prompt, with the clean outputs of a family, experts by layer."""
    with ExitStack() as stack:
        for name, experts in family.items():
            decision, clean_TD = pair["decisions"][name], 0.0
            for expert in experts:
                weight_T = decision.coefficients()[:, expert]
                y_TD = decision.output(0, expert, torch.arange(len(weight_T)))
                clean_TD = clean_TD + weight_T.unsqueeze(1) * y_TD

            def add(module, arguments, output, clean_TD=clean_TD):
                return output[0] + clean_TD, *output[1:]

            words = f"layer={name.split('.')[1]},expert={'+'.join(map(str, experts))}"
            stack.enter_context(run.intervened(words))  # the corrupted outputs become 0
            dispatcher = run.model.get_submodule(name).dispatcher
            stack.callback(dispatcher.register_forward_hook(add).remove)
        logits_V = run.model(pair[prompt]).logits[0, -1]
    right, wrong = logits_V[pair["answers"]].tolist()
    loss = float(logits_V.logsumexp(0)) - right
    return pd.Series({"difference": right - wrong, "accuracy": float(right > wrong), "loss": loss})


def mean(run: polyad.Run, pairs: list[dict], family: dict, prompt: str = "corrupted") -> pd.Series:
    """Returns the mean scores of pairs."""
    return pd.DataFrame([score(run, pair, family, prompt) for pair in pairs]).mean()


def patch(path: str, file: str, other: str, size: int = 8) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the scores of each expert, and those of families on other pairs."""
    run = polyad.load(path, device="cpu")
    pairs, others = read(run, file), read(run, other)
    all_experts = {layer.name: range(layer.num_experts) for layer in routed_layers(run.model)}
    each = {
        (name, e): mean(run, pairs, {name: [e]}) for name in all_experts for e in all_experts[name]
    }
    before, clean = (mean(run, pairs, {}, name)["difference"] for name in ("corrupted", "clean"))
    table = pd.DataFrame(each).T
    table["recovered"] = (table["difference"] - before) / (clean - before)
    table = table.sort_values("recovered", ascending=False, kind="stable")
    family: dict[str, list[int]] = {}
    for name, expert in table.index[: int(size)]:
        family.setdefault(name, []).append(expert)
    rows = {"corrupted": mean(run, others, {}), "family": mean(run, others, family)}
    for draw in range(5):
        chance = random.Random(draw)
        drawn = {name: chance.sample(all_experts[name], len(own)) for name, own in family.items()}
        rows[f"random {draw}"] = mean(run, others, drawn)
    return table, pd.DataFrame(rows | {"clean": mean(run, others, {}, "clean")}).T


if __name__ == "__main__":
    for each in patch(*sys.argv[1:]):
        print(each.to_string(), end="\n\n")
