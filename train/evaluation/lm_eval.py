"""A checkpoint as an lm-eval model, and lm-eval's command line with it:

    python -m polyad.train.evaluation.lm_eval --model polyad --model_args checkpoint=RUN --tasks ...

Scoring follows lm-eval's own Hugging Face models: an
empty context is one end-of-text token, and a text longer than the model's window is scored in
several windows, the last with as much context as fits.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.parallel.checkpoint.load import read_newest
from polyad.parallel.weights import open_weights
from polyad.parallel.zero import DTYPES, Precision
from polyad.train.errors import ConfigError, one_line
from polyad.train.evaluation.generate import Sampling, TextStream, generate_ids
from polyad.train.streaming import whole_model
from polyad.train.tasks.language import language_model
from polyad.train.tasks.vocabulary import need_tokenizer

try:
    import lm_eval.models  # noqa: F401  (registers its own, which it does only while none are)
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as missing:
    sys.exit(
        f"polyad: error: lm-eval cannot be imported ({missing}); "
        "`pip install -c constraints.txt -e '.[eval]'` installs it"
    )

Scored = tuple[list[int], int]
"""Token ids, and the number of last ones that are scored."""
MAX_GENERATED = 256
"""Maximum number of tokens of `generate_until` if a task sets none: lm-eval's default."""


@register_model("polyad")
class PolyadLM(TemplateLM):
    """Answers lm-eval's three kinds of requests with a model on one device.

    Args:
        checkpoint: a checkpoint, a run (its newest checkpoint), or a Hugging Face folder.
        tokenizer: a tokenizer.json, a SentencePiece .model or its folder; None: the checkpoint's.
        precision: `fp32` or `bf16`.
        batch_size: texts per forward pass of `loglikelihood`.
        device: the model's device; always the CPU if there is no GPU.
        max_batch_size: ignored; lm-eval passes it.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """

    def __init__(
        self,
        checkpoint: str,
        tokenizer: str | None = None,
        precision: Precision = "fp32",
        batch_size: int | str | None = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if precision not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise ConfigError(f"precision: {precision!r} is not allowed: {allowed}")
        try:
            self.batch_size = max(1, int(batch_size or 1))
        except ValueError:
            raise ConfigError(f"batch_size: {batch_size!r} is not allowed: a number") from None
        # lm-eval passes "cuda:0" if the user gives no device.
        self._device = torch.device((device or "cuda") if torch.cuda.is_available() else "cpu")

        def read(chosen: Path) -> tuple[Path, Tokenizer, torch.nn.Module]:
            weights = open_weights(chosen)
            language_model(weights)
            coder = need_tokenizer(weights, tokenizer)
            needs_whole = "each request runs all blocks"
            model = whole_model(weights, self._device, precision, needs_whole)
            return weights.folder, coder, model

        folder, self._coder, self.model = read_newest(Path(checkpoint), read)
        config: Any = self.model.config
        self.max_length: int = config.sequence_length
        self._name = str(folder)

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a document."""
        return self._coder.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before a text without context: the tokenizer's beginning-of-document
        token, or else its end-of-text token."""
        return [*self._coder.before, self._coder.end_of_text_id][0]

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches."""
        return self._coder.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._coder.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        answers = self._score([self._pair(*request) for request in requests], disable_tqdm)
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _pair(
        self, texts: Any, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Splits tokens as lm-eval does, but never leaves the continuation empty.

        lm-eval moves white space at the end of a context to the continuation, so a context of white
        space alone becomes empty. If the continuation ends up inside the context's last token, it
        would be empty, and score better than any other answer.
        """
        if not continuation and texts is not None and texts[1]:
            continuation = self.tok_encode(texts[1])
        return context or [self.prefix_token_id], continuation

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in nats, each after the prefix token."""
        texts = [request.args[0] for request in requests]
        pairs = [([self.prefix_token_id], self.tok_encode(text)) for text in texts]
        totals = [total for total, _ in self._score(pairs, disable_tqdm)]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continues texts until one of the strings that a task names."""
        texts = []
        for request in tqdm(requests, disable=disable_tqdm, desc="generating"):
            context, options = request.args
            texts.append(self._generate(context, options))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    @torch.inference_mode()
    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool
    ) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, whether greedy decoding gives the same tokens) of
        each."""
        work = [(n, window) for n, pair in enumerate(pairs) for window in self._windows(*pair)]
        work.sort(key=lambda item: -len(item[1][0]))  # longest first, for little padding
        totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
        starts = range(0, len(work), self.batch_size)
        for start in tqdm(starts, disable=quiet, desc="scoring"):
            batch = work[start : start + self.batch_size]
            read = [torch.tensor(ids[:-1]) for _, (ids, _) in batch]
            input_BT = pad_sequence(read, batch_first=True, padding_value=self.eot_token_id)
            mask_BT = pad_sequence([torch.ones_like(ids_T).bool() for ids_T in read], True)
            # The mask also keeps padding out of expert choice in models that see later tokens.
            output = self.model(input_BT.to(self._device), mask_BT=mask_BT.to(self._device))
            logits_BTV = output.logits
            for row, (number, (ids, count)) in enumerate(batch):
                # Padding follows the text, so causal attention does not see it.
                logits_TV = logits_BTV[row, len(ids) - 1 - count : len(ids) - 1].float()
                target_T = torch.tensor(ids[-count:], device=self._device)
                picked_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0]
                totals[number] += picked_T.double().sum().item()
                greedy[number] &= bool((logits_TV.argmax(-1) == target_T).all())
        return list(zip(totals, greedy, strict=True))

    def _windows(self, context: list[int], continuation: list[int]) -> Iterator[Scored]:
        """Cuts a text into windows of at most the model's, each token scored once."""
        ids, done = context + continuation, 0
        while done < len(continuation):
            count = min(self.max_length, len(continuation) - done)
            done += count
            stop = len(context) + done
            # One more token than the window: the last one is only predicted.
            yield ids[max(0, stop - self.max_length - 1) : stop], count

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until, max_tokens, sampling = _generation_options(options)
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if max_tokens < self.max_length:  # leave room, as lm-eval does, so the window is not moved
            ids = ids[max_tokens - self.max_length :]
        stream, text = TextStream(self._coder, ids), ""
        for token in generate_ids(
            self.model,
            self._coder,
            ids,
            max_tokens=max_tokens,
            sampling=sampling,
            name=self._name,
        ):
            text += stream.push(token)
            if any(mark in text for mark in until):
                break
        else:
            text += stream.end()
        return text[: min((text.find(mark) for mark in until if mark in text), default=None)]


def _generation_options(options: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """Reads a task's generation options as lm-eval does: stop strings, length, sampling.

    Raises:
        ConfigError: an option is not supported.
    """
    try:
        rest: dict[str, Any] = dict(
            normalize_gen_kwargs({k: v for k, v in options.items() if v is not None}, MAX_GENERATED)
        )
        until = [mark for mark in rest.pop("until") if mark]
        max_tokens, is_sampled = rest.pop("max_gen_toks"), rest.pop("do_sample")
        temperature, top_p = (float(rest.pop(key, 1.0)) for key in ("temperature", "top_p"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"generation options {options}: {error}") from None
    if rest:
        key = min(rest)
        raise ConfigError(
            f"{key}: {rest[key]!r} is not supported; generation supports until, do_sample, "
            "temperature, top_p and max_gen_toks"
        )
    return until, max_tokens, Sampling(temperature=temperature if is_sampled else 0.0, top_p=top_p)


def main() -> None:
    """Runs lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:
        if getattr(error, "exit_status", None) is None:
            raise
        print(f"polyad: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
