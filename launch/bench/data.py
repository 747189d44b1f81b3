"""`polyad bench data`: encoding beside the library's own, and the loader beside what trains on it.

Encoding is what `polyad prepare` does with text that is at hand: encode, count, digest, write and
wait for the disk. The peer is one call of `tokenizers`' `encode_batch` on the same documents, whose
ids nobody looks at. Both run with the same threads, in turn; what counts is the ratio of medians.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from data.dataset import PreparedData
from data.prepare import prepare
from data.sampler import TrainingSamples, micro_batches
from data.text import open_source
from data.tokenizer import Tokenizer, all_cores
from data.writer import DatasetWriter

ENCODING_GOAL, LOADER_GOAL = 0.9, 50.0


def bench_data(
    *,
    source: str = "python-stdlib",
    tokenizer: str = "train:8192",
    megabytes: float = 8.0,
    repeats: int = 5,
    sequence_length: int = 1024,
    micro_batch_size: int = 8,
    num_workers: int = 0,
    consumption: float | None = None,
) -> dict[str, Any]:
    """Times both ways of text to the training step.

    Args:
        source: where the text is from, as for `polyad prepare`.
        tokenizer: `train:VOCAB_SIZE`, or a file of Hugging Face `tokenizers`.
        megabytes: of text; the source's first ones.
        repeats: how often each is timed; once more goes before.
        sequence_length: T.
        micro_batch_size: samples of a batch.
        num_workers: loader processes; 0 reads in this one.
        consumption: tokens a second that training takes; None compares with nothing.

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
    if consumption is not None:
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
    }


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

    medians = _interleaved({"polyad": ours, "tokenizers": theirs}, repeats)
    rows = {
        name: {
            "seconds": seconds,
            "megabytes_per_second": size / 1e6 / seconds,
            "tokens_per_second": tokens / seconds,
        }
        for name, seconds in medians.items()
    }
    ratio = medians["tokenizers"] / medians["polyad"]
    return rows | {"ratio": ratio, "goal": ENCODING_GOAL, "reached": ratio >= ENCODING_GOAL}


def _interleaved(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


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
    if "ratio" in loader:
        lines.append(
            f"  {loader['ratio']:,.0f} times the {loader['consumption']:,.0f} tokens/s that are "
            f"consumed, the goal is at least {loader['goal']:.0f}"
        )
    return "\n".join(lines)
