"""What is said beside an estimate: what was assumed, what is no part of the step, what the host would not hold. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.catalog import Lengths
from explorer.dsconfig import methods, versions
from explorer.estimator import host, saving, verdict
from explorer.estimator.replay import MOST_BATCHES
from explorer.estimator.rules import flattening
from explorer.estimator.work import Work
from explorer.units import GiB, human


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
    if len(work.lengths.batches) > 1:
        said.append(_varying(work.lengths))
    if work.save is not None:
        saved = saving.note(work.save, work.settings, work.tape, work.patches, work.setup.lora is not None)
        said.extend([saved] if saved else [])
    if work.setup.attention == "flash_attention_2":
        said.append("flash_attention_2 is taken as PyTorch's own flash kernel")
    taken, asked = host.host(work).per_node_bytes, work.setup.host_ram_gib
    if asked is not None and taken > asked * GiB:
        said.append(f"host_ram_gib is {asked:g}, and the processes of one node take {human(taken)} of host memory at their peak: the host would not hold them")
    if work.card is None:
        said.append("no card is named: attention kernels and cuBLAS's workspace are taken as on Hopper")
    if work.settings.precision == "fp16":
        said.append("fp16 usually skips its first steps for overflow; the first step here is the first one applied")
    here = work.usages.get(work.capacity.bytes) if work.capacity else None
    if here is not None and here.failure is None and here.retries:
        often = verdict.flushing(here)
        said.append(f"under this limit PyTorch empties its cache {often} (num_alloc_retries) and asks the driver for memory anew: training will be slow")
    return tuple(said)


def _varying(lengths: Lengths) -> str:
    """What was played of a job whose batches vary in length."""
    shortest, longest, count = min(lengths.batches), max(lengths.batches), len(lengths.batches)
    if shortest == longest:
        return f"every batch is {longest:,} tokens long"
    played = f"{MOST_BATCHES} of {count}" if count > MOST_BATCHES else f"all {count}"
    return (
        f"batches are {shortest:,} to {longest:,} tokens long, each padded to its longest sample: {played} were played in turn, "
        f"in their order; the peak is the longest batch's, and PyTorch's cache grows with each new length"
    )


def _evaluation(work: Work) -> Iterator[str]:
    """What the phase "eval" stands for, and what is not known of it."""
    asked = work.evaluation
    if asked is None:
        return
    start = f"an evaluation of {asked.samples} samples a GPU (per_device_eval_batch_size)"
    if work.not_evaluated:
        yield f"{start} is not followed: {work.not_evaluated}"
        return
    if not asked.keeps_predictions:
        yield f"{start} is the phase eval, of which the loss alone is kept; with compute_metrics the Trainer keeps every batch's predictions too"
        return
    if not work.logits_bytes:
        yield f"{start} is the phase eval; the predictions that it keeps are small and not counted"
        return
    each = human(work.logits_bytes * work.settings.world_size)
    if asked.batches is None:
        yield (
            f"{start} is the phase eval, with the predictions of one batch of all GPUs, {each}; the Trainer keeps those of every batch on the GPU, "
            "and copies them together: set eval_accumulation_steps to move them to the host, or give trainer.eval_samples"
        )
        return
    yield f"{start} is the phase eval, with the predictions of {asked.batches} batches of all GPUs, {each} each, and a copy of them"
