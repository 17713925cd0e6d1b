"""Out-of-memory messages: each of the collected ones with what a person reads in it, then the same under what pasting does to a text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.advice.oom import read
from explorer.errors import BadInput

KiB, MiB, GiB = 1024, 1024**2, 1024**3
TEXT = (Path(__file__).parent / "oom-messages.txt").read_text(encoding="utf-8")
MESSAGES = {int(n): text for n, text in zip(*[iter(re.split(r"===== message (\d+)\n", TEXT)[1:])] * 2, strict=True)}

READINGS = {
    # number: kind, requested, capacity, free, allocated, reserved, device
    1: ("cuda", 7.04 * GiB, 79.15 * GiB, 5.90 * GiB, 68.07 * GiB, 72.14 * GiB, 1),
    3: ("cuda", 160 * MiB, 3.81 * GiB, 55.38 * MiB, 3.08 * GiB, 3.08 * GiB + 9.78 * MiB, 0),
    5: ("cuda", 20 * MiB, 1.96 * GiB, 25.94 * MiB, 967.98 * MiB, 1016 * MiB, 0),
    7: ("cuda", 274 * MiB, 23.70 * GiB, 25.69 * MiB, 21.95 * GiB, 22.28 * GiB, 1),
    9: ("cuda", 978 * MiB, 4.00 * GiB, 0, 1.68 * GiB, 2.72 * GiB, 0),
    11: ("cuda", 26.08 * GiB, 31.75 * GiB, 4.77 * GiB, 26.14 * GiB, 26.15 * GiB, 0),
    13: ("cuda", 3.50 * GiB, 79.35 * GiB, 415.19 * MiB, 77.08 * GiB, 77.54 * GiB, 3),
    15: ("cuda", 172 * MiB, 79.15 * GiB, 56.38 * MiB, 73.14 * GiB, 74.59 * GiB, 0),
    17: ("cuda", 102 * MiB, 39.38 * GiB, 29.81 * MiB, 37.54 * GiB, 38.66 * GiB, 0),
    19: ("cuda", 32 * GiB, 23.69 * GiB, 14.12 * GiB, 9.00 * GiB, 9.00 * GiB + 982.5 * KiB, 0),
    21: ("cuda", 3.39 * GiB, 79.32 * GiB, 2.40 * GiB, 73.28 * GiB, 74.87 * GiB, 1),
    23: ("cuda", 50 * MiB, 44.42 * GiB, 24.69 * MiB, 316.39 * MiB, 454.00 * MiB, 0),
    25: ("cuda", 34.83 * GiB, 44.55 * GiB, 22.25 * GiB, None, None, 0),
    27: ("cuda", 170 * MiB, 31.37 * GiB, 30.19 * MiB, 30.81 * GiB, 30.81 * GiB + 33.90 * MiB, 0),
    29: ("cuda", 512 * MiB, 11.99 * GiB, 0, 23.95 * GiB, 23.95 * GiB + 193.86 * MiB, 0),
    31: ("cuda", 25.96 * GiB, 79.18 * GiB, 23.04 * GiB, 45.89 * GiB, 48.90 * GiB, 4),
    33: ("cuda", 2.97 * GiB, 63.59 * GiB, 0, 107.09 * GiB, 107.09 * GiB + 54.79 * MiB, 0),
    35: ("hip", 2 * MiB, 255.98 * GiB, 244.65 * GiB, 1017.01 * MiB, 1072.00 * MiB, 0),
    37: ("mps", 192 * MiB, None, None, 17.36 * GiB, None, None),
    39: ("xpu", 20 * MiB, 11.93 * GiB, 5.62 * MiB, 10.43 * GiB, 10.43 * GiB + 94.57 * MiB, 0),
    41: ("npu", 260 * MiB, 28.50 * GiB, 149.57 * MiB, 10.24 * GiB, 10.28 * GiB, 0),
    43: ("cuda", None, None, None, None, None, None),
    45: ("nccl", 6291456, None, None, None, None, None),
    47: ("none", 5767520, None, None, None, None, None),
    49: ("host", None, None, None, None, None, None),
    51: ("none", None, None, None, None, None, None),
    53: ("cuda", 16.80 * MiB, 8.0 * GiB, 0, 7.11 * GiB, 7.30 * GiB, 0),
}


def numbers(message):
    return (message.kind, *(getattr(message, name) and getattr(message, name).bytes for name in ("requested", "capacity", "free", "allocated", "reserved")), message.device_index)


def near(found, said):
    """To the byte but for the sum of two rounded numbers."""
    return found == said or (isinstance(said, int | float) and isinstance(found, int) and abs(found - said) <= 2)


def test_every_message_has_a_reading():
    assert set(MESSAGES) == set(READINGS)


@pytest.mark.parametrize("number", READINGS)
def test_a_message_says_what_a_person_reads(number):
    found = numbers(read(MESSAGES[number]))
    assert all(near(a, b) for a, b in zip(found, READINGS[number], strict=True)), found


@pytest.mark.parametrize(
    ("number", "gib"),
    [
        (1, 1.11), (3, 0.666), (5, 0.942), (7, 1.395), (9, 1.28), (17, 0.66), (19, 0.299), (21, 2.05), (23, 0.340), (27, 0.487), (31, 3.12),
        (35, 10.28), (37, 0.599), (39, 1.402), (41, 18.074),
    ],
)
def test_what_neither_pytorch_holds_nor_is_free(number, gib):
    """By hand: this process's less what PyTorch reserves where the text has the former, else the card's less both."""
    assert read(MESSAGES[number]).non_pytorch_bytes / GiB == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(("number", "others"), [
    (19, {2006998: 256 * MiB}),
    (21, {}),  # 76.92 in use beside 74.87 reserved has no room on 79.32: the one process named is this one, seen from outside its container
    (23, {795630: 33.69 * GiB, 796037: 0, 1937219: 1.78 * GiB, 1937288: 860 * MiB, 1937384: 2.51 * GiB, 1937463: 2.23 * GiB, 1938155: 862 * MiB}),
    (31, {7478: 4.08 * GiB}),
    (17, {}),
])
def test_other_processes(number, others):
    message = read(MESSAGES[number])
    assert {n: size.bytes for n, size in message.others} == {n: round(size) for n, size in others.items()}
    assert message.other_processes_bytes == (sum(round(size) for size in others.values()) or None)


def test_the_process_that_a_container_cannot_name_is_this_one():
    assert read(MESSAGES[21]).process.bytes == round(76.92 * GiB)


@pytest.mark.parametrize(("number", "field", "word"), [(29, "allocated", "host memory"), (33, "allocated", "handed back"), (53, "requested", "16.00 MiB")])
def test_what_cannot_be_is_named(number, field, word):
    message = read(MESSAGES[number])
    assert [doubt.field for doubt in message.doubts] == [field]
    assert word in message.doubts[0].text
    assert number == 53 or message.non_pytorch_bytes is None


@pytest.mark.parametrize("number", sorted(set(READINGS) - {29, 33, 53}))
def test_what_can_be_is_believed(number):
    assert not read(MESSAGES[number]).doubts


@pytest.mark.parametrize(("number", "cause"), [(43, "device"), (45, "library"), (47, "shared-memory"), (49, "killed"), (51, "cache-flush"), (1, "")])
def test_the_cause_of_a_message_without_numbers(number, cause):
    assert read(MESSAGES[number]).cause == cause


def test_limits_and_pools():
    assert read(MESSAGES[35]).limit.bytes == round(1.05 * GiB)
    assert read(MESSAGES[35]).private_pools.bytes == 17 * MiB
    assert read(MESSAGES[37]).limit.bytes == round(18.13 * GiB)
    assert read(MESSAGES[31]).private_pools.bytes == round(1.38 * MiB)
    assert read(MESSAGES[33]).private_pools.bytes == round(129.58 * MiB)


def test_a_printed_size_is_an_interval():
    requested = read(MESSAGES[1]).requested
    assert requested.holds(int(7.036 * GiB)) and requested.holds(int(7.044 * GiB))
    assert not requested.holds(int(7.03 * GiB)) and not requested.holds(int(7.05 * GiB))
    zero = read(MESSAGES[9]).free
    assert (zero.least, zero.most) == (0, 0)


@pytest.mark.parametrize(("text", "kind", "cause"), [
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cublas", "library"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "cublas", "library"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).", "none", "shared-memory"),
    ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", "none", "shared-memory"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 18874368 bytes. Error code 12 (Cannot allocate memory)", "host", "host-request"),
    ("torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 9) of binary: python", "host", "killed"),
    ("Out of memory: Killed process 1234 (python3) total-vm:1kB", "host", "killed"),
    ("File \"deepspeed/accelerator/cuda_accelerator.py\", line 257, in pin_memory\n    return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory", "pinned", "host-request"),
    ("RuntimeError: HIP error: out of memory", "hip", "device"),
    ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58", "cuda", "device"),
    ("torch.cuda.OutOfMemoryError", "cuda", "device"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "none", "illegal-access"),
    ("RuntimeError: The size of tensor a (7) must match the size of tensor b (8)", "none", "shape-mismatch"),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.", "none", "kernel-resources"),
    ("", "none", ""),
])
def test_what_is_not_a_gpus_allocator(text, kind, cause):
    message = read(text)
    assert (message.kind, message.cause) == (kind, cause)


def test_the_host_allocators_request():
    assert read("DefaultCPUAllocator: not enough memory: you tried to allocate 9437184 bytes.").requested.bytes == 9437184


def test_the_asynchronous_allocators_form():
    text = (
        "torch.OutOfMemoryError: Allocation on device 2 would exceed allowed memory. (out of memory)\nCurrently allocated     : 8.80 GiB\nRequested               : 105.47 MiB\n"
        "Device limit            : 10.57 GiB\nFree (according to CUDA): 27.31 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
    )
    message = read(text)
    assert (message.kind, message.device_index, message.requested.bytes, message.free.bytes) == ("cuda", 2, round(105.47 * MiB), round(27.31 * MiB))
    assert (message.allocated.bytes, message.capacity.bytes) == (round(8.80 * GiB), round(10.57 * GiB))
    assert message.limit is None and not message.doubts


# --- what pasting does

SPOILT = {
    "wrapped anywhere": lambda t: "\n".join(t[i : i + 17] for i in range(0, len(t), 17)),
    "quoted in a mail": lambda t: "\n".join("> > " + line for line in t.splitlines()),
    "prefixed by a rank": lambda t: "\n".join("[rank12]: " + line for line in t.splitlines()),
    "coloured": lambda t: "\x1b[31m" + t.replace("GiB", "\x1b[1;33mGiB\x1b[0m"),
    "coloured, escape lost": lambda t: "[36m(RayTrainWorker pid=77, ip=10.0.0.1)[0m " + t,
    "in a JSON string": lambda t: '{"stderr": "' + t.replace("\n", "\\n") + '"}',
    "marked up": lambda t: "<pre><code>" + t.replace("&", "&amp;").replace(">", "&gt;") + "</code></pre>",
    "bold": lambda t: t.replace("7.04 GiB", "**7.04 GiB**"),
    "hard spaces": lambda t: t.replace(" ", "\u00a0"),
    "scanned": lambda t: t.replace("memory", "rnemory").replace("7.04 GiB", "7.O4 Gi8").replace("1; 79.15", "l; 79.l5"),
    "capitals": lambda t: t.upper(),
    "among other lines": lambda t: "step 1 of 200, 3 GiB of free disk\n" * 40 + t + "\nTraceback (most recent call last):\n" + "  File x, line 3\n" * 40,
    "from four ranks": lambda t: t * 4,
    "in a long log": lambda t: "loss 1.234 at step 12\n" * 30000 + t,
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_pasting_changes_nothing(spoil):
    assert numbers(read(SPOILT[spoil](MESSAGES[1]))) == numbers(read(MESSAGES[1]))


@pytest.mark.parametrize("number", [21, 31, 39, 41])
@pytest.mark.parametrize("spoil", ["wrapped anywhere", "quoted in a mail", "prefixed by a rank", "in a JSON string", "marked up", "hard spaces"])
def test_nor_in_the_newer_forms(number, spoil):
    assert numbers(read(SPOILT[spoil](MESSAGES[number]))) == numbers(read(MESSAGES[number]))


def test_messages_of_several_ranks_are_counted_and_the_fullest_is_read():
    message = read(MESSAGES[25] + "\n" + MESSAGES[17])
    assert message.count == 2
    assert message.requested.bytes == 102 * MiB


def test_cut_anywhere_it_never_invents():
    """Every beginning of a message gives numbers of the whole message, or none."""
    whole = read(MESSAGES[31])
    for end in range(len(MESSAGES[31])):
        part = read(MESSAGES[31][:end])
        for name in ("requested", "capacity", "free", "process", "allocated"):
            assert getattr(part, name) in (None, getattr(whole, name)), (end, name)


def test_a_message_that_lost_its_beginning():
    assert read(MESSAGES[1][MESSAGES[1].index("Tried") :]).requested.bytes == round(7.04 * GiB)
    assert read(MESSAGES[41][MESSAGES[41].index("Tried") :]).kind == "npu"


def test_impossible_parts_are_named():
    more = MESSAGES[1].replace("72.14", "62.14")
    assert [d.field for d in read(more).doubts] == ["reserved"]
    crowded = MESSAGES[1].replace("5.90 GiB free", "59.0 GiB free")
    assert [d.field for d in read(crowded).doubts] == ["capacity"]
    less = MESSAGES[17].replace("this process has 39.32", "this process has 3.32")
    assert [d.field for d in read(less).doubts] == ["process"]


def test_a_text_beyond_a_mebibyte_is_refused():
    with pytest.raises(BadInput, match="1 MiB"):
        read("x" * (1 << 20) + "x")


def test_reading_needs_nothing_heavy(root):
    code = "import sys, explorer.advice.oom; assert not {'torch', 'numpy', 'ipywidgets'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
