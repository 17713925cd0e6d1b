"""What is said beside an estimate: what was assumed, what is no part of the step, what the host would not hold. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.dsconfig import methods, versions
from explorer.estimator import figures, saving, verdict
from explorer.estimator.rules import flattening
from explorer.estimator.work import Work, with_micro_batch
from explorer.units import GiB, human

_EVALUATED = 8
"""The Trainer's own per_device_eval_batch_size."""


def notes(work: Work) -> tuple[str, ...]:
    """In whole sentences, what a person must know to read the figures."""
    first = methods.sentence(work.setup)
    said = [*([first] if first else []), *work.settings.notes]
    if work.setup.trainer is not None:
        said.append("the trainer part fills \"auto\" values and chooses the optimizer and its groups; the step itself is the plain engine's")
        said.extend(_evaluation(work))
    if work.setup.lora is not None and work.settings.stage == 3 and work.settings.precision != "fp32":
        said.append(f"LoRA's adapters are taken in {work.settings.precision}: attach them with autocast_adapter_dtype=False, or at stage 3 peft keeps them, and copies of their inputs, in fp32")
    said.extend(versions.notes(work.setup.deepspeed_version))
    flattened = flattening.note(work.rules.flattenings, str(versions.read(work.setup.deepspeed_version)), work.device is not None and work.device.assumed)
    said.extend([flattened] if flattened else [])
    if work.model.in_4_bit:
        said.append("weights in 4 bit are derived from what bitsandbytes stores and allocates, not measured; what loading and quantizing them takes is left out")
    if work.model.in_4_bit and work.settings.stage == 3:
        said.append(f"stage 3 divides 4-bit weights only where bnb_4bit_quant_storage is of the model's dtype ({work.settings.precision}), and transformers builds such a model without zero.Init: both are taken so")
    if saving.gathers(work.settings):
        said.append(saving.note(work.settings, work.tape, work.patches))
    if work.setup.attention == "flash_attention_2":
        said.append("flash_attention_2 is taken as PyTorch's own flash kernel")
    host, asked = figures.host(work.rules, work.setup).per_node_bytes, work.setup.host_ram_gib
    if asked is not None and host > asked * GiB:
        said.append(f"host_ram_gib is {asked:g}, and the processes of one node take {human(host)} of host memory at their peak: the host would not hold them")
    if work.card is None:
        said.append("no card is named: attention kernels and cuBLAS's workspace are taken as on Hopper")
    if work.settings.precision == "fp16":
        said.append("fp16 usually skips its first steps for overflow; the first step here is the first one applied")
    here = work.usages.get(work.capacity.bytes) if work.capacity else None
    if here is not None and here.failure is None and here.retries:
        often = verdict.flushing(here)
        said.append(f"under this limit PyTorch empties its cache {often} (num_alloc_retries) and asks the driver for memory anew: training will be slow")
    return tuple(said)


def _evaluation(work: Work) -> list[str]:
    """What a pass without gradients takes at most: a training forward of its batch keeps all that it keeps, and more."""
    trainer = work.setup.trainer
    if not _evaluates(trainer):
        return []
    samples = trainer.get("per_device_eval_batch_size", _EVALUATED)
    other = Work(with_micro_batch(work.setup, samples), None)
    marks = [m for m in other.stream.marks if (m.step, m.phase) == ("steady", "forward")]
    most = max(int(other.unlimited.allocated[m.start : m.end + 1].max()) for m in marks)
    kept = "" if trainer.get("prediction_loss_only") else "; the predictions it collects come on top, on the GPU until eval_accumulation_steps moves them to the host"
    return [f"an evaluation of {samples} samples a GPU (per_device_eval_batch_size) is no part of the step; it takes {human(most)} at most, as a training forward of them would{kept}"]


def _evaluates(trainer: Mapping[str, Any]) -> bool:
    """Whether the Trainer evaluates while it trains (transformers/training_args.py)."""
    return trainer.get("eval_strategy", "no") not in ("no", None) or bool(trainer.get("do_eval")) or bool(trainer.get("eval_on_start"))
