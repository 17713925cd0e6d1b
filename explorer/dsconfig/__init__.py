"""The DeepSpeed JSON: read it, resolve its "auto" values, and say what DeepSpeed will really do. No torch."""

from explorer.dsconfig.settings import Finding, Offload, Optimizer, Settings, resolve

__all__ = ["Finding", "Offload", "Optimizer", "Settings", "resolve"]
