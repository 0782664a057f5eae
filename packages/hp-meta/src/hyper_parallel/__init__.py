"""hyper-parallel: every public name of every HyperParallel component, from one import.

Names are loaded when they are first used (`exports.py` says from where), so `import hyper_parallel` loads no
framework; a name of a component that isn't installed raises an ImportError that says what to install.
"""

from __future__ import annotations

from hyper_parallel.exports import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
