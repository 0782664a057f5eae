"""Tests of redistribution.

`simulate` executes plans on arrays and `brute_force` finds the cheapest cost by exhaustion; neither uses the planner.
"""
