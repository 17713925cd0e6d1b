"""The doctor: what is pasted, why it runs out of memory, and what to change. Nothing here draws; nothing here computes memory but by `estimate`."""
