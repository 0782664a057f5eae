"""Tests that need MindSpore; a package, so that they can share the oracle."""
