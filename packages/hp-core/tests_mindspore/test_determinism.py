"""`deterministic` on MindSpore, where it can be set once in a process: so each test is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

BEGIN = """
import os, mindspore as ms, hp_core as hp
def refused(function):
    try:
        function()
    except hp.PlatformError as error:
        print(error)
"""
ONCE = """
os.environ["TE_PARALLEL_COMPILER"] = "0"
refused(lambda: hp.deterministic(1))
print(ms.get_context("deterministic"), os.environ.get("HCCL_DETERMINISTIC"))
del os.environ["TE_PARALLEL_COMPILER"]
hp.deterministic(1)
print(hp.deterministic(2).level, ms.get_context("deterministic"), os.environ["HCCL_DETERMINISTIC"])
refused(lambda: hp.deterministic(1).__enter__())
refused(lambda: hp.deterministic(0))
"""
TURNED_OFF = """
ms.set_deterministic(False)
refused(lambda: hp.deterministic(1))
"""


def lines_of(script: str) -> list[str]:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore", "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_set_once_and_not_taken_back() -> None:
    compiler, untouched, on, context, off = lines_of(ONCE)
    assert "needs TE_PARALLEL_COMPILER=1, but the environment says TE_PARALLEL_COMPILER=0" in compiler
    assert untouched == "OFF None"
    assert on == "2 ON true"
    assert "call deterministic(level) once, at the start of the program" in context
    assert "setting is on, and can be set once in a process" in off


def test_a_setting_of_the_program_that_contradicts_is_refused() -> None:
    [line] = lines_of(TURNED_OFF)
    assert "set_deterministic(False) was called before" in line
