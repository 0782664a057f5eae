"""The command `hyper-parallel`: what can be asked of HyperParallel without a program, a framework or a device.

Each subcommand is one module, imported here; a component is only loaded when a command needs it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

from hyper_parallel.cli.doctor import doctor
from hyper_parallel.cli.schedule import schedule
from hyper_parallel.exports import NAMES

__all__ = ["main"]


def _versions() -> str:
    """The umbrella, its components and the frameworks, each with its installed version."""
    components = {component.replace("_", "-") for components in NAMES.values() for component in components}
    lines = []
    for distribution in ("hyper-parallel", *sorted(components), "torch", "torch-npu", "mindspore"):
        try:
            # A record whose metadata was lost has no version.
            lines.append(f"{distribution} {version(distribution) or '(damaged: its metadata is missing)'}")
        except PackageNotFoundError:
            lines.append(f"{distribution} (not installed)")
        except (KeyError, TypeError, ValueError, OSError):  # what importlib.metadata makes of a damaged record
            lines.append(f"{distribution} (damaged: its metadata is missing)")
    return "\n".join(lines)


def _print_versions(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(_versions())
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_versions,
    help="Show the versions of all components and frameworks.",
)
def main() -> None:
    """HyperParallel: N-D parallel training for PyTorch and MindSpore."""


main.add_command(doctor)
main.add_command(schedule)
