"""Bytes are integers in code and GiB (2^30) on screen; this is the one place that converts."""

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30


def gib(n_bytes: int) -> float:
    """Bytes as a number of GiB."""
    return n_bytes / GiB


def human(n_bytes: int) -> str:
    """A size for a sentence: "0 B", "512 B", "1.5 MiB", "69.6 GiB"."""
    size = abs(n_bytes)
    for name, unit in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size >= unit / 10 and size >= 1024:
            number = n_bytes / unit
            return f"{number:.1f} {name}" if abs(number) < 100 else f"{number:.0f} {name}"
    return f"{n_bytes} B"


def pytorch_size(n_bytes: int) -> str:
    """A size as PyTorch's out-of-memory text prints it (c10/cuda/CUDACachingAllocator.cpp, `format_size`)."""
    if n_bytes <= 1024:
        return f"{n_bytes} bytes"
    for name, unit in (("KiB", KiB), ("MiB", MiB), ("GiB", GiB)):
        if n_bytes <= unit * 1024 or name == "GiB":
            return f"{n_bytes / unit:.2f} {name}"
    raise AssertionError("unreachable")


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (0 for 0)."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
