"""Settings: what DeepSpeed makes of a Setup, every default and "auto" filled, in plain fields.

The rules of `estimator/rules/` and the probe both read this and nothing else of the JSON. Defaults are DeepSpeed 0.19.8's
(runtime/constants.py, runtime/zero/config.py, runtime/precision_config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from explorer.dsconfig import sections, versions
from explorer.dsconfig.arguments import check_arguments, disagreements, not_modelled
from explorer.dsconfig.auto import fill_auto
from explorer.dsconfig.beyond import STAGE3_ONLY, not_followed
from explorer.dsconfig.findings import Finding
from explorer.dsconfig.hardware import check_card
from explorer.dsconfig.keys import ALIASES, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO, read_section
from explorer.dsconfig.optimizer import Optimizer
from explorer.dsconfig.optimizers import choose
from explorer.dsconfig.precision import Precision, of_accumulation, of_autocast, of_weights
from explorer.dsconfig.refused import check_combinations, check_release, check_removed
from explorer.errors import BadInput, shown
from explorer.setup import Setup


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
    """GPUs that ZeRO divides over: the job's `data_parallel_size` where it gives one."""
    rank: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    """Of the releases that gather through a copy."""
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
    plain_linear: bool
    """Stage 3: linear layers save their weights as they were gathered (without runtime/zero/linear.py's own function)."""
    behaviours: frozenset[str]
    """What the release named does otherwise than the rules' (dsconfig/versions.py)."""
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
    findings: list[Finding] = []
    sections.check(setup.deepspeed, findings)
    check_removed(setup.deepspeed.get("zero_optimization"))
    check_arguments(setup)
    config, notes = fill_auto(setup)
    behaviours = versions.in_force(versions.read(setup.deepspeed_version))
    zero = read_section(config["zero_optimization"], ZERO, "deepspeed.zero_optimization")
    stage = zero["stage"]
    if stage > 3:
        raise BadInput("deepspeed.zero_optimization.stage", f"is {stage}; choose 0, 1, 2 or 3")
    overlap = zero["overlap_comm"] = stage == 3 if zero["overlap_comm"] is None else zero["overlap_comm"]
    precision = of_weights(config)
    accumulation = of_accumulation(config, precision, _accumulates_in(precision, stage, behaviours))
    check_release(setup.deepspeed_version, behaviours, stage, precision, accumulation)
    autocast = of_autocast(config, precision)
    clipping = _clipping(config, 0.0 if "no-clipping" in behaviours else 1.0)
    offload_optimizer, offload_param = _offloads(zero, stage, findings, pinned="pageable-offload" not in behaviours)
    device = offload_optimizer.device if offload_optimizer else None
    check_combinations(config, zero, precision=precision, accumulation=accumulation, clipping=clipping, offload=device)
    check_card(setup, precision, autocast)
    _ignored(config, stage, findings, gathers_in_place="all-gather-copies" not in behaviours)
    findings.extend(disagreements(config, setup))
    remade = (stage > 0 or precision != "fp32") and not (stage == 3 and setup.zero_init)
    choice = choose(config, setup.trainer, stage=stage, offloaded=offload_optimizer is not None, remade=remade)
    findings.extend(choice.findings)
    missing = (*choice.not_modelled, *not_followed(config, zero, setup, precision=precision, accumulation=accumulation, offload=device), *not_modelled(setup))
    notes.extend(choice.notes)
    notes.extend(f"{f.key}: {f.text}" for f in (*findings, *missing))
    return Settings(
        stage=stage,
        precision=precision,
        autocast=autocast,
        optimizer=choice.optimizer,
        parameter_groups=choice.groups,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        gradient_clipping=clipping,
        grad_accum_dtype=accumulation,
        world_size=setup.data_ranks,
        rank=setup.rank,
        overlap_comm=overlap,
        prefetch_bucket_size=zero["stage3_prefetch_bucket_size"],
        param_persistence_threshold=zero["stage3_param_persistence_threshold"],
        model_persistence_threshold=zero["stage3_model_persistence_threshold"],
        max_live_parameters=zero["stage3_max_live_parameters"],
        max_reuse_distance=zero["stage3_max_reuse_distance"],
        zero_init=setup.zero_init,
        plain_linear=stage == 3 and (zero["memory_efficient_linear"] is False or (not setup.zero_init and "plain-linear" in behaviours)),
        behaviours=behaviours,
        config=config,
        findings=tuple(findings),
        not_modelled=missing,
        notes=tuple(notes),
        **{k: zero[k] for k in ("reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients", "reduce_scatter", "round_robin_gradients", "parameter_alignment", "sub_group_size")},
    )


def _offloads(zero: dict[str, Any], stage: int, findings: list[Finding], pinned: bool) -> tuple[Offload | None, Offload | None]:
    base = "deepspeed.zero_optimization"
    optimizer = read_section(zero["offload_optimizer"], OFFLOAD_OPTIMIZER, f"{base}.offload_optimizer")
    param = read_section(zero["offload_param"], OFFLOAD_PARAM, f"{base}.offload_param")
    for section, written in ((optimizer, zero["offload_optimizer"]), (param, zero["offload_param"])):
        if "pin_memory" not in (written or {}):
            section["pin_memory"] = pinned
    for old, section, name in (("cpu_offload", optimizer, "offload_optimizer"), ("cpu_offload_param", param, "offload_param")):
        if zero[old]:
            section["device"] = "cpu"
            zero[name] = {"device": "cpu"}
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


def _accumulates_in(precision: Precision, stage: int, behaviours: frozenset[str]) -> Precision:
    """The type that gradients are added up in where the config does not say (runtime/engine.py, `get_data_types`)."""
    return "fp32" if stage == 0 and precision == "bf16" and "bf16-optimizer-at-stage-0" in behaviours else precision


def _ignored(config: Mapping[str, Any], stage: int, findings: list[Finding], gathers_in_place: bool) -> None:
    for key in config["zero_optimization"]:
        if stage != 3 and (key.startswith("stage3_") or key in STAGE3_ONLY or key in ALIASES):
            findings.append(Finding(id="stage3-key-ignored", key=f"zero_optimization.{key}", text=f"has no effect at stage {stage}"))
        if key == "allgather_partitions" or (key == "allgather_bucket_size" and gathers_in_place):
            findings.append(Finding(id="allgather-key-ignored", key=f"zero_optimization.{key}", text="no longer changes memory: DeepSpeed gathers into the flat parameter buffer in place"))
    if config.get("activation_checkpointing"):
        findings.append(Finding(id="activation-checkpointing-ignored", key="activation_checkpointing", text="is for models that call deepspeed.checkpointing, and Hugging Face's do not: it does nothing; set gradient_checkpointing instead"))
    if config.get("pipeline"):
        findings.append(Finding(id="pipeline-ignored", key="pipeline", text="is for models built as a PipelineModule, and Hugging Face's are not: it does nothing"))


def _clipping(config: Mapping[str, Any], default: float) -> float:
    value = config.get("gradient_clipping", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
        raise BadInput("deepspeed.gradient_clipping", f"is {shown(value)}; give a number, 0 for no clipping, or leave it out for DeepSpeed's 1.0")
    return max(0.0, float(value))
