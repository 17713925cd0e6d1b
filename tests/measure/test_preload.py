"""The worker's imports leave the GPU alone, since no child of a process that has used CUDA can use it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from explorer.measure.client import accelerator
from tests.measure.conftest import wait_for

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

from explorer.measure.worker import PRELOADED, hidden, preload
with hidden("bitsandbytes"):
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
    """Names the import that does; the accelerator is named to DeepSpeed, as it is for the worker, or it would look for one."""
    done = python(STEP_BY_STEP, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stderr[-3000:]


def test_preloading_initializes_no_cuda():
    done = python("from explorer.measure.worker import preload\npreload()\nimport torch\nassert not torch.cuda.is_initialized()", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-3000:]


def test_bitsandbytes_is_found_by_the_child_and_not_before(tmp_path):
    """It asks the driver for the card as it is imported, and peft imports it wherever it is installed."""
    pytest.importorskip("peft")
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("import os\nopen(os.environ['TOUCHED'], 'w').close()\n")
    (tmp_path / "bitsandbytes-0.50.2.dist-info").mkdir()
    (tmp_path / "bitsandbytes-0.50.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.50.2\n")
    done = python(
        "import os\nfrom explorer.measure.worker import preload\npreload()\nassert not os.path.exists(os.environ['TOUCHED'])\n"
        "from transformers.utils import is_bitsandbytes_available\nassert is_bitsandbytes_available()\nimport bitsandbytes\nassert os.path.exists(os.environ['TOUCHED'])",
        DS_ACCELERATOR="cpu", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), TOUCHED=str(tmp_path / "touched"),
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_where_an_import_needs_the_driver_the_children_import_for_themselves(tmp_path):
    path = tmp_path / "socket"
    code = (
        "import sys\nfrom explorer.measure import worker\n"
        "def preload():\n    raise RuntimeError('touched')\n"
        f"worker.preload = preload\nsys.argv = ['worker', {str(path)!r}, '0.5']\nworker.main()"
    )
    server = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "DS_ACCELERATOR": "cpu"})
    try:
        assert wait_for(path.exists, 60)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            client.sendall(json.dumps({"function": "explorer.measure.step:run_job", "argument": {"job": {"model": "gpt2", "micro_batch": 0}, "locks": None}}).encode() + b"\n")
            assert any('"micro_batch"' in line for line in client.makefile())
        assert server.wait(60) == 0
    finally:
        server.kill()
