"""Errors that are not about the amount of memory: what they are, and the memory error that one of them may hide. No torch.

Each kind of error has the words by which PyTorch, DeepSpeed, NCCL or the hub name it, and a sentence or two. The order is that of
the search: what says most about the cause comes first, and the last error line of the text stands for all that is not listed.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Other(NamedTuple):
    """A kind of error: its name, its words (a regular expression over the text in one line), and what is said of it."""

    cause: str
    words: str
    text: str


_NO = "This is not an out-of-memory error"
_RANKS = (
    "A memory error can hide behind it: where one rank runs out of GPU memory or is killed by the host, the others wait for it. "
    "Look for the first error in the logs of all ranks."
)

OTHERS: tuple[Other, ...] = (
    Other("device-assert", r"device-side assert|Assertion .{0,200}? failed\.? .{0,400}?CUDA error|srcIndex < srcSelectDimSize|t >= 0 && t < n_classes|indexSelect\w{0,30}: block", (
        f"{_NO}: a kernel was given an index out of range, mostly a token id or a label beyond the vocabulary or the position table. "
        "Compare the tokenizer's size with the model's vocabulary, and run once with CUDA_LAUNCH_BLOCKING=1 to see the line. "
        "CUDA errors after it, cuBLAS's too, only follow from it.")),
    Other("nan", r"loss\W{0,12}(?:is |was |= ?)?(?:nan|-?inf)\b|\bnan loss|grad_norm\W{0,8}nan|(?:nan|inf)\w{0,8} (?:or inf )?(?:found|detected|encountered)|contains? nan|loss scale already at minimum|overflow.{0,80}?nan|probability tensor contains", (
        f"{_NO}: the numbers overflowed (NaN, infinity, or a loss scale at its minimum). No change of memory mends that. "
        "With fp16, try bf16; else a smaller learning rate, gradient clipping, and a look at the batch and its labels.")),
    Other("nccl-timeout", r"collective operation timeout|watchdog.{0,200}?time(?:d )?out|NCCL.{0,120}?timed? ?out|heartbeat.{0,60}?time|monitoredBarrier|Socket Timeout|Timed out (?:after|waiting)|wait_for_store|RendezvousTimeout", (
        f"{_NO}: ranks waited for each other until NCCL's or the store's time limit. {_RANKS}")),
    Other("nccl-remote", r"ncclRemoteError|ncclSystemError|ncclInternalError|ncclInvalidUsage|NCCL (?:error|WARN)|Connection (?:closed|reset) by (?:remote )?peer|DistBackendError|unhandled (?:system|cuda) error|broken pipe", (
        f"{_NO}: the connection between ranks broke, or NCCL could not set it up. {_RANKS}")),
    Other("driver-too-old", r"driver on your system is too old|driver version is insufficient|no kernel image is available|forward compatibility was attempted|unsupported PTX|sm_\d{2,3} is not compatible", (
        f"{_NO}: the NVIDIA driver, or the card, does not match the CUDA version that PyTorch was built for. "
        "Update the driver, or install a PyTorch build for the CUDA version that nvidia-smi shows.")),
    Other("no-gpu", r"No CUDA GPUs are available|Found no NVIDIA driver|not compiled with CUDA|invalid device ordinal|CUDA_ERROR_NO_DEVICE|no CUDA-capable device|cuda.is_available\(\) is False", (
        f"{_NO}: the process sees no such GPU. Check nvidia-smi, CUDA_VISIBLE_DEVICES, the number of processes against the number of GPUs, and that PyTorch is a CUDA build.")),
    Other("disk-full", r"No space left on device|Disk quota exceeded|Errno 28|Errno 122|not enough (?:free )?disk space|PytorchStreamWriter failed|inline_container.{0,80}?unexpected pos", (
        f"{_NO}: a disk, or a quota on it, is full. \"Device\" means the disk here, not the GPU. A ZeRO checkpoint takes about 14 bytes a parameter (weights, fp32 masters and two moments): "
        "free space, save less often (save_total_limit), or leave the optimizer out (save_only_model).")),
    Other("gated-model", r"gated repo|GatedRepo|401 Client Error|403 Client Error|awaiting a review|must (?:be authenticated|have access to it)|RepositoryNotFoundError|not a valid model identifier|is not a local folder", (
        f"{_NO}: the model could not be fetched. It is gated, private, or its name is not right. Accept its licence on the hub, log in (huggingface-cli login, or HF_TOKEN), and check the name.")),
    Other("offline", r"LocalEntryNotFound|couldn't connect to|Max retries exceeded|Name or service not known|Temporary failure in name resolution|Network is unreachable|HTTPSConnectionPool|ReadTimeout", (
        f"{_NO}: a download failed, for want of a network. Fetch model and data first, then set HF_HUB_OFFLINE=1.")),
    Other("port-in-use", r"Address already in use|EADDRINUSE|Errno 98", (
        f"{_NO}: the port of the launcher is taken, often by processes of a run before. End them, since they hold GPU memory too (nvidia-smi shows it), or choose another --master_port.")),
    Other("state-mismatch", r"size mismatch for|Error\(s\) in loading state_dict|Missing key\(s\) in state_dict|Unexpected key\(s\)|tensors? .{0,60}?different (?:world size|partition)", (
        f"{_NO}: the checkpoint and the model do not have the same shapes or names. Compare the vocabulary size (added tokens) and the model's config with the checkpoint's.")),
    Other("shape-mismatch", r"shapes? cannot be multiplied|size of tensor a \(\d+\) must match|must match the (?:existing )?size|Sizes of tensors must match|is invalid for input of size|to match target batch_size|shape mismatch|mismatch(?:ed)? (?:tensor )?shapes?|Expected size .{0,60}?but got|expanded size of the tensor|stack expects each tensor|Unable to create tensor, you should probably activate truncation", (
        f"{_NO}: two tensors have shapes that do not go together. At stage 3 a weight of size 0 in such a text is one that was not gathered (deepspeed.zero.GatheredParameters).")),
    Other("dtype-mismatch", r"expected scalar type|must have the same dtype|should be the same|same dtype, but got|Found dtype .{0,20}? but expected|not implemented for '(?:Half|BFloat16|Float|Long)'|expected m1 and m2 to have the same dtype|bf16 is not supported|bf16.{0,40}?requires", (
        f"{_NO}: two tensors have different dtypes, or the card or kernel does not take this one. Make the model's dtype and bf16 or fp16 in the config agree.")),
    Other("another-device", r"Expected all tensors to be on the same device|found at least two devices|is on (?:cpu|cuda:\d+), but expected", (
        f"{_NO}: one tensor is on the CPU or on another GPU. device_map=\"auto\" and DeepSpeed do not go together.")),
    Other("no-gradient", r"does not require grad|None of the inputs have requires_grad", (
        f"{_NO}: nothing in the loss needs a gradient. With checkpointing and frozen embeddings call model.enable_input_require_grads(), or set use_reentrant to false.")),
    Other("illegal-access", r"illegal memory access|misaligned address|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|invalid argument .{0,40}?CUDA|an illegal instruction", (
        f"{_NO}: a kernel read or wrote an address that is not its own; \"memory\" here is a place, not an amount. It is a fault of a kernel, of the driver or of the card. "
        "Run once with CUDA_LAUNCH_BLOCKING=1, and try another attention kernel.")),
    Other("card-fault", r"uncorrectable ECC|\bXid\b|GPU is lost|fallen off the bus|CUDA error: unknown error|hardware stack error", (
        f"{_NO}: the card or its driver has a fault. Look at nvidia-smi -q and dmesg, and restart the machine or take the card out of use.")),
    Other("kernel-resources", r"out of resources?: (?:shared memory|registers)|OutOfResources|too many resources requested", (
        f"{_NO}: a kernel asks for more of the chip's own shared memory or registers than this card has. A smaller block size or head dimension, or another kernel, mends it; the batch does not matter.")),
    Other("op-not-built", r"CUDAMismatch|Unable to JIT load|Error building extension|MissingCUDAException|CUDA_HOME does not exist|ninja is required|No module named '?fused_adam|undefined symbol|nvcc.{0,60}?not found", (
        f"{_NO}: an operator of DeepSpeed, or an extension, could not be built or loaded. Install a CUDA toolkit of the version that torch.version.cuda shows; ds_report lists what fits.")),
    Other("batch-keys", r"Check batch related parameters|train_batch_size is not equal to|micro_batch.{0,60}?not equal|DeepSpeed config values mismatch|mismatches TrainingArguments|Please correct the following DeepSpeed config values", (
        f"{_NO}: the batch sizes, or other values, in the DeepSpeed config and the Trainer's arguments disagree. Set them to \"auto\" in the config.")),
    Other("missing-file", r"FileNotFoundError|No such file or directory|does not appear to have a file named|Errno 2\]|Can't find .{0,80}? file|No file named|Unable to load weights from|is not a directory", (
        f"{_NO}: a file or folder is missing. Check the path that the text names, on every node.")),
    Other("missing-module", r"ModuleNotFoundError|ImportError|No module named", (
        f"{_NO}: a Python package is missing, or has another version than the code wants.")),
    Other("no-permission", r"PermissionError|Permission denied", (
        f"{_NO}: a file, folder or device may not be opened by this user.")),
    Other("segfault", r"Segmentation fault|SIGSEGV|(?:return ?code|exit ?code|exitcode)\D{0,12}(?:-11\b|139\b)|Signal 11", (
        f"{_NO} as far as the text says: a library crashed (segmentation fault). Where it comes while a model is loaded, look at the host's memory too, since a failed allocation in C++ can end so.")),
    Other("ended-by-signal", r"SIGTERM|Signal 15|(?:return ?code|exit ?code|exitcode)\D{0,12}(?:-15\b|143\b)|KeyboardInterrupt|SIGINT|DUE TO TIME LIMIT|PREEMPTION|CANCELLED AT", (
        "The process was ended from outside: by the launcher after another rank had failed, by a scheduler's time limit, or by a person. "
        f"{_NO} as far as the text says. Look for the first error in the logs of all ranks.")),
)
_COMPILED = tuple((other, re.compile(other.words, re.IGNORECASE)) for other in OTHERS)
ASSERTED = _COMPILED[0][1]
"""An index out of range on the GPU, which makes each later CUDA call fail."""

_LAST = re.compile(r"^[ \t]*((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Warning)\b(?::[ \t]*\S[^\n]{0,300})?)[ \t]*$", re.MULTILINE)
_LONGEST_QUOTE = 160


def find(lines: str) -> tuple[str, str] | None:
    """(cause, what is said) of a text that says nothing of memory; None where it has no error. A traceback's last error speaks for what is not listed."""
    text = " ".join(lines.split())
    for other, words in _COMPILED:
        if words.search(text):
            return other.cause, other.text
    errors = [line for line in _LAST.findall(lines) if "Warning" not in line.partition(":")[0]]
    if not errors:
        return None
    quoted = errors[-1] if len(errors[-1]) <= _LONGEST_QUOTE else f"{errors[-1][:_LONGEST_QUOTE]} ..."
    return "other-error", f"{_NO}. The text ends in another one: {quoted}"
