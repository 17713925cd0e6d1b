"""What an out-of-memory message says, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["cuda", "hip", "mps", "xpu", "npu", "host", "pinned", "nccl", "cublas", "none"]
Form = Literal["cached", "reserved", "in use", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A size as it was printed: `bytes` is the nearest number, and rounding leaves `least` to `most` open."""

    bytes: int
    least: int
    most: int

    def __add__(self, other: Size) -> Size:
        return Size(bytes=self.bytes + other.bytes, least=self.least + other.least, most=self.most + other.most)

    def __sub__(self, other: Size) -> Size:
        return Size(bytes=self.bytes - other.bytes, least=self.least - other.most, most=self.most - other.least)

    def holds(self, n_bytes: int) -> bool:
        """Whether a number of bytes would be printed so."""
        return self.least <= n_bytes <= self.most


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """A number of the message that cannot be, and why."""

    field: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What a message says. A number that the text does not give is None; one that cannot be is in `doubts`, and nothing is derived from it."""

    kind: Kind
    cause: str = ""
    """Of a message without sizes: "killed", "shared-memory", "cache-flush", "host-request", "library", "device", "memory-report" (no error: DeepSpeed's own lines), a name of otherwise.py for an error that is not about memory, "" where nothing is known."""
    other: str = ""
    """Of an error that is not about memory: what is said of it."""
    form: Form = "other"
    """"cached": torch 1.0 to 1.3, "reserved": 1.4 to 2.0, "in use": 2.1 and later."""
    requested: Size | None = None
    """What was asked of the device: whole 2 MiB, 20 MiB for anything below 10 MiB, 2 MiB for anything up to 1 MiB."""
    capacity: Size | None = None
    free: Size | None = None
    allocated: Size | None = None
    reserved: Size | None = None
    """Always all that PyTorch holds, also where the text prints reserved less allocated."""
    process: Size | None = None
    """All that this process has on the device."""
    private_pools: Size | None = None
    limit: Size | None = None
    """`set_per_process_memory_fraction`'s, or MPS's high watermark."""
    beside: Size | None = None
    """MPS: what else this process has from Metal."""
    others: tuple[tuple[int, Size], ...] = ()
    """(process id, its memory) of the other processes that the driver names."""
    device_index: int | None = None
    doubts: tuple[Doubt, ...] = ()
    host_used_bytes: int | None = None
    """Of a text that says that host memory ran out: how much of it was in use, as its last line has it."""
    host_total_bytes: int | None = None
    """And how much there is."""
    count: int = 1
    """Messages in the text; ranks print one each, and the fullest is read."""

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU's memory ran out, as far as the text says."""
        return self.kind in ("cuda", "hip", "mps", "xpu", "npu")

    @property
    def is_host(self) -> bool:
        """Whether the host's memory ran out, or could not be locked, as far as the text says."""
        return self.kind in ("host", "pinned")

    def doubted(self, *fields: str) -> bool:
        """Whether one of these numbers cannot be."""
        return any(doubt.field in fields for doubt in self.doubts)

    @property
    def cached_bytes(self) -> int | None:
        """Reserved but not allocated."""
        if self.reserved is None or self.allocated is None or self.doubted("reserved", "allocated"):
            return None
        return max(0, (self.reserved - self.allocated).bytes)

    @property
    def other_processes_bytes(self) -> int | None:
        """What the named other processes have."""
        return sum(size.bytes for _, size in self.others) if self.others else None

    @property
    def non_pytorch_bytes(self) -> int | None:
        """What is neither PyTorch's nor free: of this process where the text says what it has, else other processes' too."""
        if self.beside is not None:
            return self.beside.bytes
        if self.reserved is None or self.doubted("reserved", "allocated", "capacity", "free", "process"):
            return None
        if self.process is not None:
            return max(0, (self.process - self.reserved).bytes)
        if self.capacity is None or self.free is None:
            return None
        return max(0, (self.capacity - self.free - self.reserved).bytes - (self.other_processes_bytes or 0))

    def to_json(self) -> dict[str, Any]:
        """The "oom" part of `check`'s answer (docs/contract.md)."""
        sizes = {name: getattr(self, name) for name in ("requested", "capacity", "free", "allocated", "reserved", "limit")}
        found = {f"{name}_bytes": None if size is None else size.bytes for name, size in sizes.items()}
        return {"kind": self.kind, **found, "non_pytorch_bytes": self.non_pytorch_bytes, "other_processes_bytes": self.other_processes_bytes, "device_index": self.device_index}
