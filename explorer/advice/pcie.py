"""What offload sends between GPU and host. No torch."""

from __future__ import annotations

from explorer.dsconfig import Settings
from explorer.profile import Profile
from explorer.setup import Setup


def bytes_per_step(setup: Setup, settings: Settings, profile: Profile, stage: int, parameters: bool, optimizer: bool = True) -> int:
    """Bytes over PCIe, both ways together, of one rank in one step with its `optimizer`, its `parameters`, or both on the host.

    Stages 1 and 2 (runtime/zero/stage_1_and_2.py): the rank's gradients go down in fp32 at the boundary, its weights come back in their own dtype; where
    several micro-batches accumulate, each sends its gradients down besides, the last one too, and all but the first fetch them before (`async_accumulate_grad_in_cpu_via_gpu`). Stage 3 (stage3.py, `partition_grads`): every micro-batch
    sends the rank's gradients to a buffer on the host and fetches them again. Offloaded parameters are fetched for every pass (partition_parameters.py), and do not come back by themselves; from an optimizer on the GPU they go down in their own dtype (`_reassign_or_swap_out_partitioned_parameters`).
    """
    ranks, steps = settings.world_size, settings.gradient_accumulation_steps
    share, whole = profile.trainable_parameters // ranks, profile.parameters // ranks
    copies = 2 * steps if stage == 3 else 2 * steps - 1 if steps > 1 else 0
    before = copies * (settings.accum_bytes if stage == 3 else settings.model_bytes) * share
    moved = before + 4 * share if optimizer else settings.model_bytes * share
    if not parameters:
        return moved + settings.model_bytes * share
    passes = 3 if setup.gradient_checkpointing is not False else 2
    return moved + passes * steps * settings.model_bytes * whole
