"""Takes the trials of a study: how long its variants take, before the first of them is trained."""

import math
from collections.abc import Mapping
from time import monotonic, time

from polyad.data.json_reader import read_json
from polyad.launch.child import STOPPED, Children
from polyad.launch.output import say
from polyad.launch.study.choice import Results
from polyad.launch.study.jobs import shared_cores
from polyad.launch.study.progress import counted, trial_line
from polyad.launch.study.state import finished_runs
from polyad.launch.study.times import Times, left_of
from polyad.train.errors import stopped
from polyad.train.study.study import Run, Study, Variant

OUT = ".trial.json"
"""In the folder of the study; what begins with a dot is in nobody's way."""


def take_trials(
    studies: Mapping[str, Study], times: Mapping[str, Times], until: float = math.inf
) -> None:
    """Takes the trials that are needed to know how long what is left takes, one at a time.

    Args:
        studies: by the names of tasks.
        times: of each; they are kept there.
        until: of `time.monotonic`; no trial begins after it.

    Raises:
        Stopped: or KeyboardInterrupt, as a signal asked.
    """
    wanted = [
        (studies[name], variant, times[name])
        for name in studies
        for variant in _unknown(studies[name], times[name])
    ]
    if not wanted:
        return
    with Children(shared_cores(wanted[0][2].jobs)) as children:
        for number, (study, variant, of_study) in enumerate(wanted, start=1):
            if monotonic() >= until:
                say(f"the time is over: {counted(len(wanted) - number + 1, 'trial')} left out")
                return
            say("\n== " + trial_line(study, variant, number, len(wanted)))
            out = study.folder / OUT
            run = Run(variant=variant, seed=study.config.seeds[0], study=study)
            words = [str(out), str(time()), study.config.split, study.config.base]
            children.start([*words, *run.checked_overrides], module="polyad.launch.study.trial")
            _, status = children.wait()
            number_of_signal = children.signal or (status - 128 if status in STOPPED else 0)
            if number_of_signal:
                raise stopped(number_of_signal, "the same command goes on where it stood")
            if status:
                say(f"the trial of {variant.name} failed: how long it takes is not known")
                continue
            of_study.keep_trial(variant, read_json(out))
            out.unlink()


def _unknown(study: Study, times: Times) -> list[Variant]:
    """One variant of each cost of which something is left, and no time is known."""
    results: Results = finished_runs(study)
    groups = {group for group, _ in left_of(study, results, times)}
    found: dict[str, Variant] = {}
    for variant in study.variants.values():
        if variant.group in groups and times.needs_trial(variant, results):
            found.setdefault(times.costs[variant.name], variant)
    return [*found.values()]
