"""The DeepSpeed JSON: read it, resolve its "auto" values, and say what DeepSpeed will really do. No torch."""

from explorer.dsconfig.findings import Finding
from explorer.dsconfig.optimizer import Optimizer
from explorer.dsconfig.settings import Offload, Settings, resolve

__all__ = ["Finding", "Offload", "Optimizer", "Settings", "resolve"]
