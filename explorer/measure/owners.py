"""Which of a DeepSpeed engine's tensors live where: storage address → category (torch; attribute names of DeepSpeed 0.17 to 0.19)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def storages(values: Iterable[Any]) -> Iterator[int]:
    """Addresses of the storages of all tensors in nested lists, tuples and dictionaries."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            if value.numel() and value.device.type != "meta":
                yield value.untyped_storage().data_ptr()
        elif isinstance(value, list | tuple | set):
            yield from storages(value)
        elif isinstance(value, dict):
            yield from storages(value.values())


def engine_tensors(engine: Any, settings: Any, transient_only: bool = False) -> dict[int, str]:
    """What the engine holds now. `transient_only`: just the buffers that come and go during backward. Offloaded tensors are "host"."""
    wrapper = getattr(engine, "optimizer", None)
    host = settings.offload_optimizer is not None
    found: dict[int, str] = {}

    def put(category: str, *values: Any) -> None:
        for address in storages(values):
            found.setdefault(address, category)

    buckets = getattr(wrapper, "ipg_buckets", None) or {}
    put("comm_buffers", [b.buffer for b in buckets.values() if getattr(b, "buffer", None) is not None])
    put("gradients", getattr(wrapper, "grads_in_partition", None), getattr(wrapper, "averaged_gradients", None), getattr(wrapper, "all_grad_tensors", None))
    if transient_only:
        return found
    put("comm_buffers", getattr(wrapper, "temp_grad_buffer_for_gpu_offload", None))
    put("host" if host else "gradients", getattr(wrapper, "grad_partitions_flat_buffer", None))
    put("host", getattr(wrapper, "temp_grad_buffer_for_cpu_offload", None), getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", None), getattr(wrapper, "param_groups_fp16_flat_cpu_memory", None), getattr(wrapper, "accumulated_grads_in_cpu", None))
    masters = _masters(wrapper)
    put("host" if host else "gradients", [m.grad for m in masters if m.grad is not None])
    put("parameters", getattr(wrapper, "bit16_groups_flat", None), getattr(wrapper, "fp16_groups_flat", None), getattr(wrapper, "lp_param_buffer", None))
    for parameter in engine.module.parameters():
        share = getattr(parameter, "ds_tensor", None)
        put("host" if settings.offload_param is not None and share is not None else "parameters", share if share is not None else parameter.data)
        if parameter.grad is not None:
            put("gradients", parameter.grad)
    put("parameters", list(engine.module.buffers()))
    put("host" if host else "optimizer", masters)
    inner = getattr(wrapper, "optimizer", wrapper)
    put("host" if host else "optimizer", [list(state.values()) for state in getattr(inner, "state", {}).values()])
    return found


def _masters(wrapper: Any) -> list[Any]:
    """fp32 copies that the optimizer updates, under each wrapper's name for them."""
    found: list[Any] = []
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat", "fp32_groups_flat_partition", "fp32_groups"):
        for entry in getattr(wrapper, name, None) or []:
            found.extend(entry if isinstance(entry, list | tuple) else [entry])
    return found


def gradients(parameters: Iterable[Any]) -> dict[int, str]:
    """Addresses of gradients that autograd has just made."""
    return {address: "gradients" for address in storages(p.grad for p in parameters if p.grad is not None)}


def gathered(parameters: Iterable[Any]) -> dict[int, str]:
    """Stage 3: parameters that are there whole now and are not their own partition."""
    found: dict[int, str] = {}
    for parameter in parameters:
        share = getattr(parameter, "ds_tensor", None)
        if share is None or not parameter.data.numel():
            continue
        address = parameter.data.untyped_storage().data_ptr()
        if not share.numel() or address != share.untyped_storage().data_ptr():
            found[address] = "gathered"
    return found


def coordinator(engine: Any) -> Any:
    """Stage 3's PartitionedParameterCoordinator, which gathers and releases; None at other stages."""
    wrapper = getattr(engine, "optimizer", None)
    return getattr(getattr(wrapper, "parameter_offload", wrapper), "param_coordinator", None)


def gather_streams(gatherer: Any) -> frozenset[int]:
    """The CUDA stream of stage 3's own that it gathers on; none without overlap, or on the CPU accelerator.

    Its other one, on which it reduces gradients, makes no parameters (stage3.py, `reduce_and_partition_stream`).
    """
    from deepspeed.accelerator import get_accelerator

    stream = getattr(gatherer, "_PartitionedParameterCoordinator__allgather_stream", None)
    if not hasattr(stream, "cuda_stream") or stream == get_accelerator().default_stream():
        return frozenset()
    return frozenset([stream.cuda_stream])
