"""Read an out-of-memory message, in any form PyTorch has printed since 1.0, and say what it is where it is none. No torch.

The numbers are read from the text with its white space taken out, so that no line break, quoting or colour code can part them:
c10/cuda/CUDACachingAllocator.cpp (and its copies for HIP, XPU and NPU), CUDAMallocAsyncAllocator.cpp, MPSAllocator.mm,
c10/core/impl/alloc_cpu.cpp. A printed size stands for an interval, and the sizes are held against each other (`checks.py`).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise

from explorer.advice import hostlog, otherwise
from explorer.advice.checks import checked
from explorer.advice.message import Form, Kind, Message, Size
from explorer.errors import BadInput
from explorer.jsonfile import LARGEST_BYTES


def read(text: str) -> Message:
    """What a text says of memory that ran out; kind "none" where it says nothing. Raises BadInput where it is over 1 MiB."""
    if len(text) > LARGEST_BYTES:
        raise BadInput("message", "is over 1 MiB; paste the lines around \"out of memory\"")
    lines = _plain(_excerpt(text))
    packed = re.sub(r"\s+", "", lines)
    found = [_sized(packed[start:end]) for start, end in _spans(packed)]
    if found:
        return checked(max(found, key=_fullness), len(found))
    return _unsized(lines)


# --- text

_MARKS_OF_TROUBLE = re.compile(r"allocat|Virtual Memory|Error\b|Exception\b|assert|\bnan\b|time(?:d )?out|mismatch|space left|memory|menory|\bout\b|status_|kill|-9\b|137\b|/dev/shm|bus error|sigbus|alloc", re.IGNORECASE)
_BEFORE, _AFTER, _ENOUGH = 400, 4000, 1 << 17


def _excerpt(text: str) -> str:
    """Of a long log, what stands near words of trouble: its beginning and its end where even that is long."""
    if len(text) <= _ENOUGH:
        return text
    parts, end = [], 0
    for mark in _MARKS_OF_TROUBLE.finditer(text):
        if mark.end() + _AFTER > end:
            parts.append(text[max(end, mark.start() - _BEFORE) : mark.end() + _AFTER])
            end = mark.end() + _AFTER
    near = "".join(parts)
    return near if len(near) <= _ENOUGH else f"{near[: _ENOUGH // 2]}\n{near[-_ENOUGH // 2 :]}"


_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033|\^\[)?\[\d{1,3}(?:;\d{1,3})*m|\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^[ \t]*(?:>+|\||E {2,}|\[(?:rank|default|\d)\w{0,8}\]:|\(\w{1,40} pid=\d{1,12}[^)\n]{0,60}\)|[\w.-]{1,40} +\|)[ \t]?", re.MULTILINE)
_TAG = re.compile(r"</?(?:br|span|p|code|pre|div|b|i|em|strong|blockquote)\b[^<>\n]{0,80}>", re.IGNORECASE)
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")


def _plain(text: str) -> str:
    """The text without colours, mark-up, quoting and the prefixes that launchers put before lines."""
    text = _COLOUR.sub("", html.unescape(text) if "&" in text else text)
    text = _INVISIBLE.sub("", text).replace("\\r", "").replace("\\n", "\n").replace("\\t", " ")
    text = _TAG.sub(" ", text).translate(_MARKS)
    for _ in range(3):  # a quoted line of a rank has two prefixes, a mail's three
        text = _PREFIX.sub("", text)
    return text


_MARKS = str.maketrans({"*": None, "`": None, "\u00a0": " ", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\r": "\n"})

_NUMBER = r"(?-i:(?=[OolI|]{0,9}\d|\d)([\dOolI|]{1,15}(?:[.,][\dOolI|]{1,6})?))"
_UNIT = r"(?:(?:([KMGT])[il1|!]?(?:[B8ß]|\Z))|(bytes?))"
_SIZE = f"{_NUMBER}{_UNIT}"
_DIGITS = str.maketrans("OolI|,", "00111.")
"""What a scan takes for digits."""
_SCALES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""MPS writes GB and means 2^30 too (MPSAllocator.mm, `format_size`)."""


def _size(number: str, unit: str | None) -> Size:
    digits = number.translate(_DIGITS)
    scale = _SCALES[unit.upper()] if unit else 1
    _, point, decimals = digits.partition(".")
    half = 0.0 if scale == 1 else 0.5 * scale / 10 ** len(decimals)
    middle = float(digits) * scale
    if middle == 0:
        half = 0.0  # 0 bytes is no rounding
    return Size(bytes=round(middle), least=max(0, int(middle - half)), most=int(middle + half) + (half > 0))


# --- messages with sizes

_TRIED = re.compile(r"(?<!you)tr[i1l|]edt[o0]a[l1I|]{2}[o0]cate", re.IGNORECASE)
_OUT = re.compile(r"(\w{0,12}?)(?:backend)?[o0]ut[o0]f([a-z0-9]{6})(?=[^a-z0-9]|tr[i1l]ed)", re.IGNORECASE)
_ASYNC = re.compile(r"Allocationondevice(\d{1,3})wouldexceedallowedmemory", re.IGNORECASE)
_LONGEST = 20_000
_NO_LIMIT = 1 << 60
"""cudaMallocAsync prints its largest number where no limit is set."""


def _spans(packed: str) -> Iterator[tuple[int, int]]:
    """Where messages with a request begin and end: from the words "out of memory", or from "Tried to allocate" where those were cut off."""
    starts = [m.start() for m in _ASYNC.finditer(packed)]
    last = -1
    for tried in _TRIED.finditer(packed):
        before = max(last, tried.start() - 200)
        words = [m for m in _OUT.finditer(packed, max(0, before), tried.start() + 5) if _is_memory(m[2])]
        starts.append(words[-1].start() if words else tried.start())
        last = tried.end()
    starts.sort()
    for start, following in pairwise([*starts, len(packed)]):
        yield start, min(following, start + _LONGEST)


def _is_memory(word: str) -> bool:
    return bool(get_close_matches(word.lower(), ["memory"], 1, 0.7))


def _pattern(*forms: str) -> re.Pattern[str]:
    """Forms with SIZE in them, each with two groups for it and one for bytes."""
    return re.compile("|".join(form.replace("SIZE", _SIZE) for form in forms), re.IGNORECASE)


_FIELDS = {
    "requested": _pattern(rf"{_TRIED.pattern}SIZE", r"Requested:SIZE"),
    "capacity": _pattern(r"SIZEt[o0]ta[l1]capac", r"t[o0]ta[l1]capac\w{0,4}[o0]fSIZE", r"Devicelimit:SIZE"),
    "free": _pattern(r"SIZEfree(?![a-z(])", r"[o0]fwhichSIZE", r"Free\(accordingtoCUDA\):SIZE"),
    "allocated": _pattern(r"SIZEa[l1]ready", r"SIZEisa[l1]{2}[o0]catedby", r"a[l1]{2}[o0]catedmem[o0]rySIZE", r"MPSallocated:SIZE", r"Currentlyallocated:SIZE"),
    "total": _pattern(r"SIZEreservedint[o0]ta[l1]"),
    "cached": _pattern(r"SIZEcached", r"SIZEisreservedby"),
    "process": _pattern(r"thisprocesshasSIZE"),
    "private_pools": _pattern(r"SIZEa[l1]{2}[o0]catedinprivate"),
    "limit": _pattern(r"SIZEa[l1]{2}[o0]wed", r"maxallowed:SIZE", r"PyTorchlimit\(setbyuser-suppliedmemoryfraction\):SIZE"),
    "beside": _pattern(r"otherallocations:SIZE"),
}
_OTHERS = re.compile(rf"Process(\d{{1,12}})has{_SIZE}", re.IGNORECASE)
_DEVICE = re.compile(r"\([A-Z]{3,4}(?-i:([\dOlI|]{1,3}));|GPU(\d{1,3})hasat[o0]ta[l1]|device(\d{1,3})would", re.IGNORECASE)


def _sized(span: str) -> Message:
    """One message, from where it begins to where the next one does."""
    found = {name: size for name, pattern in _FIELDS.items() if (size := _first(pattern, span)) is not None}
    total, cached = found.pop("total", None), found.pop("cached", None)
    if "limit" in found and found["limit"].bytes > _NO_LIMIT:
        del found["limit"]
    allocated = found.get("allocated")
    reserved = total if total is not None else allocated + cached if allocated is not None and cached is not None else None
    device = _DEVICE.search(span)
    form: Form = "reserved" if total is not None else "in use" if re.search(r"hasat[o0]ta[l1]capac", span, re.IGNORECASE) else "cached" if cached is not None else "other"
    return Message(
        kind=_kind(span), form=form, reserved=reserved, **found,
        others=tuple((int(m[1]), _size(m[2], m[3])) for m in _OTHERS.finditer(span)),
        device_index=int(next(group for group in device.groups() if group).translate(_DIGITS)) if device else None,
    )


def _first(pattern: re.Pattern[str], span: str) -> Size | None:
    match = pattern.search(span)
    if match is None:
        return None
    groups = match.groups()
    at = next(i for i in range(0, len(groups), 3) if groups[i] is not None)
    return _size(groups[at], groups[at + 1])


_KINDS: dict[str, Kind] = {"CUDA": "cuda", "HIP": "hip", "MPS": "mps", "XPU": "xpu", "NPU": "npu"}


def _kind(span: str) -> Kind:
    """By the word before "out of memory", else by what else only one backend prints."""
    words = _OUT.search(span[:60])
    before = words[1].upper().removesuffix("BACKEND") if words else ""
    known = next((name for name in _KINDS if before.endswith(name)), None) or next(iter(get_close_matches(before[-4:], _KINDS, 1, 0.6)), None)
    if known is None:
        known = next((name for name, mark in (("HIP", "HIPGraphs"), ("NPU", "(NPU"), ("MPS", "MPSallocated"), ("XPU", "(XPU")) if mark in span), "CUDA")
    return _KINDS[known]


def _fullness(message: Message) -> int:
    return sum(getattr(message, name) is not None for name in ("requested", "capacity", "free", "allocated", "reserved", "process"))


# --- messages without

_BYTES = re.compile(r"(?:you tried to allocate|CUDA calloc|\(size) (\d{1,18})\b|Failed to CUDA \w+ (\d{1,18}) bytes")
_CASES: tuple[tuple[Kind, str, str], ...] = (
    ("cublas", "library", r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_INTERNAL_ERROR|unable to find (?:an engine|a valid cuDNN)|CUFFT_ALLOC_FAILED|(?:cu|roc|hip)blas\w{0,12} ?error.{0,40}alloc"),
    ("none", "shared-memory", r"/dev/shm|unable to write to file </torch_|\bbus error\b|SIGBUS|shared memory object|insufficient shared memory|out of shared memory|shm-size"),
    ("nccl", "library", r"NCCL.{0,200}?(?:out of memory|calloc|cudaMalloc)|ncclUnhandledCudaError.{0,200}?(?:memory|calloc)"),
    ("pinned", "host-request", r"cudaHost(?:Alloc|Register)|pin_memory.{0,400}?(?:out of memory|memoryallocation)|(?:out of memory|memoryallocation).{0,400}?pin_memory|\bmlock\b.{0,80}?(?:fail|cannot|denied)"),
    ("host", "host-request", r"DefaultCPUAllocator|std::bad_alloc|\bMemoryError\b|(?:cannot|can't|unable to) allocate memory|Unable to allocate [\d.]{1,12} [KMGT]i?B|paging file is too small|WinError 1455"),
    ("hip", "device", r"HIP error: out of memory|hipErrorOutOfMemory|hipErrorMemoryAllocation"),
    ("xpu", "device", r"XPU out of memory|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|(?:PI|UR)_ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY)"),
    ("npu", "device", r"NPU out of memory|aclrtMalloc.{0,80}?fail"),
    ("mps", "device", r"MPS backend out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    ("cuda", "device", r"CUDA error: out of memory|CUDA out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|cuda runtime error \(2\)|torch(?:\.cuda)?\.OutOfMemoryError"),
)
_FLUSHES = re.compile(r"allocator cache flushes since last step", re.IGNORECASE)
_COMPILED = tuple((kind, cause, re.compile(pattern, re.IGNORECASE)) for kind, cause, pattern in _CASES)


def _unsized(lines: str) -> Message:
    """By the first kind whose words the text has: what is nearest to the device first, an error that is none of memory last."""
    text = " ".join(lines.split())
    asserted = otherwise.ASSERTED.search(text)  # every CUDA call after it fails, cuBLAS's first
    for kind, cause, pattern in _COMPILED:
        if pattern.search(text) and not (asserted and cause == "library"):
            asked = _BYTES.search(text) if kind in ("host", "nccl", "none") else None
            number = int(asked[1] or asked[2]) if asked else None
            return _on_host(Message(kind=kind, cause=cause, requested=None if number is None else Size(bytes=number, least=number, most=number)), text)
    if hostlog.killed(text):
        return _on_host(Message(kind="host", cause="killed"), text)
    other = otherwise.find(lines)
    if other is None and hostlog.ended_while_full(text):
        return _on_host(Message(kind="host", cause="killed"), text)
    if other is not None:
        return Message(kind="none", cause=other[0], other=other[1])
    if _FLUSHES.search(text):
        return Message(kind="none", cause="cache-flush")
    return _report(text)


def _on_host(message: Message, text: str) -> Message:
    """With what the text says of the host's memory, where that is what ran out."""
    if not message.is_host:
        return message
    used, total = hostlog.memory(text)
    return replace(message, host_used_bytes=used, host_total_bytes=total)


_REPORT = re.compile(r"\bMA (\d{1,6}(?:\.\d{1,4})?) GB +Max_MA \d{1,6}(?:\.\d{1,4})? GB +CA (\d{1,6}(?:\.\d{1,4})?) GB")
"""Of a line of DeepSpeed's `see_memory_usage` (runtime/utils.py), whose GB are GiB."""


def _report(text: str) -> Message:
    """The last line of `see_memory_usage`, which is no error; kind "none" in any case."""
    lines = _REPORT.findall(text)
    if not lines:
        return Message(kind="none")
    allocated, reserved = (_size(number, "G") for number in lines[-1])
    return Message(kind="none", cause="memory-report", allocated=allocated, reserved=reserved, count=len(lines))
