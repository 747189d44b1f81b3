"""Commands about a run's configuration: training, and what is checked before it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from polyad.launch.command import (
    Argument,
    ConfigFile,
    ConfigOrFolder,
    Json,
    Overrides,
    Positive,
    check_json_path,
    check_result_file,
    command,
    nearest,
    only_results_on_stdout,
    results,
    say,
)
from polyad.launch.launch import Launcher
from polyad.launch.processes import bind_to_cores, end_with_launcher, is_main, run_polyad
from polyad.train.errors import forget_stop

if TYPE_CHECKING:
    import pandas

    from polyad.train.state import TrainState
    from polyad.train.study import Study


@command(
    "train",
    "polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib train.steps=20",
    "torchrun --nproc-per-node 2 -m polyad.launch train configs/quickstart/gpt2.yaml "
    "data.path=runs/stdlib",
)
def train(config: ConfigFile, overrides: Overrides) -> None:
    """Trains in this process, or as a worker of torchrun.

    Run it again to continue.
    """
    launched = end_with_launcher()
    bind_to_cores()
    forget_stop()
    from polyad.parallel import comm
    from polyad.train.train import main

    with only_results_on_stdout() as stdout:
        state = main(config, overrides, launched=launched)
        if is_main():
            stdout.write(trained_line(state, config, overrides) + "\n")
        comm.shutdown()


def trained_line(state: "TrainState", config: Path, overrides: Sequence[str]) -> str:
    """Says at the end of a run what was done, and where it is."""
    from polyad.train.config.run import load_config
    from polyad.train.loop.metrics import METRICS_FILE

    folder = Path(load_config(config, overrides).run.folder)
    skipped = f", {state.skipped_steps:,} of them skipped" if state.skipped_steps else ""
    last = last_loss(folder / METRICS_FILE)
    return f"{state.step:,} steps done{skipped}; {last}in {folder}"


def last_loss(metrics: Path) -> str:
    """The loss of a run's last record, for `trained_line`; nothing if it has none."""
    from polyad.train.loop.metrics import records_of

    records = list(records_of(metrics)) if metrics.exists() else []
    loss = records[-1]["loss"] if records else None
    return "" if loss is None else f"last loss {loss:.4f}; "


@command(
    "launch",
    "polyad launch configs/quickstart/gpt2-smoe.yaml --processes-per-node 2 data.path=runs/stdlib "
    "run.folder=runs/experts",
    "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via slurm "
    "--sbatch gpus-per-node=4 --sbatch time=24:00:00 data.path=runs/stdlib --dry-run",
)
@dataclass(frozen=True, kw_only=True)
class Launch(Launcher):
    """Checks a run, then trains it in P processes on each of N hosts."""

    config: ConfigFile = field(kw_only=False)

    def run(self) -> int:
        """Starts the run."""
        end_with_launcher()
        return self.start()


@command(
    "study",
    "polyad study configs/studies/mumoe.yaml --dry-run",
    "polyad study configs/studies/mumoe.yaml --dry-run --figure mumoe.pdf",
)
def study(
    study: Path, *, dry_run: bool = False, figure: Path | None = None, json: Json = None
) -> None:
    """Trains variants of a run with several seeds, and compares them.

    They are compared seed by seed.

    Args:
        study (STUDY): a YAML file; run the same command again to continue a study.
        dry_run: start nothing; print what would be trained, and compare what is finished.
        figure (FILE): plot the comparison in FILE (.pdf, .svg or .png).
    """
    check_json_path(json)
    with results(json) as show:
        loaded, frame = run_study(study, dry_run=dry_run, figure=figure)
        from polyad.train import study as studies

        show(studies.to_json(loaded, frame), studies.result_text(loaded, frame))


def run_study(
    file: str | Path, *, dry_run: bool = False, figure: str | Path | None = None
) -> tuple["Study", "pandas.DataFrame"]:
    """Runs a study; `polyad.study` in Python.

    Args:
        file: the study.
        dry_run: see `study`.
        figure: see `study`.

    Returns:
        The study, and a row for each of its runs.
    """
    from polyad.train import study as studies

    if figure is not None:
        check_result_file("--figure", Path(figure), (".pdf", ".svg", ".png"))
    loaded = studies.load_study(Path(file))
    if dry_run:
        frame = studies.results_of(loaded)
        say(studies.plan_text(loaded, frame))
    else:
        frame = studies.finish_runs(loaded, run_polyad, say)
    if figure is not None:
        studies.draw(loaded, frame, Path(figure))
        say(f"figure: {figure}")
    return loaded, frame


@command(
    "validate",
    "polyad validate configs/gpt2/124m.yaml --processes 8 --without-data model.vocab_size=50257",
)
def validate(
    config: ConfigFile,
    overrides: Overrides,
    *,
    processes: Positive | None = None,
    without_data: bool = False,
    json: Json = None,
) -> None:
    """Checks a configuration; prints what the run will do and cost.

    Args:
        processes: number of processes that will train; default: WORLD_SIZE, or 1.
        without_data: do not open the data, for a machine without it; needs model.vocab_size to be
            set.
    """
    from polyad.parallel.comm import environment_world_size
    from polyad.train.describe import describe_run, description_table

    with results(json) as show:
        number = processes or environment_world_size()
        description = describe_run(config, overrides, number, with_data=not without_data)
        show(description, description_table(description))


@command(
    "keys",
    "polyad keys",
    "polyad keys train",
    "polyad keys model.feed_forward.top_k",
)
def keys(key: str | None = None, *, study: bool = False) -> None:
    """Explains configuration keys: type, default and meaning.

    Any of a run's keys can be set in its YAML file, or on the command line as key=value.

    Args:
        key (KEY): a section or a key; default: all sections.
        study: keys of a study's file, in place of a run's.
    """
    from polyad.train.config import text
    from polyad.train.config.run import FROM, FROM_IN_WORDS, RunConfig
    from polyad.train.config.text import as_text, find_keys, sections
    from polyad.train.errors import ConfigError
    from polyad.train.results import aligned
    from polyad.train.study import StudyConfig

    kind = StudyConfig if study else RunConfig
    chosen = sections(kind)
    with only_results_on_stdout() as stdout:
        if key is None and len(chosen) > 1:
            rows = [(each.title, " ".join(each.about.split())) for each in chosen]
            last = "`polyad keys SECTION` explains its keys."
            stdout.write("\n".join([*aligned(rows, "<"), "", last]) + "\n")
            return
        if key == FROM:
            stdout.write(f"{FROM_IN_WORDS}\n")
            return
        if key is not None:
            chosen = find_keys(chosen, key)
            if not chosen:
                near = nearest(key, sorted(text.keys(kind)))
                raise ConfigError(f"{key}: there is no such key{near}")
        stdout.write("\n\n".join(map(as_text, chosen)) + "\n")


@command("schema", "polyad schema > polyad.schema.json", "polyad schema study > study.schema.json")
def schema(kind: Literal["run", "study"] = "run") -> None:
    """Prints the JSON Schema of configuration files, for editors.

    Args:
        kind: schema of a file for `polyad train` (run, the default) or for `polyad study`.
    """
    sys.stdout.write(schema_text(kind))


def schema_text(kind: Literal["run", "study"]) -> str:
    """The schema of a file for `polyad train`, or for `polyad study`, as it lies in `configs/`."""
    import json

    from polyad.train.config.run import RunConfig
    from polyad.train.config.text import schema_of
    from polyad.train.study import StudyConfig

    if kind == "run":
        tree = schema_of(RunConfig, "A run of Polyad")
    else:
        tree = schema_of(StudyConfig, "A study of Polyad")
    return json.dumps(tree, indent=1) + "\n"


@command(
    "doctor",
    "polyad doctor --processes-per-node 2",
    "polyad doctor configs/quickstart/gpt2.yaml --processes-per-node 2 data.path=runs/stdlib",
)
@dataclass(frozen=True, kw_only=True)
class Doctor(Launcher):
    """Checks hosts for what would break a run or slow it down.

    Args:
        config (CONFIG): configuration of a run, to check its data too.
    """

    config: Annotated[Path | None, Argument(nargs="?")] = field(kw_only=False)
    json: Json = None

    @property
    def command(self) -> Sequence[str]:
        """The command with its options."""
        return ("doctor", *(["--json", self.json] if self.json else []))

    def run(self) -> int | None:
        """Starts the processes, or checks this one."""
        from polyad.launch.doctor import check, examine, table

        check_json_path(self.json)
        end_with_launcher()
        if "RANK" not in os.environ:  # torchrun has not started this process
            return replace(self, processes_per_node=self.processes_per_node or 1).start()
        with results(self.json) as show:
            result = examine(self.config, self.overrides)
            if result is not None:
                show(result, table(result))
                check(result)
        return None


@command("configs", "polyad configs", "polyad configs configs/gpt2/124m-smoe-16.yaml > my-run.yaml")
def configs(name: Path | None = None) -> None:
    """Lists the configurations that come with Polyad, or prints one.

    Args:
        name (NAME): the one to print; default: a list of all.
    """
    import shutil
    import textwrap

    from polyad.train.config.run import SHIPPED, find_config, near_config, shipped_configs
    from polyad.train.errors import ConfigError
    from polyad.train.results import aligned

    with only_results_on_stdout() as stdout:
        if name is not None:
            file = find_config(name)
            if not file.is_file():
                raise ConfigError(f"{name}: no such configuration{near_config(name)}")
            stdout.write(file.read_text(encoding="utf-8"))
            return
        rows = sorted(
            (file.relative_to(SHIPPED).with_suffix("").as_posix(), _purpose(file))
            for file in shipped_configs()
        )
        width = shutil.get_terminal_size().columns - max(len(name) for name, _ in rows) - 3
        short = [
            [name, textwrap.shorten(about, max(width, 72), placeholder="...")]
            for name, about in rows
        ]
        stdout.write("\n".join(aligned(short, "<")) + "\n")


def _purpose(config: Path) -> str:
    """The comment with which a configuration begins, up to its first empty line."""
    lines = config.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#")][1:]
    return " ".join(comment[: comment.index("")] if "" in comment else comment)


@command(
    "verify-layout",
    "polyad verify-layout configs/gpt2/124m-smoe-16.yaml --processes 2 "
    "parallel.expert_parallel_size=2",
)
def verify_layout(
    config: ConfigOrFolder,
    overrides: Overrides,
    *,
    processes: Positive | None = None,
    json: Json = None,
) -> None:
    """Checks that a parallel layout trains as one process does.

    Compares losses, gradients and weights.

    Args:
        processes: number of processes on this machine; default: those that torchrun has started.
    """
    from polyad.launch.torchrun import become_processes

    end_with_launcher()
    from polyad.parallel.comm import environment_world_size, shutdown
    from polyad.train.errors import ConfigError
    from polyad.train.reading import config_at
    from polyad.train.verify_layout import check, small_config, table, verify

    check_json_path(json)
    started = environment_world_size()
    number = processes or started
    if number < 2 or started not in (1, number):
        least = "it must be at least 2" if started == 1 else f"{started} processes were started"
        raise ConfigError(f"--processes: {number} is not allowed; {least}")
    original = config_at(config, overrides, number)
    small = small_config(original, number)
    if started == 1:
        become_processes(number)
    with results(json) as show:
        result = verify(small, Path(original.run.folder))
        shutdown()
        if result is not None:
            show(result, table(result))
            check(result)
