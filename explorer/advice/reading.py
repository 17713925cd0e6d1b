"""What an out-of-memory message says by itself, before anything is known of the job. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.advice.backends import remedy
from explorer.advice.message import Message, Size
from explorer.advice.remarks import Remark
from explorer.advice.situation import LITTLE, is_full, situation, together
from explorer.units import GiB, MiB
from explorer.units import pytorch_size as human

_CONTEXT_MOST = 3 * GiB
"""More than a CUDA context with NCCL takes: 1.3 GiB on an H200 (catalog/cards.py), 1.8 in public reports."""
_ANY_SMALL, _ANY_MIDDLING = 2 * MiB, 20 * MiB
"""What PyTorch asks of the device for any tensor up to 1 MiB, and for any below 10 MiB (allocator.py)."""


def remarks(m: Message) -> list[Remark]:
    """In the order in which they matter; empty where the text says nothing of memory."""
    if not m.is_gpu or m.requested is None:
        return [*_not_the_allocator(m)]
    found = [*_by_situation(m), *_others(m)]
    found += [Remark(id=f"impossible-{d.field}", severity="problem", key=d.field, text=f"The message's {d.field} is not believed: {d.text}.") for d in m.doubts]
    if m.requested.bytes in (_ANY_SMALL, _ANY_MIDDLING):
        most = "1 MiB" if m.requested.bytes == _ANY_SMALL else "10 MiB"
        found.append(Remark(id="small-request", severity="note", key="requested", text=f"{human(m.requested.bytes)} is what PyTorch asks for when any tensor of less than {most} finds no room{': the card was full' if is_full(m) else ''}. Which tensor came last says nothing."))
    if m.count > 1:
        found.append(Remark(id="several-messages", severity="note", key="", text=f"{m.count} such messages were pasted; the fullest was read."))
    return found


_SENTENCES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("host", "killed"): ("host-killed", "cause", "The process was killed (-9): by the operating system most likely, since host memory ran out, not the GPU's. Offload puts masters, gradients and optimizer states there, and every rank that loads the whole model needs it once more. A scheduler that enforces its own limit (Slurm, a container) or a person's kill ends a process the same way: `dmesg` or the scheduler's log says which it was."),
    ("host", "host-request"): ("host-memory", "cause", "Host memory ran out, not the GPU's: a tensor on the CPU found no room."),
    ("pinned", "host-request"): ("pinned-memory", "cause", "The driver could not lock host memory: this is not the GPU's memory, though the text says CUDA. Pinned blocks are rounded up to powers of two; set pin_memory to false, raise `ulimit -l`, and under WSL its memory limit."),
    ("nccl", "library"): ("nccl-memory", "cause", "NCCL found no GPU memory for its own buffers, which lie outside PyTorch's allocator: PyTorch had taken the card whole. Leave it a GiB or two."),
    ("cublas", "library"): ("library-memory", "cause", "cuBLAS or cuDNN could not make its handle or workspace. By its words this is not an out-of-memory error, but it mostly is one in disguise: PyTorch had taken the card whole, so that nothing was left for the library. Try half the batch first. If it fails all the same, look for an index out of range before it (CUDA_LAUNCH_BLOCKING=1) and for a library of another CUDA version."),
    ("none", "shared-memory"): ("shared-memory", "cause", "Shared memory of the host (/dev/shm) is full: this is not GPU memory. Start the container with a larger --shm-size or --ipc=host, or use fewer data-loading workers."),
    ("none", "cache-flush"): ("cache-flush", "hint", "This is a warning, not an error: PyTorch had to return its cache to go on, so the job runs close to the card's limit, and slower for it."),
}
_WITHOUT_NUMBERS = "The driver refused memory outside PyTorch's allocator, which prints no numbers: the card was full, another process had it, or, while memory was pinned, the host could not lock more."


def _not_the_allocator(m: Message) -> Iterator[Remark]:
    if m.other:
        yield Remark(id=f"not-memory-{m.cause}", severity="cause", key="", text=m.other)
    elif (m.kind, m.cause) in _SENTENCES:
        name, severity, text = _SENTENCES[m.kind, m.cause]
        asked = f" It asked for {human(m.requested.bytes)}." if m.requested is not None else ""
        yield Remark(id=name, severity=severity, key="", text=text + asked + _host_in_use(m))
    elif m.cause == "memory-report":
        yield _report(m)
    elif m.is_gpu:
        yield Remark(id="no-numbers", severity="cause", key="", text=_WITHOUT_NUMBERS)


def _host_in_use(m: Message) -> str:
    """What the text itself says of the host's memory."""
    if m.host_used_bytes is None:
        return ""
    if m.host_total_bytes is None:
        return f" It had {human(m.host_used_bytes)} of the host's memory when it was killed."
    left = max(0, m.host_total_bytes - m.host_used_bytes)
    return f" The text's last line of it has {human(m.host_used_bytes)} of the host's {human(m.host_total_bytes)} in use ({m.host_used_bytes / m.host_total_bytes:.1%}), so {human(left)} were left."


def _report(m: Message) -> Remark:
    """DeepSpeed's `see_memory_usage`: what MA and CA are, and what lies between them."""
    text = f"DeepSpeed's line says that PyTorch has {human(m.allocated.bytes)} allocated (MA) and holds {human(m.reserved.bytes)} of the card (CA); Max_MA and Max_CA are the most since the line before. "
    text += f"The {human(m.cached_bytes or 0)} between the two are its cache: freed by the model, mostly after loading or offload, not by PyTorch, which gives them out again before it asks for more. nvidia-smi counts CA; torch.cuda.empty_cache() returns the cache, and a model built under zero.Init never fills it."
    return Remark(id="memory-report", severity="hint", key="reserved", text=text)


def _by_situation(m: Message) -> Iterator[Remark]:
    """Which memory ran out, by the numbers: what is cached and free, against what was asked and what may be taken."""
    asked, what = human(m.requested.bytes), situation(m)
    if what == "larger than the card":
        yield Remark(id="larger-than-the-card", severity="cause", key="requested", text=f"One tensor of {asked} was asked for, on a card of {human(m.capacity.bytes)}: to free other memory is not enough, this tensor itself must get smaller or leave the GPU.")
    elif what == "limit":
        yield _limit(m)
    elif what == "free enough":
        yield Remark(id="free-was-enough", severity="hint", key="free", text=f"{human(m.free.bytes)} was free by the driver, more than the {asked} asked for. The driver does not give out its last memory, a limit outside PyTorch may apply (MIG, a container, Windows), or another process gave memory back meanwhile.")
    elif what == "too little together":
        yield Remark(id="not-fragmentation", severity="note", key="reserved", text=f"Fragmentation is not the cause of this request: {_sum(m)}, less than the {asked} asked for. max_split_size_mb and expandable_segments cannot help it.")
    elif what in ("fragments", "maybe fragments"):
        yield fragments(m, remedy(m))


def _limit(m: Message) -> Remark:
    if m.kind == "mps":
        return Remark(id="process-limit", severity="hint", key="limit", text=f"MPS may take {human(m.limit.bytes)} here; PYTORCH_MPS_HIGH_WATERMARK_RATIO sets that, and beyond it the machine swaps.")
    free = "" if m.free is None else f", though {human(m.free.bytes)} of the card is free"
    return Remark(id="process-limit", severity="cause", key="limit", text=f"This process may take {human(m.limit.bytes)} only{free}: set_per_process_memory_fraction, or what calls it, sets that limit.")


def _sum(m: Message) -> str:
    return f"{human(m.cached_bytes)} cached and {human(m.free.bytes)} free are {human(together(m).bytes)}"


def fragments(m: Message, cure: str) -> Remark:
    """Fragmentation explains a full card only where much is cached; else it is one request that it keeps out.

    Of a message whose cached and free memory together hold the request. `cure`: a sentence on what may let it through, or that nothing does.
    """
    asked = human(m.requested.bytes)
    enough = "would have been enough" if situation(m) == "fragments" else "may just have been enough"
    share = m.cached_bytes / m.capacity.bytes if m.capacity is not None and m.capacity.bytes else None
    if share is not None and share <= LITTLE:
        text = f"{_sum(m)}, which {enough} for {asked} in one piece. But the cache is only {share:.1%} of the card, and {human(m.allocated.bytes)} are in use by tensors: fragmentation kept out this one request, and is not why the card is full. {cure}"
    else:
        text = f"Fragmentation explains this one request: {_sum(m)}, which {enough} for {asked} in one piece. {cure}"
    return Remark(id="fragmentation", severity="hint", key="reserved", text=text)


def _others(m: Message) -> Iterator[Remark]:
    beside = m.non_pytorch_bytes
    named = m.other_processes_bytes
    if named:
        count = sum(1 for _, size in m.others if size.bytes)
        yield Remark(id="other-processes", severity="cause" if named > _room(m) else "hint", key="other_processes", text=f"{count} other {'process has' if count == 1 else 'processes have'} {human(named)} of this card: end {'it' if count == 1 else 'them'}, or count on that much less.")
    elif beside is not None and m.process is None and beside > _CONTEXT_MOST and m.kind != "mps":
        yield Remark(id="other-processes", severity="cause" if beside > _room(m) else "hint", key="non_pytorch", text=f"{human(beside)} of this card is neither PyTorch's nor free, far more than a context takes: another process has it.")


def _room(m: Message) -> int:
    """What this process has, against which others are weighed."""
    held: Size | None = m.process or m.reserved
    return held.bytes // 2 if held is not None else 0
