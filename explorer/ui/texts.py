"""Every text of the page, by key, in one place; a second language is a second dictionary."""

from __future__ import annotations

from typing import Any

ENGLISH: dict[str, str] = {
    "title": "DeepSpeed memory explorer",
    "lede": "Where the GPU memory of a training job goes, before you run it and when you do.",
    "source.estimated": "Estimated",
    "source.measured": "Measured",
    "step.first": "first step",
    "step.steady": "later steps",
    "phase.init": "init",
    "phase.forward": "forward",
    "phase.backward": "backward",
    "phase.step": "optimizer step",
    "category.parameters": "Parameters",
    "category.gradients": "Gradients",
    "category.optimizer": "Optimizer",
    "category.activations": "Activations",
    "category.gathered": "Gathered",
    "category.comm_buffers": "Buffers",
    "category.temporary": "Temporary",
    "category.unexplained": "Unexplained",
    "category.total": "Allocated",
    "about.parameters": "weights of the model, frozen ones and module buffers included",
    "about.gradients": "gradients and their partitions on the GPU",
    "about.optimizer": "fp32 master weights and moments",
    "about.activations": "the batch, and what the forward keeps for the backward",
    "about.gathered": "weights that ZeRO-3 has fetched for the layer at work",
    "about.comm_buffers": "DeepSpeed's reduce and gather buckets, and staging for offload",
    "about.temporary": "workspaces, casts, logits, temporaries of the step",
    "about.unexplained": "measured, but in none of the categories",
    "chart.size": "Size",
    "chart.category": "Category",
    "chart.step": "When",
    "chart.reserved": "Reserved",
    "chart.capacity": "{card}: {size} for PyTorch",
    "chart.a_card": "limit",
    "chart.out_of_memory": "{size}, out of memory",
    "chart.card.title": "At the peak, against the card",
    "chart.card.alt": "Stacked bar of allocated memory at the peak by category, against the capacity of the card.",
    "chart.phase.title": "Phase by phase",
    "chart.phase.note": "Each column is what is allocated at that phase’s peak; the tick above it is what PyTorch has reserved.",
    "chart.phase.note.both": "Left column estimated, right column measured; the tick above is what PyTorch has reserved.",
    "chart.phase.alt": "Stacked columns of allocated memory at the peak of each phase, by category, for the first step and for later steps.",
    "chart.phase.first": "First step",
    "chart.phase.steady": "Later steps",
    # controls
    "group.model": "Model and batch",
    "group.deepspeed": "DeepSpeed",
    "group.hardware": "Hardware",
    "group.advanced": "Advanced",
    "control.model": "Model",
    "control.model.custom": "Paste a config or a path …",
    "control.config_text": "config.json, folder or hub id",
    "control.config_text.placeholder": "{ \"model_type\": \"llama\", … }   or   /path/to/model",
    "spoken.config_text": "What is pasted",
    "control.micro_batch": "Micro-batch per GPU",
    "control.sequence": "Sequence length",
    "control.target_sequence": "Target length",
    "control.image_size": "Image size",
    "control.precision": "Precision",
    "control.stage": "ZeRO stage",
    "control.offload_optimizer": "Optimizer offload",
    "control.offload_param": "Parameter offload",
    "control.gradient_accumulation_steps": "Gradient accumulation",
    "control.gradient_checkpointing": "Gradient checkpointing",
    "control.attention": "Attention",
    "control.optimizer": "Optimizer",
    "control.world_size": "GPUs",
    "control.gpu": "GPU card",
    "control.gpu.none": "no card (no verdict)",
    "control.gpu.option": "{name} · {gib} GiB",
    "control.reduce_bucket_size": "reduce_bucket_size",
    "control.overlap_comm": "overlap_comm",
    "control.stage3_prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "control.stage3_param_persistence_threshold": "stage3_param_persistence_threshold",
    "control.stage3_max_live_parameters": "stage3_max_live_parameters",
    "control.stage3_max_reuse_distance": "stage3_max_reuse_distance",
    "control.sub_group_size": "sub_group_size",
    "control.nvme_path": "nvme_path",
    "control.gpus_per_node": "GPUs per node",
    "reason.offload_param": "DeepSpeed offloads parameters only at stage 3.",
    "reason.offload_optimizer": "DeepSpeed offloads the optimizer only at stages 1 to 3.",
    "reason.stage3": "These five act at stage 3 only.",
    "option.none": "none",
    "option.cpu": "CPU",
    "option.nvme": "NVMe",
    "option.sdpa": "SDPA",
    "option.eager": "eager",
    "option.flash_attention_2": "flash 2",
    "option.default": "default",
    "option.on": "on",
    "option.off": "off",
    # verdict
    "verdict.fits": "Fits {card}, with {headroom} to spare.",
    "verdict.tight": "Tight on {card}: it depends on fragmentation.",
    "verdict.does not fit": "Does not fit {card}.",
    "verdict.none": "{peak} at the peak.",
    "verdict.waiting": "Working it out …",
    "verdict.recording": "Recording the model …",
    "verdict.recording.why": "Once a model, its forward and backward are written down; that takes some seconds. Now: {now}.",
    "verdict.limit": "the limit of {gib}",
    "verdict.card": "one {name}",
    "verdict.last": "The figures below are of the last setup that was right.",
    "verdict.problem": "Something in the setup needs a change.",
    "verdict.obstacle": "No estimate for this setup.",
    # figures
    "figure.peak": "Peak allocated",
    "figure.peak.when": "{phase}, {step}",
    "figure.reserved": "Peak reserved",
    "figure.headroom": "Headroom",
    "figure.headroom.of": "of {capacity}",
    "figure.over": "Over by",
    "figure.largest": "Largest micro-batch that fits",
    "figure.largest.none": "none",
    "figure.largest.wait": "…",
    "figure.largest.unknown": "–",
    "figure.host": "Host memory per process",
    "figure.host.node": "{node} a node of {n} GPUs",
    "figure.parameters": "Parameters",
    # breakdown
    "origins.title": "Where each number comes from",
    "origins.part": "Part of the estimated peak",
    "origins.size": "Size",
    "origins.kind": "Known how",
    "origins.rest": "and {n} smaller parts, {size} together",
    "origin.derived": "derived from DeepSpeed's source",
    "origin.traced": "traced from the model",
    "origin.assumed": "assumed: a stated constant",
    "table.title": "Category by category",
    "table.caption": "Bytes at the allocated peak, by category",
    "table.category": "Category",
    "table.estimated": "Estimated, {unit}",
    "table.measured": "Measured, {unit}",
    "table.difference": "Difference",
    "table.total": "Allocated at the peak",
    "table.reserved": "Reserved at its peak",
    # probe
    "probe.title": "Check it with a real step",
    "probe.run": "Run a real DeepSpeed step",
    "probe.again": "Run it again",
    "probe.cancel": "Cancel",
    "probe.cuda": "Runs this setup on the attached GPU, in a process of its own.",
    "probe.cpu": "No GPU is attached here: a small model runs on DeepSpeed’s CPU accelerator, and the sizes of its tensors are measured there.",
    "probe.none": "Nothing here can run DeepSpeed. Recorded measurements still show.",
    "probe.starting": "starting",
    "probe.seconds": "{seconds:.0f} s",
    "probe.cancelled": "Cancelled after {seconds:.0f} s.",
    "probe.failed": "The step could not be run: {text}",
    "probe.done": "Measured in {seconds:.0f} s.",
    "measured.on.cuda": "Measured on {gpu}",
    "measured.on.cpu": "Measured on DeepSpeed’s CPU accelerator, not on a GPU: the same tensors, without a GPU’s workspaces and rounding",
    "measured.when": ", recorded {date}",
    "measured.worst": "The estimate of the peak is {percent}\u00a0% {side}; the largest difference is in {category}.",
    "measured.exact": "The estimate of the peak agrees to the byte.",
    "measured.high": "above the measurement",
    "measured.low": "below the measurement",
    "records.label": "Recorded measurements",
    "records.choose": "Open one of {n} …",
    # rest
    "notes.estimated": "Notes on the estimate",
    "notes.measured": "Notes on the measurement",
    "share.title": "Take it with you",
    "share.link": "Copy link",
    "share.job": "Copy job",
    "share.config": "Copy config",
    "share.copied": "Copied",
    "share.theme": "Dark/light",
    "share.show": "Job file",
    "share.hint": "python -m explorer estimate job.json",
}


def text(key: str, **values: Any) -> str:
    """The page's text for a key, its {places} filled. Raises KeyError for a key that no text has."""
    template = ENGLISH[key]
    return template.format(**values) if values else template


_VERBS = {"is", "are", "has", "have", "holds", "must", "cannot", "needs", "names", "gives", "takes", "does"}
"""How the sentence of a BadInput begins when its field is its subject."""


def complaint(subject: str, said: str) -> str:
    """What is wrong as a whole sentence: with its subject where it needs one."""
    needs = said.split(" ", 1)[0] in _VERBS
    return sentence(f"{subject} {said}" if needs and subject else said)


def sentence(clause: str) -> str:
    """A clause with a capital and a full stop. What starts with the name of a setting keeps it."""
    clause = clause.strip()
    if not clause:
        return ""
    first = clause.split()[0]
    named = any(c in "._=\"" or c.isdigit() for c in first) or any(c.isupper() for c in first[1:])
    return (clause if named else clause[0].upper() + clause[1:]) + ("" if clause.endswith((".", "!", "?", "…")) else ".")
