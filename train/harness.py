"""lm-eval's command line with Polyad checkpoints: `--model polyad --model_args checkpoint=RUN`.

lm-eval (0.4) does not discover models outside its own package, so there are two ways:

    python -m polyad.train.harness --model polyad --model_args checkpoint=runs/x --tasks ...
    python -m polyad.train.harness --register        # once in an environment; then
    lm_eval --model polyad --model_args checkpoint=runs/x --tasks ...

The first runs lm-eval's own command line. The second writes a .pth file beside the installed
packages: one line that Python runs at startup, which has an effect only in `lm_eval` processes.
`--unregister` removes it.
"""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from polyad.train.errors import ConfigError, one_line

PTH_FILE = "polyad_lm_eval.pth"
_LINE = (
    "import sys; any("
    "word.replace('\\\\', '/').rsplit('/', 1)[-1].removesuffix('.exe') in ('lm_eval', 'lm-eval') "
    "for word in sys.orig_argv[:5]) "
    "and __import__('polyad.train.harness').train.harness.make_known()\n"
)


def make_known() -> None:
    """Registers `--model polyad` with lm-eval in this process, without heavy imports.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    try:
        import lm_eval.models  # its own models, which lm-eval lists only while none is known
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(
            f"lm-eval cannot be imported ({error}); `pip install -c constraints.txt -e '.[eval]'` "
            f"installs it"
        ) from None
    assert len(lm_eval.models.MODEL_MAPPING) > 0
    if "polyad" not in model_registry:
        model_registry.register("polyad", target="polyad.train.evaluation.lm_eval_adapter:PolyadLM")


def register(folder: Path) -> Path:
    """Registers Polyad with the plain `lm_eval` command.

    Args:
        folder: where packages are installed.

    Returns:
        The file that was written.

    Raises:
        ConfigError: It cannot be written.
    """
    path = folder / PTH_FILE
    try:
        path.write_text(_LINE, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; `python -m polyad.train.harness "
            f"--model polyad ...` needs no such file"
        ) from None
    return path


def main(arguments: Sequence[str]) -> None:
    """Runs lm-eval's command line, or (un)registers."""
    folder = Path(sysconfig.get_path("purelib"))
    if list(arguments) == ["--register"]:
        make_known()
        print(f"`lm_eval --model polyad` now works; wrote {register(folder)}")
        return
    if list(arguments) == ["--unregister"]:
        (folder / PTH_FILE).unlink(missing_ok=True)
        print(f"removed {folder / PTH_FILE}")
        return
    make_known()
    from lm_eval.__main__ import cli_evaluate

    sys.argv[0] = "lm_eval"
    cli_evaluate()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        print(f"polyad: error: {one_line(error)}", file=sys.stderr)
        sys.exit(status)
