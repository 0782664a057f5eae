"""Judges: from the facts of the probes to findings, one module for each group of checks.

A judge looks at nothing but the world it is given, and returns one finding for every check of its group.
"""
