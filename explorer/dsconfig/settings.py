"""Settings: what DeepSpeed makes of a Setup, every default and "auto" filled, in plain fields.

The rules of `estimator/rules/` and the probe both read this and nothing else of the JSON. Defaults are DeepSpeed 0.19.8's
(runtime/constants.py, runtime/zero/config.py, runtime/precision_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from explorer.dsconfig.arguments import not_modelled
from explorer.dsconfig.auto import fill_auto
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.keys import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO, read_bool, read_section
from explorer.dsconfig.optimizers import Optimizer, choose
from explorer.errors import BadInput
from explorer.setup import Setup

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Where optimizer states or parameters live."""

    device: Literal["cpu", "nvme"]
    pin_memory: bool
    nvme_path: str | None
    buffer_count: int
    buffer_size: int = 0
    """Elements; parameter offload only."""
    max_in_cpu: int = 0
    """Elements; parameter offload only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Every number that moves memory. Bucket and threshold sizes are elements, as in the JSON."""

    stage: Literal[0, 1, 2, 3]
    precision: Precision
    """Of the weights."""
    autocast: Literal["fp16", "bf16"] | None
    """What torch.autocast computes in; weights are fp32 then."""
    optimizer: Optimizer
    parameter_groups: Literal["one", "decay"]
    """"decay": the Trainer's two groups, parameters that decay (`Parameter.decays`) and those that do not; an empty one is dropped."""
    offload_optimizer: Offload | None
    offload_param: Offload | None
    gradient_accumulation_steps: int
    gradient_clipping: float
    grad_accum_dtype: Precision
    world_size: int
    rank: int
    reduce_bucket_size: int
    overlap_comm: bool
    contiguous_gradients: bool
    reduce_scatter: bool
    round_robin_gradients: bool
    parameter_alignment: bool
    sub_group_size: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    model_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    zero_init: bool
    config: Mapping[str, Any]
    """The DeepSpeed JSON with the batch keys and every "auto" filled: what `deepspeed.initialize` is given."""
    findings: tuple[Finding, ...] = ()
    not_modelled: tuple[Finding, ...] = ()
    """What DeepSpeed or the Trainer would do and the estimate does not follow."""
    notes: tuple[str, ...] = ()

    @property
    def compute(self) -> str:
        """What the forward computes in: a precision, or "autocast_" and one."""
        return self.precision if self.autocast is None else f"autocast_{self.autocast}"

    @property
    def model_bytes(self) -> int:
        """Bytes of one model parameter."""
        return 4 if self.precision == "fp32" else 2

    @property
    def accum_bytes(self) -> int:
        """Bytes of one accumulated gradient element."""
        return 4 if self.grad_accum_dtype == "fp32" else 2


def resolve(setup: Setup) -> Settings:
    """What DeepSpeed does with this Setup. Raises BadInput naming the key where it would refuse."""
    config, notes = fill_auto(setup)
    zero_config = config.get("zero_optimization", {})
    if not isinstance(zero_config, Mapping):
        raise BadInput("deepspeed.zero_optimization", f"is {zero_config!r}; give an object such as {{\"stage\": 2}}, or leave it out")
    zero = read_section(zero_config, ZERO, "deepspeed.zero_optimization")
    stage = zero["stage"]
    if stage > 3:
        raise BadInput("deepspeed.zero_optimization.stage", f"is {stage}; choose 0, 1, 2 or 3")
    precision = _precision(config)
    findings: list[Finding] = []
    offload_optimizer, offload_param = _offloads(zero, stage, findings)
    _ignored(zero_config, stage, findings)
    overlap = zero["overlap_comm"]
    remade = (stage > 0 or precision != "fp32") and not (stage == 3 and setup.zero_init)
    choice = choose(config, setup.trainer, stage=stage, offloaded=offload_optimizer is not None, remade=remade)
    findings.extend(choice.findings)
    missing = (*choice.not_modelled, *not_modelled(setup.trainer, setup.gradient_checkpointing))
    notes.extend(choice.notes)
    notes.extend(f"{f.key}: {f.text}" for f in (*findings, *missing))
    return Settings(
        stage=stage,
        precision=precision,
        autocast=_autocast(config, precision),
        optimizer=choice.optimizer,
        parameter_groups=choice.groups,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        gradient_clipping=_number(config.get("gradient_clipping", 1.0), "deepspeed.gradient_clipping"),
        grad_accum_dtype=_accumulation_dtype(config, precision),
        world_size=setup.world_size,
        rank=setup.rank,
        overlap_comm=stage == 3 if overlap is None else overlap,
        prefetch_bucket_size=zero["stage3_prefetch_bucket_size"],
        param_persistence_threshold=zero["stage3_param_persistence_threshold"],
        model_persistence_threshold=zero["stage3_model_persistence_threshold"],
        max_live_parameters=zero["stage3_max_live_parameters"],
        max_reuse_distance=zero["stage3_max_reuse_distance"],
        zero_init=setup.zero_init,
        config=config,
        findings=tuple(findings),
        not_modelled=missing,
        notes=tuple(notes),
        **{k: zero[k] for k in ("reduce_bucket_size", "contiguous_gradients", "reduce_scatter", "round_robin_gradients", "parameter_alignment", "sub_group_size")},
    )


def _precision(config: Mapping[str, Any]) -> Precision:
    enabled = []
    for name in ("fp16", "bf16"):
        section = config.get(name, {})
        if not isinstance(section, Mapping):
            raise BadInput(f"deepspeed.{name}", f"is {section!r}; give an object such as {{\"enabled\": true}}")
        if read_bool(section.get("enabled", False), f"deepspeed.{name}.enabled"):
            enabled.append(name)
    if len(enabled) == 2:
        raise BadInput("deepspeed.bf16.enabled", "is true while fp16.enabled is true too, which DeepSpeed refuses; turn one of them off")
    return enabled[0] if enabled else "fp32"


def _autocast(config: Mapping[str, Any], precision: Precision) -> Literal["fp16", "bf16"] | None:
    section = config.get("torch_autocast", {})
    if not isinstance(section, Mapping):
        raise BadInput("deepspeed.torch_autocast", f"is {section!r}; give an object such as {{\"enabled\": true, \"dtype\": \"bfloat16\"}}")
    if not read_bool(section.get("enabled", False), "deepspeed.torch_autocast.enabled"):
        return None
    if precision != "fp32":
        raise BadInput("deepspeed.torch_autocast.enabled", f"is true while {precision}.enabled is true too, which DeepSpeed refuses; turn one of them off")
    names = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16", "torch.float16": "fp16"}
    dtype = section.get("dtype", "bfloat16")
    if dtype not in names:
        raise BadInput("deepspeed.torch_autocast.dtype", f"is {dtype!r}; choose bfloat16 or float16")
    return names[dtype]


def _accumulation_dtype(config: Mapping[str, Any], precision: Precision) -> Precision:
    types = config.get("data_types", {})
    written = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    if written is None:
        return precision
    if written not in ("fp32", "fp16", "bf16"):
        raise BadInput("deepspeed.data_types.grad_accum_dtype", f"is {written!r}; choose fp32, fp16 or bf16")
    return written


def _offloads(zero: dict[str, Any], stage: int, findings: list[Finding]) -> tuple[Offload | None, Offload | None]:
    base = "deepspeed.zero_optimization"
    optimizer = read_section(zero["offload_optimizer"], OFFLOAD_OPTIMIZER, f"{base}.offload_optimizer")
    param = read_section(zero["offload_param"], OFFLOAD_PARAM, f"{base}.offload_param")
    for old, section, name in (("cpu_offload", optimizer, "offload_optimizer"), ("cpu_offload_param", param, "offload_param")):
        if zero[old]:
            if zero[name] is not None:
                raise BadInput(f"{base}.{old}", f"is given together with {name}, which DeepSpeed refuses; keep {name}")
            section["device"] = "cpu"
    if stage < 3 and param["device"] != "none":
        findings.append(Finding(id="offload-param-ignored", key="zero_optimization.offload_param", text=f"DeepSpeed offloads parameters only at stage 3; at stage {stage} it does nothing"))
        param["device"] = "none"
    if stage == 0 and optimizer["device"] != "none":
        findings.append(Finding(id="offload-optimizer-ignored", key="zero_optimization.offload_optimizer", text="DeepSpeed offloads the optimizer only at stages 1 to 3; at stage 0 it does nothing"))
        optimizer["device"] = "none"
    if stage in (1, 2) and optimizer["device"] == "nvme":
        findings.append(Finding(id="nvme-is-cpu", key="zero_optimization.offload_optimizer.device", text=f"at stage {stage} DeepSpeed keeps an nvme-offloaded optimizer in host memory, as with cpu"))
    for section, name in ((optimizer, "offload_optimizer"), (param, "offload_param")):
        if stage == 3 and section["device"] == "nvme" and not section["nvme_path"]:
            findings.append(Finding(id="nvme-path-missing", key=f"zero_optimization.{name}.nvme_path", text="stage 3 with nvme needs a folder to write to before it can really run"))
    return _offload(optimizer), _offload(param)


def _offload(section: Mapping[str, Any]) -> Offload | None:
    if section["device"] == "none":
        return None
    return Offload(**{k: section[k] for k in ("device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu") if k in section})


def _ignored(section: Mapping[str, Any], stage: int, findings: list[Finding]) -> None:
    for key in section:
        if key.startswith("stage3_") and stage != 3:
            findings.append(Finding(id="stage3-key-ignored", key=f"zero_optimization.{key}", text=f"has no effect at stage {stage}"))
        if key in ("allgather_bucket_size", "allgather_partitions"):
            findings.append(Finding(id="allgather-key-ignored", key=f"zero_optimization.{key}", text="no longer changes memory: DeepSpeed gathers into the flat parameter buffer in place"))


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise BadInput(path, f"is {str(value)[:40]}; give a number of at least 0 that is no typing slip")
    return float(value)
