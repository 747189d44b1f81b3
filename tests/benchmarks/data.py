"""`data.py`: encoding beside the library's own, and the loader beside what trains on it.

Encoding is what `polyad prepare` does with text that is at hand: encode, count, digest, write and
wait for the disk. The peer is one call of `tokenizers`' `encode_batch` on the same documents, whose
ids nobody looks at. Both run with the same threads, in turn; what counts is the ratio.

What training takes is measured behind it, in the same process: whole steps of a GPT-2 as `polyad
bench step` times them, without the engine around it, which would only be slower.
"""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch

from polyad.data.sampler import micro_batches
from polyad.data.text.dataset import PreparedData
from polyad.data.text.documents import open_source
from polyad.data.text.prepare import prepare
from polyad.data.text.samples import TrainingSamples
from polyad.data.text.tokenizers.tokenizer import Tokenizer, all_cores
from polyad.data.text.writer import DatasetWriter
from polyad.launch.command import Argument, Json, Overrides, UsageError
from polyad.launch.output import results
from polyad.model.gpt2 import GPT2Config
from polyad.parallel.zero import Precision
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from tests.benchmarks.script import Repeats, benchmark, start
from tests.benchmarks.step_variants import make_step
from tests.benchmarks.turns import clocked, summary, take_turns

ENCODING_GOAL, LOADER_GOAL = 0.9, 50.0
GPT2_124M = GPT2Config(sequence_length=1024, vocab_size=50257)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training whose rate the loader is compared with.

    As it stands: GPT-2 124M on short sequences, of which it takes more tokens a second than of
    long ones.
    """

    model: GPT2Config = GPT2_124M
    precision: Precision | None = None
    """None: bf16 on a GPU; fp32 on a CPU, since many have bf16 in emulation alone."""
    batch_size: int = 2
    sequence_length: int = 256
    compiled: bool = False
    steps: int = 3
    """Steps that are timed, after one more that is not."""


def bench_data(
    *,
    source: str = "python-stdlib",
    tokenizer: str = "train:8192",
    megabytes: float = 8.0,
    repeats: int = 5,
    sequence_length: int = 1024,
    micro_batch_size: int = 8,
    num_workers: int = 0,
    training: Training | None = None,
    consumption: float | None = None,
) -> dict[str, Any]:
    """Times both ways of text to the training step, and what that takes.

    Args:
        source: where the text is from, as for `polyad prepare`.
        tokenizer: `train:VOCAB_SIZE`, or a file of Hugging Face `tokenizers`.
        megabytes: of text; the source's first ones.
        repeats: how often each is timed; once more goes before.
        sequence_length: T.
        micro_batch_size: samples of a batch.
        num_workers: loader processes; 0 reads in this one.
        training: what trains; None takes GPT-2 124M.
        consumption: tokens a second that training takes; None measures it.

    Returns:
        JSON values: rates, their ratio, and whether it reaches the goal.
    """
    documents = _documents(source, megabytes)
    size = sum(len(text.encode("utf-8")) for text in documents)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lines = (json.dumps({"text": text}) + "\n" for text in documents)
        (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
        prepare(
            str(folder / "text.jsonl"), tokenizer, folder / "prepared", report=lambda line: None
        )
        data = PreparedData.open(folder / "prepared")
        with all_cores():
            encoding = _encoding(documents, size, data.tokenizer(), folder, repeats)
        loader = _loader(data, sequence_length, micro_batch_size, num_workers, repeats)
    measured = None
    if consumption is None:
        measured = _training(training or Training())
        consumption = measured["tokens_per_second"]
    ratio = loader["tokens_per_second"] / consumption
    loader |= {"consumption": consumption, "ratio": ratio, "goal": LOADER_GOAL}
    loader |= {"reached": ratio >= LOADER_GOAL}
    return {
        "source": source,
        "tokenizer": tokenizer,
        "vocab_size": data.manifest.tokenizer.vocab_size,
        "documents": len(documents),
        "bytes": size,
        "threads": int(os.environ.get("RAYON_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)),
        "encoding": encoding,
        "loader": loader,
        "training": measured,
    }


def bench_data_of(path: Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """As `bench_data`, with the batches and the training of a configuration.

    Args:
        path: the configuration; where it says no `model.vocab_size`, GPT-2's is taken.
        overrides: `key=value`.
        options: of `bench_data`.

    Returns:
        As `bench_data`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    config = load_config(path, overrides)
    model = config.model
    if not isinstance(model, GPT2Config):
        raise ConfigError(f"{path}: model.kind: {model.kind} does not read text; gpt2 does")
    vocab_size = model.vocab_size or GPT2_124M.vocab_size
    training = Training(
        model=model.model_copy(update={"vocab_size": vocab_size}),
        precision=config.train.precision,
        batch_size=config.train.micro_batch_size,
        sequence_length=model.sequence_length,
        compiled=model.compile,
    )
    return bench_data(
        sequence_length=training.sequence_length,
        micro_batch_size=training.batch_size,
        num_workers=config.data.num_workers,
        training=training,
        **options,
    )


def _training(training: Training) -> dict[str, Any]:
    """Tokens a second that one process takes: the median of a few steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = training.precision or ("bf16" if device == "cuda" else "fp32")
    step = make_step(
        "polyad",
        training.model,
        precision,
        device=device,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        compiled=training.compiled,
    )
    seconds = []
    for _ in range(training.steps + 1):
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    model = training.model.model_dump(mode="json")
    about = asdict(training) | {"model": model, "precision": precision}
    tokens = training.batch_size * training.sequence_length
    return about | {"device": device, "seconds": median, "tokens_per_second": tokens / median}


def _documents(source: str, megabytes: float) -> list[str]:
    documents, left = [], megabytes * 1e6
    for document in open_source(source, streaming=True).documents():
        documents.append(document.text)
        left -= len(document.text.encode("utf-8"))
        if left <= 0:
            break
    return documents


def _encoding(
    documents: list[str], size: int, tokenizer: Tokenizer, folder: Path, repeats: int
) -> dict[str, Any]:
    tokenizer.save(folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = 0

    def ours() -> None:
        nonlocal tokens
        (folder / "encoded").mkdir(exist_ok=True)
        writer = DatasetWriter(folder / "encoded", tokenizer)
        for number, text in enumerate(documents):
            writer.add("train", text, str(number))
        tokens = writer.finish()["train"].tokens
        writer.close()

    def theirs() -> None:
        library.encode_batch(documents, add_special_tokens=False)

    runs = {"polyad": clocked(ours), "tokenizers": clocked(theirs)}
    compared = summary(take_turns(runs, repeats), "polyad")
    rows = {
        name: {
            "seconds": row["seconds"],
            "megabytes_per_second": size / 1e6 / row["seconds"],
            "tokens_per_second": tokens / row["seconds"],
        }
        for name, row in compared.items()
    }
    ratio = compared["tokenizers"]["seconds_ratio"]
    return rows | {
        "ratio": ratio,
        "ratio_interval": compared["tokenizers"]["seconds_ratio_interval"],
        "goal": ENCODING_GOAL,
        "reached": ratio >= ENCODING_GOAL,
    }


def _loader(
    data: PreparedData, sequence_length: int, micro_batch_size: int, num_workers: int, repeats: int
) -> dict[str, Any]:
    """Times batches in windows; the first one, for which the index is built, apart."""
    window = max(1, 400_000 // (sequence_length * micro_batch_size))  # batches
    started = time.perf_counter()
    batches = micro_batches(
        TrainingSamples(data.split("train"), sequence_length, seed=0),
        start_step=0,
        num_steps=1 + (repeats + 1) * window,
        global_batch_size=micro_batch_size,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
    )
    next(batches)
    first = time.perf_counter() - started
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for _batch in islice(batches, window):
            pass
        rates.append(window * micro_batch_size * sequence_length / (time.perf_counter() - started))
    return {
        "sequence_length": sequence_length,
        "micro_batch_size": micro_batch_size,
        "num_workers": num_workers,
        "tokens_per_second": statistics.median(rates[1:]),
        "first_batch_seconds": first,
    }


def data_table(result: dict[str, Any]) -> str:
    """The result for a person."""
    encoding, loader = result["encoding"], result["loader"]
    lines = [
        f"encoding {result['bytes'] / 1e6:.1f} MB of {result['source']}, {result['threads']} "
        f"threads, vocabulary {result['vocab_size']:,}",
        *(
            f"  {name:10}  {encoding[name]['megabytes_per_second']:8.2f} MB/s  "
            f"{encoding[name]['tokens_per_second']:12,.0f} tokens/s"
            for name in ("polyad", "tokenizers")
        ),
        f"  ratio {encoding['ratio']:.2f}, the goal is at least {encoding['goal']}",
        f"loader, {loader['micro_batch_size']} x {loader['sequence_length']}, "
        f"{loader['num_workers']} workers: {loader['tokens_per_second']:,.0f} tokens/s, the first "
        f"batch after {loader['first_batch_seconds']:.2f} s",
    ]
    training = result["training"]
    by = "as given"
    if training is not None:
        model = training["model"]
        by = (
            f"by {model['num_layers']} layers of width {model['hidden_size']}, "
            f"{training['batch_size']} x {training['sequence_length']} in {training['precision']} "
            f"on {training['device']}, measured now"
        )
    lines.append(
        f"  {loader['ratio']:,.0f} times the {loader['consumption']:,.0f} tokens/s that training "
        f"takes ({by}); the goal is at least {loader['goal']:.0f}"
    )
    return "\n".join(lines)


@benchmark("data", "--json data.json", "--config configs/gpt2/355m.yaml --megabytes 32")
def data(
    overrides: Overrides,
    *,
    source: Annotated[
        str, Argument("where the text is from, as for polyad prepare")
    ] = "python-stdlib",
    tokenizer: Annotated[str, Argument("train:VOCAB_SIZE or a tokenizer.json")] = "train:8192",
    megabytes: Annotated[float, Argument("size of the text; default 8", "N")] = 8.0,
    repeats: Repeats = 5,
    config: Annotated[
        Path | None,
        Argument(
            "whose batches are loaded, and whose model trains; default: 8 x 1,024 tokens, and "
            "GPT-2 124M on 2 x 256",
            "CONFIG",
        ),
    ] = None,
    consumption: Annotated[
        float | None,
        Argument("tokens a second that training takes; default: measured", "TOKENS"),
    ] = None,
    json: Json = None,
) -> None:
    """Times encoding beside the tokenizers library, and the loader beside training."""
    if not 0 < megabytes < math.inf:
        raise UsageError(f"--megabytes: {megabytes} is not allowed; more than 0")
    if consumption is not None and not 0 < consumption < math.inf:
        raise UsageError(f"--consumption: {consumption} is not allowed; more than 0")
    if overrides and config is None:
        raise UsageError(f"{overrides[0]}: a key of a configuration, which --config names")
    options: dict[str, Any] = {
        "source": source,
        "tokenizer": tokenizer,
        "megabytes": megabytes,
        "repeats": repeats,
        "consumption": consumption,
    }
    with results(json) as show:
        if config is None:
            result = bench_data(**options)
        else:
            result = bench_data_of(config, overrides, **options)
        show(result, data_table(result))


if __name__ == "__main__":
    start(data)
