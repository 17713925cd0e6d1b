"""What a save of the model takes, beyond what training holds (0.19.8's runtime/engine.py, `_zero3_consolidated_16bit_state_dict`;
accelerate 1.15's accelerator.py, `get_state_dict`)."""

from __future__ import annotations

from explorer.dsconfig import Settings
from explorer.dsconfig.between_steps import GATHER, Save
from explorer.estimator.rules.base import Rules
from explorer.estimator.tape import Tape
from explorer.units import human


def host_bytes(settings: Settings, tape: Tape, patches: int, adapters: bool) -> int:
    """Of a rank that has the copy: every weight in the model's dtype, tied ones once. `adapters`: at stage 3 the Trainer saves those alone."""
    alone = adapters and settings.stage == 3
    return settings.model_bytes * sum(p.numel for p in tape.model_parameters(patches) if p.trainable or not alone)


def gpu_bytes(settings: Settings, tape: Tape, patches: int) -> tuple[int, str]:
    """Of each GPU at stage 3: the weights of one module at a time, without its children's; the largest, and its name."""
    parameters = tape.model_parameters(patches)
    sizes = [settings.model_bytes * sum(parameters[i].numel for i in own) for own in tape.direct]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[largest], tape.modules[largest]


def play(rules: Rules, asked: Save, n_bytes: int) -> None:
    """The events of a save, and its copy on the host."""
    if asked.gathers:
        rules.gather_for_save()
    if asked.gathers or asked.clones:
        rules.host.saved(n_bytes, every_rank=not asked.gathers)


def note(asked: Save, settings: Settings, tape: Tape, patches: int, adapters: bool) -> str | None:
    """What to say of it beside an estimate."""
    copied = human(host_bytes(settings, tape, patches, adapters))
    if asked.gathers:
        gathered, module = gpu_bytes(settings, tape, patches)
        return (
            f"zero_optimization.{GATHER}: a save gathers the weights whole; rank 0's host then holds {copied} more, "
            f"and each GPU up to {human(gathered)} more, those of {module or 'the model itself'}"
        )
    if asked.clones:
        return f"a save of the Trainer copies the weights to the host on every rank: {copied} more for each"
    return None
