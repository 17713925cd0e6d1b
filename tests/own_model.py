"""A model that is nobody's but ours, for the tests of `estimate(factory=...)`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.float().square().mean())


def build(micro_batch, sequence=16):
    return Stack(64, 8), {"x": torch.zeros(micro_batch, sequence, 64)}


def deaf(micro_batch):
    return Stack(64, 8), {"x": torch.zeros(5, 16, 64)}


def bare(micro_batch):
    return Stack(64, 8)


def broken(micro_batch):
    raise ValueError("no such file")


def fixed():
    return None
