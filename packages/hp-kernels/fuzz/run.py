"""Random calls of the native kernels, right and wrong ones: each must do its work or raise, and never touch other memory.

`nox -s fuzz` builds `_native` with the address and undefined-behaviour sanitizers and runs this under them. A finding ends the
process; the seed that is printed first makes the same calls again.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

from blocks import Array, Blocks, Nonsense
from calls import KERNELS
from mistakes import make_mistake

import hp_kernels.loading

REFUSALS = (ValueError, TypeError, OverflowError, MemoryError)
"""How a call may be refused."""


def main() -> int:
    """Run the calls; the exit status is 1 where a right call was refused, or one ended in an error of another kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kernel")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", type=Path, help="the extension module to load; default: the one that is installed")
    options = parser.parse_args()
    module = hp_kernels.loading.require_native() if options.module is None else load(options.module)
    for kernel in options.kernel or KERNELS:
        print(f"{kernel}: {options.calls} calls, seed {options.seed} ...", flush=True)
        start = time.perf_counter()
        outcomes = run(module, kernel, options.calls, options.seed)
        print(f"{kernel}: {dict(outcomes.most_common())} in {time.perf_counter() - start:.1f} s", flush=True)
    return 0


def load(path: Path) -> ModuleType:
    """The extension module at a path, in place of the installed one."""
    spec = importlib.util.spec_from_file_location("hp_kernels._native", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, kernel: str, calls: int, seed: int) -> Counter[str]:
    """Make random calls of one kernel.

    Returns:
        How many were right and did their work, were wrong and refused, or wrong and taken (a mistake that makes no difference).
    """
    source = random.Random(f"{kernel} {seed}")
    outcomes: Counter[str] = Counter()
    for number in range(calls):
        blocks = Blocks(source)
        call = KERNELS[kernel](source, blocks)
        mistakes = source.choice((0, 1, 1, 1, 2, 3))
        for _ in range(mistakes):
            make_mistake(source, call.arguments)
        if number % 100 == 0:
            module.set_thread_count(source.randint(1, 3))
            module.set_instruction_set(source.choice(module.instruction_sets()))
        try:
            getattr(module, call.name)(*told(call.arguments))
            outcomes["taken" if mistakes else "right"] += 1
        except REFUSALS as error:
            if not mistakes:
                raise AssertionError(
                    f"{kernel}, call {number}: {call.name}{tuple(call.arguments)} was refused"
                ) from error
            outcomes["refused"] += 1
        finally:
            blocks.free()
    return outcomes


def told(arguments: list[object]) -> list[object]:
    """Arguments as `_native` takes them."""
    result: list[object] = []
    for argument in arguments:
        if isinstance(argument, Array):
            result.append(argument.told())
        elif isinstance(argument, Nonsense):
            result.append(argument.parts)
        else:
            result.append(told(argument) if isinstance(argument, list) else argument)
    return result


if __name__ == "__main__":
    sys.exit(main())
