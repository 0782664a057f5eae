"""Tests of hp-core that are written once and run on every framework that is installed."""
