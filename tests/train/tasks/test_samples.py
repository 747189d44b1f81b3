"""Held-out text as measures read it: evenly over a split, and block by block."""

import torch

from polyad.data.config import DataConfig
from polyad.data.text.samples import EvaluationWindows
from polyad.model.decoder import GPT2Config
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import TextSamples
from polyad.train.tasks.task import EvaluationConfig, Sections


def test_windows_lie_evenly_over_the_split(prepared_path):
    task = LanguageModelling.open(Sections(
        data=DataConfig(path=str(prepared_path)), evaluation=EvaluationConfig(), seed=0,
        model=GPT2Config(num_layers=1, hidden_size=8, num_heads=2, sequence_length=32),
    ))  # fmt: skip
    stream, _ = task.split("validation")
    windows = EvaluationWindows(stream, 32, 32, task.data.tokenizer.end_of_text_id)
    total = len(windows)
    assert total > 20
    for tokens_read, count in ((1, 1), (32, 1), (33, 2), (320, 10), (10**9, total), (None, total)):
        samples = TextSamples(task, "validation", tokens_read)
        assert samples.rows == count
        expected = [windows[number * total // count].input_BT for number in range(count)]
        read = [
            (number, ids_T)
            for rank in (0, 1)
            for number_B, passages in samples.batches(3, rank, 2, torch.device("cpu"))
            for number, ids_T in zip(number_B.tolist(), passages.ids_BT, strict=True)
        ]
        assert sorted(number for number, _ in read) == list(range(count))
        assert all(torch.equal(ids_T, expected[number]) for number, ids_T in read)
