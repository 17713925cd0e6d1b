"""What an out-of-memory message says by itself, before anything is known of the job. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.advice.message import Message, Size
from explorer.advice.remarks import Remark
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
    found = [*_beyond_the_card(m), *_limit(m), *_fragmentation(m), *_others(m)]
    found += [Remark(id=f"impossible-{d.field}", severity="problem", key=d.field, text=f"The message's {d.field} is not believed: {d.text}.") for d in m.doubts]
    if m.requested.bytes in (_ANY_SMALL, _ANY_MIDDLING):
        most = "1 MiB" if m.requested.bytes == _ANY_SMALL else "10 MiB"
        found.append(Remark(id="small-request", severity="note", key="requested", text=f"{human(m.requested.bytes)} is what PyTorch asks for when any tensor of less than {most} finds no room: the card was full, and which tensor came last says nothing."))
    if m.count > 1:
        found.append(Remark(id="several-messages", severity="note", key="", text=f"{m.count} such messages were pasted; the fullest was read."))
    return found


_SENTENCES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("host", "killed"): ("host-killed", "cause", "The process was killed (-9): by the operating system most likely, since host memory ran out, not the GPU's. Offload puts masters, gradients and optimizer states there, and every rank that loads the whole model needs it once more. A scheduler that enforces its own limit (Slurm, a container) or a person's kill ends a process the same way: `dmesg` or the scheduler's log says which it was."),
    ("host", "host-request"): ("host-memory", "cause", "Host memory ran out, not the GPU's: a tensor on the CPU found no room."),
    ("pinned", "host-request"): ("pinned-memory", "cause", "The driver could not lock host memory: this is not the GPU's memory, though the text says CUDA. Pinned blocks are rounded up to powers of two; set pin_memory to false, raise `ulimit -l`, and under WSL its memory limit."),
    ("nccl", "library"): ("nccl-memory", "cause", "NCCL found no GPU memory for its own buffers, which lie outside PyTorch's allocator: PyTorch had taken the card whole. Leave it a GiB or two."),
    ("cublas", "library"): ("library-memory", "cause", "cuBLAS or cuDNN could not make its handle or workspace, mostly because PyTorch had taken the card whole: read it as out of memory, without its numbers."),
    ("none", "shared-memory"): ("shared-memory", "cause", "Shared memory of the host (/dev/shm) is full: this is not GPU memory. Start the container with a larger --shm-size or --ipc=host, or use fewer data-loading workers."),
    ("none", "cache-flush"): ("cache-flush", "hint", "This is a warning, not an error: PyTorch had to return its cache to go on, so the job runs close to the card's limit, and slower for it."),
}
_WITHOUT_NUMBERS = "The driver refused memory outside PyTorch's allocator, which prints no numbers: the card was full, another process had it, or, while memory was pinned, the host could not lock more."


def _not_the_allocator(m: Message) -> Iterator[Remark]:
    if (m.kind, m.cause) in _SENTENCES:
        name, severity, text = _SENTENCES[m.kind, m.cause]
        asked = f" It asked for {human(m.requested.bytes)}." if m.requested is not None else ""
        yield Remark(id=name, severity=severity, key="", text=text + asked)
    elif m.cause == "memory-report":
        yield _report(m)
    elif m.is_gpu:
        yield Remark(id="no-numbers", severity="cause", key="", text=_WITHOUT_NUMBERS)


def _report(m: Message) -> Remark:
    """DeepSpeed's `see_memory_usage`: what MA and CA are, and what lies between them."""
    text = f"DeepSpeed's line says that PyTorch has {human(m.allocated.bytes)} allocated (MA) and holds {human(m.reserved.bytes)} of the card (CA); Max_MA and Max_CA are the most since the line before. "
    text += f"The {human(m.cached_bytes or 0)} between the two are its cache: freed by the model, mostly after loading or offload, not by PyTorch, which gives them out again before it asks for more. nvidia-smi counts CA; torch.cuda.empty_cache() returns the cache, and a model built under zero.Init never fills it."
    return Remark(id="memory-report", severity="hint", key="reserved", text=text)


def _beyond_the_card(m: Message) -> Iterator[Remark]:
    if m.capacity is not None and m.requested.least > m.capacity.most:
        yield Remark(id="larger-than-the-card", severity="cause", key="requested", text=f"One tensor of {human(m.requested.bytes)} was asked for, on a card of {human(m.capacity.bytes)}: nothing that frees other memory can help, the tensor itself must get smaller.")


def _limit(m: Message) -> Iterator[Remark]:
    if m.limit is None:
        return
    if m.kind == "mps":
        yield Remark(id="process-limit", severity="hint", key="limit", text=f"MPS may take {human(m.limit.bytes)} here; PYTORCH_MPS_HIGH_WATERMARK_RATIO sets that, and beyond it the machine swaps.")
        return
    free = "" if m.free is None else f", though {human(m.free.bytes)} of the card is free"
    yield Remark(id="process-limit", severity="cause", key="limit", text=f"This process may take {human(m.limit.bytes)} only{free}: set_per_process_memory_fraction, or what calls it, sets that limit.")


def _fragmentation(m: Message) -> Iterator[Remark]:
    """By the numbers: what is cached and free, against what was asked."""
    if m.cached_bytes is None or m.free is None or m.doubted("free", "capacity", "process") or m.limit is not None:
        return
    there = m.free + (m.reserved - m.allocated)
    sum_ = f"{human(m.cached_bytes)} cached and {human(m.free.bytes)} free are {human(there.bytes)}"
    if m.free.least >= m.requested.most:
        yield Remark(id="free-was-enough", severity="hint", key="free", text=f"{human(m.free.bytes)} was free, more than the {human(m.requested.bytes)} asked for: the driver does not give out its last memory, or another process gave some back meanwhile.")
    elif there.most < m.requested.least:
        yield Remark(id="not-fragmentation", severity="note", key="reserved", text=f"Fragmentation is not the cause: {sum_}, less than the {human(m.requested.bytes)} asked for. max_split_size_mb and expandable_segments cannot help.")
    else:
        surely = "would have been enough" if there.least >= m.requested.most else "may just have been enough"
        yield Remark(id="fragmentation", severity="hint", key="reserved", text=f"Fragmentation explains this one request: {sum_}, which {surely} for {human(m.requested.bytes)} in one piece. {_way_out(m)} It gives {human(m.cached_bytes)} at most, and nothing towards the next larger batch.")


def _way_out(m: Message) -> str:
    if m.form in ("reserved", "cached"):
        return "max_split_size_mb may let it through; expandable_segments, which does so better, needs PyTorch 2.1."
    return "expandable_segments:True may let it through."


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
