"""Errors that are none of memory, and logs of a host whose memory ran out."""

from __future__ import annotations

import pytest

from explorer.advice import doctor
from explorer.advice.oom import read
from explorer.setup import Setup
from explorer.units import GiB
from tests.advice.test_oom import MESSAGES

OTHER = {
    "RuntimeError: CUDA error: device-side assert triggered\nRuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "device-assert",
    "../aten/src/ATen/native/cuda/Indexing.cu:1292: indexSelectLargeIndex: block: [12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.": "device-assert",
    "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.01}": "nan",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": "nan",
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": "nan",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800523 milliseconds before timing out.": "nccl-timeout",
    "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 clients joined.": "nccl-timeout",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error\nncclRemoteError: A call failed possibly due to a network error": "nccl-remote",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "driver-too-old",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "driver-too-old",
    "RuntimeError: No CUDA GPUs are available": "no-gpu",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4096x4096 and 1024x4096)": "shape-mismatch",
    "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([0])": "state-mismatch",
    "OSError: [Errno 28] No space left on device": "disk-full",
    "safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: \"No space left on device\" })": "disk-full",
    "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/meta-llama/Llama-2-7b-hf.\n401 Client Error.": "gated-model",
    "FileNotFoundError: [Errno 2] No such file or directory: 'ds_config.json'": "missing-file",
    "ModuleNotFoundError: No module named 'flash_attn'": "missing-module",
    "RuntimeError: expected scalar type Half but found Float": "dtype-mismatch",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!": "another-device",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn": "no-gradient",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "illegal-access",
    "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match": "op-not-built",
    "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 4 * 1 * 4": "batch-keys",
    "[launch.py:325:sigkill_handler] exits with return code = -11": "segfault",
    "slurmstepd: error: *** JOB 123 ON gpu01 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME LIMIT ***": "ended-by-signal",
    "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'input_ids'": "other-error",
}


@pytest.mark.parametrize("text", OTHER)
def test_what_is_no_memory_error_is_said_to_be_none(text):
    message = read(text)
    assert (message.kind, message.cause) == ("none", OTHER[text])
    found = doctor(text).remarks
    assert found[0].severity == "cause" and "not an out-of-memory error" in found[0].text


def test_the_last_error_is_quoted_where_it_is_not_listed():
    assert "KeyError: 'input_ids'" in read("  File x\nValueError: first\nTraceback\nKeyError: 'input_ids'\n").other


@pytest.mark.parametrize("text", ["the loss is fine, 1.2 at step 3", "def f():\n    raise ValueError\n", '{"logging_nan_inf_filter": true}', "UserWarning: something is deprecated"])
def test_a_text_without_an_error_has_none(text):
    assert (read(text).kind, read(text).cause) == ("none", "")


@pytest.mark.parametrize("text", [
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: GET was unable to find an engine to execute this computation",
])
def test_memory_in_disguise(text):
    remark = doctor(text).remarks[0]
    assert read(text).kind == "cublas" and "one in disguise" in remark.text and "half the batch" in remark.text


@pytest.mark.parametrize("cause", ["nccl-timeout", "nccl-remote"])
def test_another_rank_may_have_run_out(cause):
    text = next(text for text, name in OTHER.items() if name == cause)
    assert "A memory error can hide behind it" in read(text).other


def test_a_memory_error_in_the_same_log_is_the_cause():
    log = "\n".join(text for text, name in OTHER.items() if name != "device-assert")
    assert read(log + "\n" + MESSAGES[17]).kind == "cuda"
    assert read(log + "\nsubprocess.CalledProcessError: exits with return code = -9").kind == "host"


# --- the host's log

_USED = (
    "[2023-05-05 10:00:00,000] [INFO] [utils.py:829:see_memory_usage] before creating fp16 partitions\n"
    "[2023-05-05 10:00:00,000] [INFO] [utils.py:830:see_memory_usage] MA 0.00 GB         Max_MA 0.00 GB         CA 0.00 GB         Max_CA 0 GB\n"
    "[2023-05-05 10:00:00,000] [INFO] [utils.py:838:see_memory_usage] CPU Virtual Memory:  used = {used} GB, percent = {percent}%\n"
)
HOST = {
    "ended": (_USED.format(used="26.45", percent="84.6") + "[INFO] [launch.py:315:sigkill_handler] Killing subprocess 4242\n", 26.45, 26.45 / 0.846),
    "code": (_USED.format(used="29.71", percent="95.3") + "[ERROR] [launch.py:324] ['python'] exits with return code = -9\n", 29.71, 29.71 / 0.953),
    "torchrun": (_USED.format(used="200.10", percent="39.8") + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n exitcode  : -9 (pid: 77)\n Signal 9 (SIGKILL) received by PID 77", 200.10, 200.10 / 0.398),
    "kernel": ("[ 9.1] oom-kill:constraint=CONSTRAINT_MEMCG,task=python\n[ 9.2] Memory cgroup out of memory: Killed process 12 (python) total-vm:90000000kB, anon-rss:62914560kB", 60.0, None),
    "allocator": ("RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 270532608 bytes. Error code 12", None, None),
    "slurm": ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.", None, None),
    "kubernetes": ("  State: Terminated\n  Reason: OOMKilled\n  Exit Code: 137", None, None),
}


@pytest.mark.parametrize("name", HOST)
def test_a_host_that_ran_out(name):
    text, used, total = HOST[name]
    message = read(text)
    assert message.kind == "host"
    assert message.host_used_bytes == (None if used is None else pytest.approx(used * GiB, abs=1))
    assert message.host_total_bytes == (None if total is None else pytest.approx(total * GiB, abs=1))


def test_the_logs_host_is_what_the_changes_are_held_against():
    job = Setup(model="meta-llama/Llama-3.2-3B", micro_batch=1, sequence=512, gpu="RTX 3090", deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    found = doctor(HOST["code"][0], job)
    said = {r.id: r.text for r in found.remarks}
    assert "29.7 GiB of the host's 31.2 GiB in use (95.3%)".replace("29.7 ", "29.71 ").replace("31.2 ", "31.18 ") in said["host-killed"]
    assert found.setup.host_ram_gib == 31.2 and "host-too-small" in said
    assert all(f.profile.host.per_node_bytes <= 31.2 * GiB for f in found.fixes if f.solves)


def test_torchruns_own_end_of_its_ranks_is_no_sign_of_memory():
    text = "Unable to shutdown process 9 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"
    assert (read(text).kind, read(text).cause) == ("none", "shape-mismatch")


# --- other backends

HIP = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 63.98 GiB of which 120.00 MiB is free. Of the allocated memory 50.00 GiB is allocated by PyTorch, and 12.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize(("text", "variable", "not_said"), [
    (HIP, "PYTORCH_HIP_ALLOC_CONF=max_split_size_mb", "expandable_segments"),
    (HIP.replace("HIP", "XPU"), "torch.xpu.empty_cache()", "expandable_segments"),
    (HIP.replace("HIP", "NPU").replace("GPU 0", "NPU 0"), "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True", "HIP"),
    (HIP.replace("HIP", "CUDA"), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "max_split"),
])
def test_each_backend_gets_its_own_variable(text, variable, not_said):
    found = doctor(text)
    said = {r.id: r.text for r in found.remarks}
    assert variable in said["fragmentation"] and not_said not in said["fragmentation"]
    if "HIP out" in text or "XPU out" in text:
        assert "expandable-segments" not in {f.id for f in found.fixes}
        assert "expandable_segments" not in " ".join([*said.values(), *(f.text + f.cost for f in found.fixes)])


# --- a model that is not known

@pytest.mark.parametrize("name", ["someone/never-heard-of-7b", "acme/anonymous-13b", "./checkpoints/mine"])
def test_a_model_that_is_not_known_never_silences_the_message(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = f"deepspeed --num_gpus 8 train.py --model_name_or_path {name} --per_device_train_batch_size 1 --bf16 true\n{MESSAGES[17]}"
    found = doctor(text)
    said = {r.id: r for r in found.remarks}
    assert found.message.requested is not None and "fragmentation" in said
    absent = [r for r in found.remarks if r.key == "model"]
    assert len(absent) == 1 and absent[0].severity == "note"
