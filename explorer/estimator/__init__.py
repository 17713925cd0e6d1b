"""Replay a recorded training step under DeepSpeed's rules. Needs neither torch nor a GPU, save for recorder.py and standins.py."""
