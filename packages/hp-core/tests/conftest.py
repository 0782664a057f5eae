"""Settings of hp-core's tests.

Property-based tests get no deadline of their own: the machine may be busy. They draw the same examples in every run, so
that a red build can be repeated.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("hp-core", deadline=None, derandomize=True)
settings.load_profile("hp-core")
