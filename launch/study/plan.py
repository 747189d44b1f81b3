"""What a study will train: the sizes of its variants, and the state of every run."""

from pathlib import Path
from typing import Any

from polyad.launch.study.choice import Results, choose
from polyad.launch.study.data import model_of
from polyad.launch.study.measures import all_measures
from polyad.launch.study.state import finished_runs, unfinished
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.keeping import complete_checkpoints
from polyad.train.config.plan import open_plan, plan_run
from polyad.train.config.rules import validate
from polyad.train.forecast.describe import describe
from polyad.train.study.study import Run, Study


def planned(study: Study) -> dict[str, Any]:
    """Plans the study, and checks every run that is not finished, as far as it is known.

    Args:
        study: whose data is prepared.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    results = finished_runs(study)
    plan = plan_of(study, results)
    for run in unfinished(study, results):
        base = Path(study.config.base)
        if all((other.name, run.seed) in results for other in run.sources.values()):
            plan_run(base, run.overrides, 1)
        else:
            open_plan(base, run.checked_overrides, 1)
    return plan


def plan_of(study: Study, results: Results) -> dict[str, Any]:
    """What a study will train and what of it stands.

    Args:
        study: its data need not be prepared.
        results: of finished runs.

    Returns:
        JSON values.
    """
    unit, chosen = study.task.unit.name, choose(study, results)
    variants, models = {}, _models(study)
    for name, variant in study.variants.items():
        config = variant.config.model_copy(update={"model": models[name]})
        described = describe(config, validate(config, 1))
        variants[name] = {
            key: described["model"][key]
            for key in ("parameters", "active_parameters", f"flops_per_{unit}")
        } | {"training": described["training"]}
    measures = all_measures(study, chosen)
    return {
        "study": str(study.file),
        "folder": str(study.folder),
        "baseline": study.config.baseline,
        "unit": unit,
        "scores": [score._asdict() for score in study.task.scores],
        "validation_score": study.task.validation_score,
        "higher_is_better": study.task.higher_is_better,
        "seeds": study.config.seeds,
        "swept_seeds": study.swept_seeds,
        "groups": {name: [v.name for v in points] for name, points in study.groups.items()},
        "from_runs": study.config.from_runs,
        "variants": variants,
        "num_runs": study.num_runs,
        "runs": [
            {
                "variant": run.variant.name,
                "seed": run.seed,
                "finished": run.result_file.exists(),
                "step": newest_step(run),
            }
            for run in study.runs(chosen)
        ],
        "measures": {
            "wanted": len(measures),
            "taken": sum(measure.read() is not None for measure in measures),
        },
    }


def _models(study: Study) -> dict[str, ModelSettings]:
    """The model of each variant, with what the data decides; once for all that open the same."""
    opened: dict[str, ModelSettings] = {}
    found = {}
    for name, variant in study.variants.items():
        key = repr(variant.config.for_task())
        if key not in opened:
            opened[key] = model_of(study, variant)
        found[name] = opened[key]
    return found


def newest_step(run: Run) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    found = complete_checkpoints(run.folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0
