"""From one layout to another: plans as values (`planner`, `steps`) and what a rank runs (`program`)."""

from hp_core.redistribute.planner import explain_redistribute, plan_redistribute
from hp_core.redistribute.program import Program, program_for, redistribute_cache_clear, redistribute_cache_info

__all__ = [
    "Program",
    "explain_redistribute",
    "plan_redistribute",
    "program_for",
    "redistribute_cache_clear",
    "redistribute_cache_info",
]
