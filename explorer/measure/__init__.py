"""Run one real training step in a process of its own, and keep what it read."""
