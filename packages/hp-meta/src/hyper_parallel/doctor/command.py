"""The command line of the doctor: `hyper-parallel doctor`, and `python -m hyper_parallel.doctor` where click is missing.

Exit status: 0 all is well, 1 a check failed (with `--strict`: or warned), 2 the command itself was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.doctor.checks import CHECKS
from hyper_parallel.doctor.collectives import BACKENDS, run_collectives
from hyper_parallel.doctor.examine import diagnose
from hyper_parallel.doctor.finding import Report
from hyper_parallel.doctor.render import as_json, as_markdown, as_text
from hyper_parallel.doctor.tags import WheelNameError
from hyper_parallel.doctor.wheel_file import examine_wheel
from hyper_parallel.doctor.world import PROFILES

__all__ = ["main"]

_ABOUT = """Looks at this machine and says what keeps HyperParallel from running, and which command mends it.

Each check has a mark (a tick, ! warning, a cross for a failure, - nothing to look at), a stable name and a remedy.
What is merely absent is skipped, unless the profile needs it."""

_DEFAULTS = {"verbose": False, "json": False, "markdown": False, "strict": False, "timeout": 60.0, "profile": None}


def main(arguments: Sequence[str] | None = None, program: str = "python -m hyper_parallel.doctor") -> int:
    """Run the command.

    Args:
        arguments: those of the command line by default.
        program: how it was called, for its help.

    Returns:
        The exit status; wrong arguments raise SystemExit with 2, as argparse does.
    """
    parser = _parser(program)
    given = parser.parse_args(arguments, argparse.Namespace(**_DEFAULTS))
    if given.list:
        width = max(map(len, CHECKS))
        print("\n".join(f"{check.id:<{width}}  {check.title} ({check.page})" for check in CHECKS.values()))
        return 0
    try:
        report = _report(given)
    except (WheelNameError, FileNotFoundError, IsADirectoryError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # the probes have been ended
        return 130
    _print(report, given)
    return report.exit_code(strict=given.strict)


def _report(given: argparse.Namespace) -> Report:
    if given.command == "wheel":
        return examine_wheel(given.file, timeout=given.timeout)
    if given.command == "run":
        return run_collectives(given.processes, backend=given.backend, profile=given.profile, timeout=given.timeout)
    return diagnose(given.profile, timeout=given.timeout)


def _print(report: Report, given: argparse.Namespace) -> None:
    if given.json:
        text = as_json(report)
    elif given.markdown:
        text = as_markdown(report)
    else:
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        # The timings are what a run is for.
        verbose = given.verbose or given.command == "run"
        text = as_text(report, verbose=verbose, color=color, unicode=encoding.startswith("utf"))
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def _parser(program: str) -> argparse.ArgumentParser:
    # Options work before and after a subcommand; a default of the subcommand would undo what stood before it.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-v", "--verbose", action="store_true", help="show details, and every skipped check")
    form = common.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown, to paste into an issue")
    common.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    common.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="how long each probe may take (60)")
    common.add_argument("--profile", choices=PROFILES, help="what must be there (chosen by the devices that are here)")
    parser = argparse.ArgumentParser(
        prog=program, description=_ABOUT, parents=[common], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list all checks, and do nothing else")
    commands = parser.add_subparsers(dest="command", metavar="[wheel FILE | run]", prog=program)
    wheel = commands.add_parser(
        "wheel", parents=[common], help="why pip refuses a wheel, and how to build one that fits"
    )
    wheel.add_argument("file", type=Path, metavar="FILE.whl")
    run = commands.add_parser(
        "run", parents=[common], help="collectives between real processes, with values and timings"
    )
    run.add_argument("-n", "--processes", type=_count, default=4, metavar="N", help="how many processes (4)")
    run.add_argument("--backend", choices=BACKENDS, help="by the profile, or by the devices that are here, by default")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} should be more than 0 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 256:
        raise argparse.ArgumentTypeError(f"{text} should be 1 to 256 processes")
    return value
