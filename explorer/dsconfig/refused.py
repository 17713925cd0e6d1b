"""Combinations of keys that DeepSpeed 0.19.8 refuses: its validators, its error check, and what the engine asserts while it is made. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from explorer.dsconfig.keys import read_bool, read_section
from explorer.dsconfig.sections import LEAF_MODULE, REMOVED_ZERO, SECTIONS, ZENFLOW
from explorer.errors import BadInput, shown

_ZERO = "deepspeed.zero_optimization"


def check_removed(zero: Any) -> None:
    """Keys of `zero_optimization` that DeepSpeed once acted on (runtime/config.py, `_REMOVED_ZERO_CONFIG_KEYS`)."""
    for key, way_out in REMOVED_ZERO.items():
        if isinstance(zero, Mapping) and key in zero:
            raise BadInput(f"{_ZERO}.{key}", f"was removed from DeepSpeed, and 0.19.8 refuses it; {way_out}")


def check_release(written: str | None, behaviours: Collection[str], stage: int, precision: str, accumulation: str) -> None:
    """What the release named refuses of the gradients' dtype and later ones take (runtime/engine.py, `_do_optimizer_sanity_check`)."""
    key = "deepspeed.data_types.grad_accum_dtype"
    if "one-dtype" in behaviours and stage and accumulation != precision and (stage, precision, accumulation) != (1, "bf16", "fp32"):
        raise BadInput(key, f"is {accumulation} with {precision} weights, which DeepSpeed {written} refuses at stage {stage}; leave it out, or take 0.10.1 or later")
    if "bf16-optimizer-at-stage-0" in behaviours and not stage and precision == accumulation == "bf16":
        raise BadInput(key, f"is bf16, which DeepSpeed {written} refuses at stage 0; leave it out, or take stage 1, 2 or 3")


def check_combinations(config: Mapping[str, Any], zero: Mapping[str, Any], *, precision: str, accumulation: str, clipping: float, offload: str | None) -> None:
    """Raises BadInput naming one key of a combination that DeepSpeed refuses. `offload`: the device that optimizer states go to."""
    _check_zero(config, zero, precision, accumulation, clipping, offload)
    _check_masters(config, zero["stage"], offload)
    _check_reduction(config, zero)
    optimizer = str((config.get("optimizer") or {}).get("type", "")).lower()
    if optimizer == "lamb" and read_section(config.get("fp16", {}), SECTIONS["fp16"], "deepspeed.fp16")["loss_scale"]:
        raise BadInput("deepspeed.fp16.loss_scale", "is fixed, and DeepSpeed's Lamb wants a dynamic one; set it to 0")
    if optimizer == "muon" and zero["stage"] == 3 and zero["reduce_scatter"]:
        raise BadInput(f"{_ZERO}.reduce_scatter", "is on, which DeepSpeed refuses for Muon at stage 3; set it to false")
    if zero["zenflow"] is not None:
        _check_zenflow(zero["zenflow"])
    leaves = read_section(zero["leaf_module"], LEAF_MODULE, f"{_ZERO}.leaf_module")
    for key, value in leaves.items():
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise BadInput(f"{_ZERO}.leaf_module.{key}", f"is {shown(value)}; give a list of names")


def _check_zero(config: Mapping[str, Any], zero: Mapping[str, Any], precision: str, accumulation: str, clipping: float, offload: str | None) -> None:
    stage, ratio = zero["stage"], (zero["offload_optimizer"] or {}).get("ratio", 1)
    if stage < 3 and ratio != "auto" and float(ratio) < 1:
        raise BadInput(f"{_ZERO}.offload_optimizer.ratio", f"is {shown(ratio)}, which DeepSpeed refuses at stage {stage}; take stage 3, or leave it out")
    if not zero["compute_grad_norm"]:
        why = (
            f"at stage {stage}; take stage 1 or 2" if stage not in (1, 2) else "with gradient clipping; set gradient_clipping to 0" if clipping > 0 else "with optimizer offload; take offload_optimizer out" if offload
            else "with ZenFlow; take zenflow out" if zero["zenflow"] is not None else "at stage 1 in bf16 with fp32 accumulation; take stage 2" if (stage, precision, accumulation) == (1, "bf16", "fp32") else ""
        )
        if why:
            raise BadInput(f"{_ZERO}.compute_grad_norm", f"is false, which DeepSpeed refuses {why}, or leave it out")
    if not config.get("managed_gradient_accumulation", True) and stage < 2 and zero["overlap_comm"]:
        raise BadInput("deepspeed.managed_gradient_accumulation", "is false, which DeepSpeed refuses with overlap_comm below stage 2; turn one of them round")


def _check_masters(config: Mapping[str, Any], stage: int, offload: str | None) -> None:
    """Master weights in 16 bit are for ZeRO, and where fp32 states cannot stay on the GPU, for offload (runtime/base_optimizer.py, `_configure_master_weights`)."""
    for name in ("fp16", "bf16"):
        section = config.get(name) or {}
        on = {key: value != "auto" and read_bool(value, f"deepspeed.{name}.{key}") for key, value in section.items() if key in (f"{name}_master_weights_and_grads", "bf16_optimizer_states")}
        masters, states = on.get(f"{name}_master_weights_and_grads", False), on.get("bf16_optimizer_states", False)
        key = f"deepspeed.{name}.{name}_master_weights_and_grads"
        if states and not masters:
            raise BadInput("deepspeed.bf16.bf16_optimizer_states", "needs bf16_master_weights_and_grads too; add that, or take it out")
        if masters and not stage:
            raise BadInput(key, "is for ZeRO, and the stage is 0; take stage 1, 2 or 3, or take it out")
        if masters and not states and offload is None:
            raise BadInput(key, "needs the optimizer offloaded, says DeepSpeed; add offload_optimizer, or take it out")


def _check_reduction(config: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    summed = str(config.get("gradient_allreduce_op", "mean")).lower() == "sum"
    if summed and zero["stage"] == 3:
        raise BadInput("deepspeed.gradient_allreduce_op", "is \"sum\", which DeepSpeed refuses at stage 3; leave it out")
    if summed and (zero["zenflow"] is not None or (config.get("compile") or {}).get("deepcompile") is True):
        raise BadInput("deepspeed.gradient_allreduce_op", "is \"sum\", which DeepSpeed refuses with ZenFlow and with DeepCompile; leave it out")
    if zero["stage"] >= 2 and zero["reduce_scatter"] and not summed:
        for key, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if config.get(key, usual) != usual:
                raise BadInput(f"deepspeed.{key}", f"is {shown(config[key])}, which DeepSpeed refuses at stage {zero['stage']} with reduce_scatter; set reduce_scatter to false, or leave it out")


def _check_zenflow(section: Mapping[str, Any]) -> None:
    path = f"{_ZERO}.zenflow"
    values = read_section(section, ZENFLOW, path)
    if not 0 < values["topk_ratio"] < 1:
        raise BadInput(f"{path}.topk_ratio", f"is {shown(values['topk_ratio'])}; give a number above 0 and below 1")
    if values["select_strategy"] not in ("auto", "step", "epoch"):
        raise BadInput(f"{path}.select_strategy", f"is {shown(values['select_strategy'])}; choose auto, step or epoch")
    for key in ("select_interval", "update_interval"):
        if values[key] != "auto" and (isinstance(values[key], bool) or not isinstance(values[key], int)):
            raise BadInput(f"{path}.{key}", f"is {shown(values[key])}; give \"auto\" or a whole number")
    if values["update_interval"] != "auto" and values["update_interval"] < 1:
        raise BadInput(f"{path}.update_interval", f"is {shown(values['update_interval'])}; give \"auto\" or a whole number of at least 1")
