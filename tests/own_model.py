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


class Moody(Stack):
    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return super().forward(x if x.sum() > 0 else -x)


class Preference(nn.Module):
    """As in DPO: what trains is compared with a frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Stack(64, 8), Stack(64, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        with torch.no_grad():
            usual = self.reference(x).loss
        return SimpleNamespace(loss=self.policy(x).loss - usual)


def moody(micro_batch):
    return Moody(64, 8), {"x": torch.zeros(micro_batch, 16, 64)}


def preference(micro_batch):
    return Preference(), {"x": torch.zeros(micro_batch, 16, 64)}


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
