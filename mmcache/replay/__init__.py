"""Replaying traces: reading them, running them, and showing what a cache did for them."""
