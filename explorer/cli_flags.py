"""The flags of `estimate` and `check` that say what a job file says."""

from __future__ import annotations

import argparse

_FLAGS = (
    ("model", "NAME", "a model: a name on the hub, or a folder with its config.json"),
    ("stage", "N", "the ZeRO stage, 0 to 3"),
    ("gpus", "N", "GPUs in all, of every node together"),
    ("nodes", "N", "nodes that these GPUs are of (1)"),
    ("gpu", "CARD", "the card, such as A100-80GB"),
    ("host-ram", "GIB", "host memory of a node, in GiB"),
    ("micro-batch", "N", "samples per GPU and forward"),
    ("sequence", "N", "tokens of a sample"),
    ("lora", "RANK", "LoRA of this rank on every linear layer"),
    ("offload-optimizer", "DEVICE", "cpu or nvme"),
    ("offload-parameters", "DEVICE", "cpu or nvme"),
    ("optimizer", "NAME", "AdamW, Adam, Lion, SGD, adafactor, adamw_8bit, ..."),
    ("precision", "NAME", "bf16, fp16 or fp32"),
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add them; what they say is read by `dsconfig.flags.read`, which names the flag at fault in one sentence."""
    group = command.add_argument_group("the job as flags, which fill in what files do not say")
    for name, metavar, text in _FLAGS:
        group.add_argument(f"--{name}", metavar=metavar, help=text)
    group.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
