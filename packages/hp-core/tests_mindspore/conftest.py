"""Settings of the tests that need MindSpore: they have an environment of their own, and never see the torch platform."""

from __future__ import annotations

import os

os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"
# MindSpore tells of every op that it places; only errors matter here.
os.environ.setdefault("GLOG_v", "3")
