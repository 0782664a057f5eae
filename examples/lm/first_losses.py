"""Prints the first losses of a run on PyTorch, for a run on another framework to be compared with.

python -m lm.first_losses 5 < config.json              in the folder `examples`; the text of `RunConfig.to_json`
"""

from __future__ import annotations

import json
import sys

from .config import RunConfig
from .text import load_standard_library
from .trainer import Trainer


def main() -> None:
    """Read a run from standard input, run its first steps in this process, print a list of losses."""
    config = RunConfig.from_json(sys.stdin.read())
    trainer = Trainer(config, load_standard_library(config.max_bytes, config.sizes.sequence))
    print(json.dumps([trainer.train_step(step).loss for step in range(1, int(sys.argv[1]) + 1)]))


if __name__ == "__main__":
    main()
