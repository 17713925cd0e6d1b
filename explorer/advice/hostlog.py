"""What a log says of the host: how much of its memory was in use, and that a process was killed. No torch.

`CPU Virtual Memory` is a line of DeepSpeed's `see_memory_usage` (runtime/utils.py): psutil's total less available, in GiB, and its
part of the total, so the two give the host's memory. The kernel, Slurm, Kubernetes and Ray say by themselves that memory ran out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from explorer.units import GiB, KiB


class HostMemory(NamedTuple):
    """Bytes of the host's memory that were in use and that it has, as last said; None where the text does not say."""

    used_bytes: int | None
    total_bytes: int | None


_NUMBER = r"(\d{1,7}(?:\.\d{1,6})?)"
_USED = re.compile(rf"CPU\s+Virtual\s+Memory:?\s+used\s*=\s*{_NUMBER}\s*GB,?\s+percent\s*=\s*{_NUMBER}\s*%", re.IGNORECASE)
_RAY = re.compile(rf"Memory on the node .{{0,120}}? was {_NUMBER} ?GB / {_NUMBER} ?GB", re.IGNORECASE)
_RESIDENT = re.compile(r"Killed process \d{1,12}.{0,200}?anon-rss:(\d{1,15})kB", re.IGNORECASE)
_FORCED = re.compile(r"forcefully exit\w{0,6} via .{0,20}?SIGKILL|via SIGTERM,.{0,60}?SIGKILL", re.IGNORECASE)
"""torchrun's own end of ranks that do not heed SIGTERM, after another one has failed."""
_KILLED = re.compile(
    r"(?:return ?code|exit ?code|exitcode|exit status|exited with)\D{0,12}(?:-9\b|137\b)|SIGKILL\b|signal 9\b|signal: Killed\b|oom[-_ ]?kill|OOMKilled|oom_reaper"
    r"|Out of memory: Kill|Memory cgroup out of memory|exceeded (?:job |step )?memory limit|\bKilled\s*$|workers? killed due to memory|node running low on memory",
    re.IGNORECASE,
)
_ENDED = re.compile(r"Killing subprocess", re.IGNORECASE)
_FULL = 0.8
"""Part of the host's memory in use from which on a process that ends without an error was killed for it, most likely."""


def memory(text: str) -> HostMemory:
    """As the text's last such line has it."""
    if lines := _USED.findall(text):
        used, percent = (float(number) for number in lines[-1])
        return HostMemory(round(used * GiB), round(used * GiB * 100 / percent) if percent else None)
    if nodes := _RAY.findall(text):
        used, total = (float(number) for number in nodes[-1])
        return HostMemory(round(used * GiB), round(total * GiB))
    if killed := _RESIDENT.findall(text):
        return HostMemory(int(killed[-1]) * KiB, None)
    return HostMemory(None, None)


def killed(text: str) -> bool:
    """Whether the text says that a process was killed (9), by what does so where memory ran out."""
    return _KILLED.search(_FORCED.sub(" ", text)) is not None


def ended_while_full(text: str) -> bool:
    """Whether the launcher ended its processes while the host's memory was nearly all in use."""
    used, total = memory(text)
    return used is not None and total is not None and used >= _FULL * total and _ENDED.search(text) is not None
