"""Which meter reads this machine's accelerator (torch)."""

from __future__ import annotations

from explorer.measure.meter import Meter
from explorer.measure.meter_cpu import CpuMeter
from explorer.measure.meter_cuda import CudaMeter


def meter(device: int = 0) -> Meter:
    """The meter for the accelerator that DeepSpeed was loaded for; `device`: the number of its GPU among those this process sees."""
    from deepspeed.accelerator import get_accelerator

    return CudaMeter(device) if get_accelerator()._name == "cuda" else CpuMeter()
