"""Host memory of a training process: DeepSpeed's blocks, the data loader's, and what CUDA's libraries and kernels take. No torch.

CUDA loads a kernel's module when the kernel first runs, and keeps a copy of it on the host. What a process takes beyond its
tensors is therefore a sum over what it runs: one amount for CUDA, PyTorch and NCCL, and one for each family of kernels that the
job has. The amounts are fitted together (relative least squares) on the rows of benchmarks/accuracy that ran to their end;
`python -m benchmarks.accuracy.host_parts` fits them anew, and prints how far off they are on architectures that the fit left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from explorer.catalog import Model
from explorer.dsconfig.dataloader import Loader, loader
from explorer.estimator.rules.base import Rules
from explorer.estimator.rules.stage3 import Stage3
from explorer.estimator.rules.stage12 import Stage12
from explorer.estimator.tape import Tape
from explorer.estimator.work import Work
from explorer.profile import Host
from explorer.units import power_of_two

PARTS: dict[str, int] = {
    "cuda": 463_000_000,
    "nccl": 379_000_000,
    "layer kind": 10_200_000,
    "fused attention": 64_000_000,
    "convolution": 99_000_000,
    "routing": 138_000_000,
    "fp32 weights": -140_000_000,
    "frozen weights": -41_000_000,
    "flat partitions": 253_000_000,
    "stage 3": 123_000_000,
    "optimizer on the host": -170_000_000,
}
"""Part → bytes, measured: fitted on the rows of benchmarks/accuracy that ran to their end. "cuda" is the context and what every job runs; "layer kind"
comes once for each of `Tape.layer_kinds`; negative parts are kernels that such a job leaves out: products in 16 bit, of the weights' gradients, FusedAdam."""
NCCL_BYTES = PARTS["nccl"]
"""What NCCL's first collective adds; a process that stands in for a rank of several has none."""
SHARED_KINDS = 60
"""Kinds of layer from which on a model's own kernels are all that DeepSpeed's flat partitions need too; each is loaded once."""
_WITH_CONVOLUTION = ("contrastive", "image", "image_text", "speech")
"""Tasks that begin with a convolution over pixels or sound (cuDNN)."""


def parts(rules: Rules, tape: Tape, model: Model, attention: str) -> Iterator[tuple[str, float]]:
    """(part, how often) for all that the process loads."""
    own = 1 - min(1.0, tape.layer_kinds / SHARED_KINDS)
    yield "cuda", 1
    yield "nccl", 1
    yield "layer kind", tape.layer_kinds
    yield "fused attention", attention != "eager"
    yield "convolution", model.task in _WITH_CONVOLUTION
    yield "routing", any("experts" in name.split(".") for name in tape.modules)
    yield "fp32 weights", rules.settings.precision == "fp32"
    yield "frozen weights", not all(p.trainable for p in rules.job.parameters)
    yield "flat partitions", own * isinstance(rules, Stage12)
    yield "stage 3", own * isinstance(rules, Stage3)
    yield "optimizer on the host", rules.settings.offload_optimizer is not None


def process_bytes(rules: Rules, tape: Tape, model: Model, attention: str) -> int:
    """Resident bytes of a process beyond Python, torch and DeepSpeed as imported, and beyond its tensors."""
    return round(sum(PARTS[name] * count for name, count in parts(rules, tape, model, attention)))


def loader_bytes(loader: Loader | None, batch: Sequence[int]) -> int:
    """Page-locked bytes of a data loader: each tensor of each batch that is there at once, rounded to a power of two. `batch`: bytes of one batch's tensors."""
    return 0 if loader is None or not loader.pins else loader.batches * sum(power_of_two(n) for n in batch)


def host(work: Work) -> Host:
    """The answer's host part."""
    setup, held = work.setup, work.rules.host
    process = process_bytes(work.rules, work.tape, work.model, setup.attention)
    loading = loader_bytes(loader(setup), work.batch_bytes)
    pinned = held.pinned_bytes + loading
    processes = min(setup.world_size, setup.gpus_per_node)
    first, other = (held.peak_of(saves) + loading + process for saves in (True, held.every_rank_saves))
    return Host(
        pinned_bytes=pinned, pageable_bytes=held.pageable_bytes, resident_bytes=pinned + held.pageable_bytes + process,
        peak_bytes=other if setup.rank else first, per_node_bytes=first + other * (processes - 1),
    )
