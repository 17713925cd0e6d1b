"""The worker's imports leave the GPU alone, since no child of a process that has used CUDA can use it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from explorer.measure.client import accelerator

pytestmark = pytest.mark.usefixtures("needs_extra")

PRETEND = """
import os, sys, traceback
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
import torch

touched = []

def driver(name):
    def called(*args, **kwargs):
        touched.append((name, traceback.format_stack(limit=4)))
        raise RuntimeError(f"{name} was called")
    return called

torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 1
torch.cuda._lazy_init = driver("_lazy_init")
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    setattr(torch._C, name, driver(name))
torch._C._cuda_getCurrentRawStream = lambda index: 0
for name in ("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
    if not hasattr(torch._C, name):
        setattr(torch._C, name, driver(name))

from explorer.measure.worker import preload
preload()
from deepspeed.accelerator import get_accelerator
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and get_accelerator()._name == "cuda"
assert not touched, touched
try:
    torch.cuda.get_device_properties(0)
except RuntimeError:
    assert touched  # so the test would have seen it
"""
"""torch is told that it was built with CUDA and that NVML counts one GPU; whatever would reach CUDA's driver is written down."""

STEP_BY_STEP = """
import importlib, os, pathlib
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

def opened():
    return any("nvidia-uvm" in os.readlink(fd) for fd in pathlib.Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.path.exists(fd))

from explorer.measure.worker import PRELOADED, preload
for name in PRELOADED:
    importlib.import_module(name)
    assert not opened(), f"{name} opened /dev/nvidia-uvm"
preload()
import torch
assert not torch.cuda.is_initialized() and not opened()
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process."""
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")}
    return subprocess.run([sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(accelerator() == "cuda", reason="the pretended GPU is for machines without one; the next test looks at the real one")
def test_where_there_is_a_gpu_no_import_asks_its_driver():
    done = python(PRETEND)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(accelerator() != "cuda", reason="needs an NVIDIA GPU")
def test_no_import_opens_the_gpus_memory():
    """Names the import that does."""
    done = python(STEP_BY_STEP)
    assert done.returncode == 0, done.stderr[-3000:]


def test_preloading_initializes_no_cuda():
    done = python("from explorer.measure.worker import preload\npreload()\nimport torch\nassert not torch.cuda.is_initialized()", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
