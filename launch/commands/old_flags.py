"""Flags of `polyad evaluate` that are commands of their own; they work for one more release."""

import shlex
import sys
from collections.abc import Sequence

from polyad.launch.command import Parser, UsageError
from polyad.launch.machine import is_main

MODES = {
    "--compare": "compare",
    "--specialization": "experts specialize",
    "--knockout": "experts knockout",
    "--rewrite": "experts rewrite",
    "--robustness": "robustness",
}
"""Flags, and the commands that they are."""
NEEDED = {
    "--probe-tokens": ("--compare", "--knockout"),
    "--layers": ("--knockout",),
    "--experts": ("--knockout",),
    "--steer": ("--knockout",),
}
"""Options that are of some of these commands alone."""
REFUSED = {
    "--attack": (None, tuple(MODES)),
    "--leak": (None, tuple(MODES)),
    "--weights": ("trained", ("--compare",)),
    "--base": (None, ("--compare",)),
    "--split": ("validation", ("--robustness",)),
}
"""Options with the value that changes nothing, and the flags that they are not allowed with."""


def in_new_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Translates the command line of `polyad evaluate`, and says on standard error what to type.

    Args:
        words: behind `evaluate`.

    Returns:
        The command, and its words.

    Raises:
        UsageError: flags that do not go together.
    """
    if not {"-h", "--help"}.isdisjoint(words):
        return "evaluate", list(words)
    found, rest = _parser().parse_known_args(list(words))
    given = {f"--{name.replace('_', '-')}": v for name, v in vars(found).items() if v}
    modes = [flag for flag in MODES if flag in given]
    for option, needed in NEEDED.items():
        if option in given and not set(modes) & set(needed):
            value = given[option]
            said = ",".join(value) if isinstance(value, list) else value
            raise UsageError(f"{option}: {said} means nothing without {' or '.join(needed)}")
    if not modes:
        return "evaluate", list(words)
    mode, *others = modes
    for option, (usual, flags) in REFUSED.items():
        if option in given and mode in flags and given[option] != usual:
            raise UsageError(f"{option}: {given[option]} is not allowed with {mode}")
    if others:
        raise UsageError(f"{others[0]}: is not allowed with {mode}")
    name = "experts steer" if "--steer" in given else MODES[mode]
    new = [*rest, *_renamed(mode, given)]
    if is_main():
        line = f"polyad: `evaluate {mode}` is deprecated and will go with the next release; use"
        print(f"{line}: polyad {name} {shlex.join(new)}", file=sys.stderr, flush=True)
    return name, new


def _parser() -> Parser:
    parser = Parser("evaluate", "", "", "polyad evaluate")
    for flag in MODES:
        if flag in ("--specialization", "--knockout"):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, nargs=2 if flag == "--robustness" else None)
    for option in (*NEEDED, *REFUSED):
        how = {"action": "append"} if option == "--steer" else {}
        parser.add_argument(option, **how)  # type: ignore[arg-type]
    return parser


def _renamed(mode: str, given: dict[str, object]) -> list[str]:
    """The options that were taken out of the command line, as the new command calls them."""
    words: list[str] = []
    match given[mode]:
        case [kind, path]:
            words += ["--set", str(kind), "--images", str(path)]
        case str(value):
            words += ["--with" if mode == "--compare" else "--move", value]
    for option in (*NEEDED, *REFUSED):
        values = given.get(option, [])
        name = "--tokens" if option == "--probe-tokens" else option
        for each in values if isinstance(values, list) else [values]:
            if option not in REFUSED or each != REFUSED[option][0]:
                words.append(f"{name}={each}")
    return words
