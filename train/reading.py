"""Opens weights with held-out data, and reads the data once for any number of measures.

    opened = open_evaluated(path, data, overrides)      weights, their configuration, their task
    with opened.loaded(doing, split) as (model, world)  the model on this process's device
    for forward_pass in Subject(model, layers, ...).read()   the one pass, in which routers are read

A forward pass is read as a batch with the decisions of every router; see `measures/`.

Shapes: B samples and R rows of a batch, N tokens that a layer gets, M of them that count, D width.
"""

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.text.manifest import SplitName
from polyad.model.config import flatten
from polyad.model.decoder import DecoderSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import Choice, Streamed, Weights, device_of, open_weights
from polyad.train.config.environment import agreed_facts, folder_digest
from polyad.train.config.run import (
    RunConfig,
    config_of_checkpoint,
    data_overrides,
    load_config,
    parse_config,
)
from polyad.train.errors import ConfigError
from polyad.train.exchange.convert import config_for_model
from polyad.train.experts.information import Moments, Summed
from polyad.train.experts.interventions import Intervention, intervened, layers_by_block
from polyad.train.experts.probing import Decision, RoutedLayer, deciding
from polyad.train.guard.stopping import explain_out_of_memory
from polyad.train.loop.profiling import allow_tf32
from polyad.train.results import Progress
from polyad.train.streaming import activations_of, on_device, opened_model, run_blocks
from polyad.train.tasks.registry import TASKS
from polyad.train.tasks.samples import Samples, TextSamples, samples_of
from polyad.train.tasks.task import Share, Task
from polyad.train.tasks.text import TextTask

TOKENS = 65_536
"""Default for the approximate number of tokens or images to read."""


class EvaluationContext(NamedTuple):
    """Weights and their evaluation data, both checked."""

    weights: Weights
    config: RunConfig
    """The configuration of the weights, with the keys that evaluation may change."""
    task: Task[Any]
    choice: Choice
    """Which weights of a checkpoint."""
    interventions: Sequence[Intervention] = ()
    """Changes to experts whenever the model reads."""
    split: SplitName = "validation"
    """The split that is read."""

    def text(self, tokens: int) -> TextSamples:
        """Returns approximately this many tokens of the split, some of them hidden for a BERT."""
        assert isinstance(self.task, TextTask)
        return TextSamples(self.task, self.split, tokens, hidden=True)

    def about(self, split: str | None) -> dict[str, Any]:
        """Keys of a result that identify weights and data; a folder of weights counts as step 0.

        Args:
            split: the split that is read; None: no data is read.
        """
        about = {
            "checkpoint": str(self.weights.folder),
            "step": self.weights.training_step if isinstance(self.weights, Checkpoint) else 0,
            "weights": self.choice,
            "precision": self.config.train.precision,
        }
        if split is not None:
            about |= {"data": self.task.name, "data_kind": self.config.data.kind, "split": split}
        return about

    @property
    def batch_size(self) -> int:
        """Samples per forward pass."""
        return self.config.evaluation.batch_size or self.config.train.micro_batch_size

    @contextmanager
    def loaded(
        self,
        doing: str,
        split: str | None,
        model: nn.Module | None = None,
        *,
        needs_whole: str | None,
    ) -> Iterator[tuple[nn.Module, comm.World]]:
        """Yields the model on this process's device, in evaluation mode, and the process.

        A model that does not fit into memory is `Streamed`, unless it is needed as a whole. Inside
        the context an out-of-memory error is explained in one line.

        Args:
            doing: describes the work, for that line.
            split: the split to read; None: no data is read.
            model: the model if already loaded.
            needs_whole: why it must be in memory as a whole; None: it need not.

        Raises:
            DisagreementError: a process has a different checkpoint or data.
        """
        facts = agreed_facts(self.config, self.task if split else None, split)
        facts["the checkpoint"] = f"contents {folder_digest(self.weights.folder)}"
        world = comm.initialize(self.config.parallel.timeout_minutes, facts=facts)
        precision = self.config.train.precision
        allow_tf32(self.config.train.tf32, world.device)
        with (
            explain_out_of_memory(lambda: doing, world),
            nullcontext(model)
            if model is not None
            else opened_model(self.weights, world, precision, needs_whole=needs_whole) as model,
            intervened(model, self.interventions, lambda: self._means(model, split, world)),
        ):
            yield model, world

    def _means(
        self, model: nn.Module, split: str | None, world: comm.World
    ) -> Mapping[str, Tensor]:
        """The mean outputs over the same split of experts that are replaced by them."""
        blocks = {each.layer for each in self.interventions if each.how == "mean"}
        layers = [layer for block, layer in layers_by_block(model).items() if block in blocks]
        samples = samples_of(self.task, split or "validation", TOKENS)
        moments = Subject(model, layers, samples, self.batch_size).moments(world)
        return {name: each.mean_SD for name, each in moments.items()}

    def need(self, option: str, kind: type[Any]) -> Any:
        """Returns the task, for an option or command that needs a kind of task.

        Args:
            option: names it in the error.
            kind: the class of the task.

        Raises:
            ConfigError: it is a different task.
        """
        if not isinstance(self.task, kind):
            allowed = ", ".join(name for name, each in TASKS.items() if issubclass(each, kind))
            raise ConfigError(
                f"{option}: is not allowed with data.kind: {self.config.data.kind}; allowed with: "
                f"{allowed}"
            )
        return self.task


def open_evaluated(
    path: Path,
    data: str | None = None,
    overrides: Sequence[str] = (),
    weights: Choice = "trained",
    base: Path | None = None,
    interventions: Sequence[Intervention] = (),
) -> EvaluationContext:
    """Opens weights, and data that fits them.

    Args:
        path: a checkpoint, a run (its newest checkpoint), or a folder of weights.
        data: prepared data; None: the run's.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's weights.
        base: see `open_weights`.
        interventions: changes to experts whenever the model reads.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_data_for(open_weights(path, weights, base), data, overrides, weights)
    return opened._replace(interventions=interventions)


def open_data_for(
    opened: Weights, data: str | None, overrides: Sequence[str], choice: Choice
) -> EvaluationContext:
    """Opens data that fits weights; see `open_evaluated`."""
    original = config_from_weights(opened)
    if data is not None:
        overrides = (*overrides, *data_overrides(original, data))
    elif not isinstance(opened, Checkpoint) and "path" in type(original.data).model_fields:
        raise ConfigError(
            f"{opened.folder}: is a folder of weights, which names no data; --data names the "
            "prepared data to read"
        )
    origin = f"{opened.folder / 'config.yaml'} with overrides"
    config = parse_config(original.to_yaml(), overrides, origin=origin)
    _refuse_other_keys(original, config)
    task = TASKS[config.data.kind].open_held_out(config.for_task(), opened)
    return EvaluationContext(opened, config, task, choice)


def config_from_weights(weights: Weights) -> RunConfig:
    """Returns the configuration of a checkpoint, or one derived from a folder of weights.

    Assumptions about a folder are printed to standard error.
    """
    if isinstance(weights, Checkpoint):
        return config_of_checkpoint(weights)
    config, notes = config_for_model(weights.model_config(), weights.folder, weights.folder.name)
    for note in notes:
        print(f"polyad: {note}", file=sys.stderr, flush=True)
    return config


def config_at(path: Path, overrides: Sequence[str], processes: int) -> RunConfig:
    """Returns the configuration of a run to plan or to try on a layout.

    Args:
        path: a configuration; a checkpoint or run, which contain theirs; or a folder of weights,
            from which a run would start in bf16 with one sample per process and step.
        overrides: `key=value`.
        processes: number of processes that would run it.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if not path.is_dir():
        return load_config(path, overrides)
    weights = open_weights(path)
    config = config_from_weights(weights)
    if not isinstance(weights, Checkpoint):
        train = config.train.model_copy(
            update={"precision": "bf16", "micro_batch_size": 1, "global_batch_size": processes}
        )
        checkpoint = config.checkpoint.model_copy(update={"init_from": str(path)})
        config = config.model_copy(update={"train": train, "checkpoint": checkpoint})
    return parse_config(config.to_yaml(), overrides, origin=f"{path} with overrides")


def _refuse_other_keys(original: RunConfig, changed: RunConfig) -> None:
    allowed = ("evaluation.", "data.", "train.precision", "train.tf32")
    before, after = (flatten(c.model_dump(mode="json")) for c in (original, changed))
    length = "model.sequence_length"
    for key in after:
        if before.get(key) == after[key] or key.startswith(allowed):
            continue
        if key == length and isinstance(changed.model, DecoderSettings):
            if after[key] <= before[key]:
                continue
            raise ConfigError(f"{key}: {after[key]} is more than the model's {before[key]}")
        raise ConfigError(
            f"{key}: cannot be changed in evaluation, only evaluation.*, data.path, "
            f"train.precision and train.tf32 can (and {length} of a decoder can be reduced)"
        )


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """A batch with a model's results; for a `Streamed` model the results of one block at a time."""

    number_R: Tensor
    """Each row's number among all rows read, on the model's device."""
    batch: Any
    """The task's batch."""
    output: Any
    """The result of `Samples.forward`; None for a single block."""
    of_all_tokens: Mapping[str, Decision]
    """Each layer's routing decision for all that it reads, by layer name; for a single block only
    its layers. Padding and special tokens are included, for readers that run blocks again."""
    entering: Mapping[int, Tensor]
    """Inputs of the blocks that measures request [B, T, D], by block number."""
    is_first: bool = True
    """Whether this is the first pass over its batch."""
    row_N: Tensor | None = None
    """The row of each token, -1 for one that does not count; None as in `Samples.row_N`."""

    @functools.cached_property
    def counted_M(self) -> Tensor | None:
        """Indices of the tokens that count, among all that layers read; None: all count."""
        return None if self.row_N is None else (self.row_N >= 0).nonzero().squeeze(-1)

    @functools.cached_property
    def decisions(self) -> Mapping[str, Decision]:
        """Each layer's routing decision for the M tokens that count, by layer name; for a single
        block only its layers. Sums over tokens are made of these."""
        return self.counted(self.of_all_tokens)

    def counted(self, decisions: Mapping[str, Decision]) -> Mapping[str, Decision]:
        """Returns the decisions for the tokens that count.

        Args:
            decisions: decisions for all tokens of the batch, of this or another model.
        """
        rows_M = self.counted_M
        if rows_M is None:
            return decisions
        return {name: each.of(rows_M) for name, each in decisions.items()}

    def numbers_of(self, decision: Decision) -> Tensor:
        """The number of the row that each token of one of `decisions` belongs to [M]."""
        if self.row_N is not None:
            return self.number_R[self.row_N[self.counted_M]]
        return self.number_R.repeat_interleave(len(decision.levels[0]) // len(self.number_R))


class Subject(NamedTuple):
    """What is read: held-out samples by a model, with the decisions of some of its routers."""

    model: nn.Module
    """In evaluation mode, whole on each process, or `Streamed`, which is read block by block, up to
    the last block with one of the layers."""
    layers: Sequence[RoutedLayer]
    """The layers whose routers are read."""
    samples: Samples
    """The samples that all processes read together."""
    batch_size: int
    """Samples per forward pass."""

    def read(
        self,
        world: comm.World | None = None,
        *,
        label: str = "",
        blocks: Sequence[int] = (),
    ) -> Iterator[ForwardPass]:
        """Reads the samples once.

        Args:
            world: the processes that share the samples; None: this one reads all.
            label: label on the console; empty: no output.
            blocks: the blocks whose inputs are needed.

        Yields:
            Every batch of this process, of a streamed model once for each block with layers.
        """
        model, layers, samples, batch_size = self
        device, done, report = device_of(model), 0, None
        rank, ranks = (world.data_parallel_rank, world.data_parallel_size) if world else (0, 1)
        if label and (world is None or world.is_main):
            report = Progress(label, samples.amount, samples.unit)
        if isinstance(model, Streamed):
            assert not blocks
            yield from self._read_streamed(model, report or (lambda share: None))
            return
        for number_R, batch in samples.batches(batch_size, rank, ranks, device):
            if len(number_R):
                entering = dict.fromkeys(blocks, torch.empty(0))
                with deciding(model, layers) as decisions, torch.inference_mode():
                    output = samples.forward(model, batch, entering)
                yield ForwardPass(
                    number_R=number_R.to(device),
                    batch=batch,
                    output=output,
                    of_all_tokens=decisions,
                    entering=entering,
                    row_N=samples.row_N(batch),
                )
            done += len(number_R) * ranks
            if report is not None:
                report(min(1.0, done / samples.rows))

    def _read_streamed(self, model: Streamed, report: Share) -> Iterator[ForwardPass]:
        samples = self.samples
        assert isinstance(samples, TextSamples)
        batches = list(samples.batches(self.batch_size, 0, 1, torch.device("cpu")))
        by_block: dict[int, list[str]] = {}
        for layer in self.layers:
            by_block.setdefault(layer.block, []).append(layer.name)
        ids, last = [batch.ids_BT.int() for _, batch in batches], max(by_block, default=-1) + 1
        with activations_of(model, ids) as activations, deciding(model, self.layers) as decisions:
            for block, number in run_blocks(model, activations, last, report=report):
                if block in by_block:
                    number_R, batch = batches[number]
                    batch = on_device(batch, model.device)
                    yield ForwardPass(
                        number_R=number_R.to(model.device),
                        batch=batch,
                        output=None,
                        of_all_tokens={name: decisions.pop(name) for name in by_block[block]},
                        entering={},
                        is_first=block == min(by_block),
                        row_N=samples.row_N(batch),
                    )

    def moments(self, world: comm.World | None = None) -> Mapping[str, Moments]:
        """Reads the samples for the moments of expert outputs, by layer name; all processes call
        this.

        Args:
            world: the processes that share the samples; None: this one reads all, without output
                on the console.
        """
        moments = {layer.name: Moments(layer) for layer in self.layers}
        for forward_pass in self.read(world, label="read experts" if world else ""):
            for name, decision in forward_pass.decisions.items():
                moments[name].add(decision)
        return {name: each.result(summing(world)) for name, each in moments.items()}


def summing(world: comm.World | None) -> Summed:
    """Returns a function that sums over the processes that share samples.

    Args:
        world: these processes; None: this one reads all.
    """
    if world is None:
        return lambda values: values
    return lambda values: comm.sum_over_samples(values.to(world.device), world)
