"""Where DeepSpeed would swap to disk: a path that is missing, closed or too full is one sentence; what was killed is cleared away."""

from __future__ import annotations

import subprocess
import sys

import pytest

from explorer.dsconfig import resolve
from explorer.errors import CouldNotRun
from explorer.measure.nvme import swap_bytes, swap_folder
from explorer.setup import Setup


def settings(path: str, stage: int = 3):
    zero = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": path}}
    return resolve(Setup(model="gpt2", micro_batch=1, deepspeed={"bf16": {"enabled": True}, "zero_optimization": zero}))


@pytest.mark.parametrize(("path", "words"), [("/no/such/folder", "is not a folder on this machine"), ("/proc", r"nothing can be written|cannot be written|which has 0 B free"), (__file__, "is not a folder")])
def test_a_path_that_cannot_be_used_is_one_sentence(path, words):
    with pytest.raises(CouldNotRun, match=words) as caught, swap_folder(settings(path), 1000):
        pass
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_a_disk_too_full_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(CouldNotRun, match=r"would write about .* which has .* free"), swap_folder(settings(str(tmp_path)), 10**16):
        pass
    assert list(tmp_path.iterdir()) == []
    assert swap_bytes(settings(str(tmp_path)), 1000) == 16_000


def test_the_folder_goes_with_the_probe_and_a_killed_one_s_with_the_next(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"explorer-swap-{dead.pid}").mkdir()
    with swap_folder(settings(str(tmp_path)), 1000) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_below_stage_3_nothing_is_swapped():
    with swap_folder(settings("/no/such/folder", stage=2), 1000) as folder:
        assert folder is None
