"""The command line of the validator; reached as `python -m hp_core.rules.validate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_core.platform import get_platform
from hp_core.rules.registry import nearest_names, rule_names
from hp_core.testing.validator.combinations import MESHES
from hp_core.testing.validator.golden import Golden, default_folder
from hp_core.testing.validator.missing import find_missing
from hp_core.testing.validator.report import print_report, progress_bar
from hp_core.testing.validator.runs import family, plan_tasks, validate
from hp_core.testing.validator.samples import unsampled_inplace, unsampled_rules

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code: 0 if nothing differs, 1 if something does, 2 if it was called wrongly."""
    options = _parser().parse_args(arguments)
    table = get_platform().op_samples().table()
    if options.missing:
        return _print_missing()
    wanted = set(options.op)
    samples = [sample for sample in table if not wanted or {sample.op, family(sample.op)} & wanted]
    unknown = wanted - {name for sample in samples for name in (sample.op, family(sample.op))}
    for name in sorted(unknown):
        near = ", ".join(nearest_names(name))
        print(f"no samples of {name!r}" + (f"; did you mean {near}?" if near else ""), file=sys.stderr)
    if unknown:
        return 2
    if options.list:
        for sample in samples:
            print(f"{sample.op}: {sample.call} @ {sample.operands}")
        return 0

    tasks = plan_tasks(samples, options.mesh or list(MESHES), quick=options.quick)
    with progress_bar(len(tasks)) as progress:
        validation = validate(tasks, exhaustive=options.exhaustive, progress=progress)
    unsampled = [] if wanted else [*unsampled_rules(), *(f"{name}_" for name in unsampled_inplace())]
    folder = options.golden or default_folder()
    differences = []
    if options.update:
        if folder is None:
            print("no golden record beside an installed package; say where with --golden", file=sys.stderr)
            return 2
        Golden(folder).update(validation.findings, table)
    elif folder is not None:
        differences = Golden(folder).differences(validation.findings)
    print_report(validation, differences, unsampled)
    return 1 if validation.faults or differences or unsampled else 0


def _print_missing() -> int:
    """What the framework's own distributed library has and neither a rule nor the fallback covers."""
    missing = find_missing()
    for name, why in missing.items():
        print(f"{name}: {why}")
    print(
        f"{len(missing)} ops of the framework's own distributed library can't run; {len(rule_names())} ops have rules"
    )
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hp_core.rules.validate",
        description="Check sharding rules against dense ops, in every combination of layouts, on ranks of this machine. All of it "
        "takes about half an hour on two cores, --quick four minutes.",
    )
    parser.add_argument("op", nargs="*", help="ops, or families of rules such as 'reduce'; default all")
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="mesh; may be given twice; default all")
    parser.add_argument("--update", action="store_true", help="rewrite the golden record of what was run")
    parser.add_argument("--golden", type=Path, help="folder of the golden record; default that of the source tree")
    parser.add_argument("--list", action="store_true", help="print the calls, run nothing")
    parser.add_argument("--missing", action="store_true", help="list what the framework's own library has and we don't")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="a fixed choice of combinations, as the test suite runs")
    depth.add_argument(
        "--exhaustive", action="store_true", help="all combinations of three and more operands, too; hours"
    )
    return parser
