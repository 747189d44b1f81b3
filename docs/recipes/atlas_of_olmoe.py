"""What each of the 1,024 experts of OLMoE-1B-7B is for: nothing of this kind is published.

Every expert of every layer is removed on two corpora, and the lowest quarter and half by each
statistic beside random sets of the same size. Written are one JSON with both atlases and how far
they agree, and one page with the experts' tokens and confidence intervals.

By count, reading 65,536 tokens of each corpus takes 2.4e17 FLOPs: 1,376 sets of experts, each read
again from its block on at 1.3e9 active parameters. That is ten minutes on an H100 at 400 TFLOP/s;
it has not been run on one. On a CPU name fewer layers and tokens.

    python docs/recipes/atlas_of_olmoe.py runs/atlas
    python docs/recipes/atlas_of_olmoe.py runs/atlas --model FOLDER --corpora a.txt b.txt --layers 8
"""

import argparse
import json
import subprocess
from pathlib import Path

import pandas as pd
from scipy.stats import spearmanr

from polyad.parallel.foreign import on_disk

MODEL = "allenai/OLMoE-1B-7B-0924"
CORPORA = ("python-stdlib", "wikitext-103")


def polyad(*words: object) -> None:
    """Runs a command."""
    subprocess.run(["polyad", *map(str, words)], check=True)


def agreement(atlases: dict[str, dict]) -> list[dict]:
    """Rank correlation of the changes in loss between two corpora, layer by layer."""
    one, other = (pd.DataFrame(each["experts"]) for each in atlases.values())
    both = one.merge(other, on=["module", "expert"], suffixes=("_one", "_other"))
    rows = []
    for module, layer in both.groupby("module", sort=False):
        rho, p = spearmanr(layer["change_one"], layer["change_other"])
        rows.append({"module": module, "experts": len(layer), "rho": rho, "p": p})
    return rows


def main() -> None:
    """Prepares both corpora, makes both atlases and the page, and writes what they share."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--corpora", nargs=2, default=CORPORA)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--layers", default="all")
    options = parser.parse_args()
    model, atlases = on_disk(Path(options.model)), {}
    for number, corpus in enumerate(options.corpora):
        data = options.output / f"data-{number}"
        if not data.exists():
            polyad("prepare", "--source", corpus, "--tokenizer", model, "--output", data)
        read = (model, "--data", data, "--tokens", options.tokens, "--layers", options.layers)
        how = ("train.precision=bf16", f"model.sequence_length={options.length}")
        target = options.output / f"atlas-{number}.json"
        polyad("experts", "atlas", *read, "--json", target, *how)
        atlases[corpus] = json.loads(target.read_text())
        if number == 0:
            polyad("report", *read, "--knockout", "--output", options.output / "atlas.html")
    result = {"model": options.model, "atlases": atlases, "agreement": agreement(atlases)}
    (options.output / "atlas.json").write_text(json.dumps(result))
    print(pd.DataFrame(result["agreement"]).to_string(index=False))


if __name__ == "__main__":
    main()
