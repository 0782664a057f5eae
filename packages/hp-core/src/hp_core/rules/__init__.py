"""Sharding rules: the mechanism (`rule`), the registry, and one file per family of ops."""
