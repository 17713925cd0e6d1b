"""Where cudaMalloc puts a segment."""

from __future__ import annotations


class Addresses:
    """Device addresses that are taken."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, size: int) -> int:
        """The address of `size` bytes."""
        self.next += 1 << 48
        return self.next

    def give(self, address: int, size: int) -> None:
        """cudaFree."""

    def copy(self) -> Addresses:
        other = Addresses()
        other.next = self.next
        return other
