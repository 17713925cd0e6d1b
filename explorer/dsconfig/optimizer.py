"""An optimizer as far as memory is concerned. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

Kernel = Literal["fused", "foreach", "single", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """The optimizer that updates the fp32 masters."""

    name: str
    """As DeepSpeed's "type" or the Trainer's `optim`, lower case: "adamw", "sgd", "adafactor", ..."""
    kernel: Kernel
    """"fused": no temporaries; "foreach": torch's default on a GPU, temporaries for all tensors of a group at once; "single": one tensor after the other; "cpu": on the host."""
    moments: int
    """State tensors of the master's size: 2 for Adam, 1 for momentum or Lion, 0 for plain SGD."""
    state_bits: Literal[8, 32] = 32
    """Of an element of a state: 8 in bitsandbytes' small ones."""
    implementation: str
    """The class, for people: "FusedAdam", "torch.optim.AdamW", "DeepSpeedCPUAdam"."""
    foreach_temporaries: int = 0
    """fp32 temporaries of a tensor's size at the step's highest point, in a parameter group with weight decay or where there is one group only."""
    undecayed_temporaries: int = 0
    """The same in the Trainer's second group, which has no weight decay."""
    step_scalars: int = 0
    """Scalars on the GPU for each master (torch's fused kernels count steps there)."""
    factored: bool = False
    """Whether a master that is a matrix has a state of its rows and one of its columns instead (Adafactor); a flat one has none of either."""
    states_at_init: bool = False
    """Whether its constructor makes the states, and not its first step (torch's Adagrad)."""
    states_left_behind: int = 0
    """State tensors of the model's parameters, in their dtype, that a first instance made on the GPU before DeepSpeed replaced it by another, and that stay (torch's Adagrad)."""

    def state_bytes(self, elements: int, matrix: bool = False) -> tuple[int, ...]:
        """Bytes of each state tensor of a master of so many elements: in 8 bit one byte an element, and an fp32 maximum for every block of 256; small masters keep fp32 states.

        A factored `matrix` counts as a square one, since its sides are not known here: less than a thousandth of its bytes either way.
        """
        if self.factored and matrix:
            return (4 * isqrt(elements),) * 2 * self.moments
        if not self.in_8_bit(elements):
            return (4 * elements,) * self.moments
        return (elements,) * self.moments + (4 * -(-elements // _BLOCK_8_BIT),) * self.moments

    def in_8_bit(self, elements: int) -> bool:
        """Whether a master of so many elements has states of 8 bit."""
        return self.state_bits == 8 and elements >= _SMALLEST_8_BIT


_SMALLEST_8_BIT, _BLOCK_8_BIT = 4096, 256
"""`min_8bit_size` and `blocksize` (bitsandbytes/optim/optimizer.py, `init_state`)."""
