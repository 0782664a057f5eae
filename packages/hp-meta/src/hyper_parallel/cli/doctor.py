"""`hyper-parallel doctor`: the doctor's own command line below that of the umbrella.

The doctor must work without click, so its options are argparse's (`hyper_parallel.doctor.command`) and handed through.
"""

from __future__ import annotations

import click

__all__ = ["doctor"]


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
    short_help="Say what keeps HyperParallel from running here, and what mends it.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Look at this machine; `hyper-parallel doctor --help` shows the options."""
    from hyper_parallel.doctor.command import main

    context.exit(main(arguments, program="hyper-parallel doctor"))
