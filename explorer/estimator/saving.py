"""What saving a stage 3 model whole takes, beyond what training holds (deepspeed/runtime/engine.py, `_zero3_consolidated_16bit_state_dict`, 0.19.8)."""

from __future__ import annotations

from explorer.dsconfig import Settings
from explorer.dsconfig.keys import read_bool
from explorer.estimator.tape import Tape
from explorer.units import human

_KEY = "stage3_gather_16bit_weights_on_model_save"


def gathers(settings: Settings) -> bool:
    """Whether a save gathers the weights: at stage 3, where the config asks for it (an "auto" that nobody filled is DeepSpeed's default, false)."""
    asked = settings.config["zero_optimization"].get(_KEY, "auto")
    return settings.stage == 3 and asked != "auto" and read_bool(asked, f"deepspeed.zero_optimization.{_KEY}")


def host_bytes(settings: Settings, tape: Tape, patches: int) -> int:
    """Of rank 0: every weight in the model's dtype, tied ones once. Adapters and frozen weights are saved alike."""
    return settings.model_bytes * sum(p.numel for p in tape.model_parameters(patches))


def gpu_bytes(settings: Settings, tape: Tape, patches: int) -> tuple[int, str]:
    """Of each GPU: the weights of one module at a time, without its children's; the largest, and its name."""
    parameters = tape.model_parameters(patches)
    sizes = [settings.model_bytes * sum(parameters[i].numel for i in own) for own in tape.direct]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[largest], tape.modules[largest]


def note(settings: Settings, tape: Tape, patches: int) -> str:
    """What to say of it beside an estimate."""
    gathered, module = gpu_bytes(settings, tape, patches)
    return f"zero_optimization.{_KEY}: a save is no part of the step; rank 0's host then holds {human(host_bytes(settings, tape, patches))} more, all weights whole, and each GPU up to {human(gathered)} more, those of {module or 'the model itself'}"
