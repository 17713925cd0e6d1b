"""Tape: one forward and backward of a model, written down as a small program. No torch.

A tape is what the real Hugging Face model did on the meta device: each block allocated and freed in order, the module it
belongs to, each gradient that became ready, each module entered and left in both directions. Repeated layers are kept once:

    prologue · first layer · middle layer × (n − 2) · last layer · ... loss ... · last · middle × (n − 2) · first · epilogue

A block inside a layer is named relative to that layer, so one middle layer stands for all. Sizes are unrounded bytes: a
polynomial in the batch and lengths, for a few kernels times a rounded-up length or only above a threshold (`Varying`).
`Tape.unrolled` is the flat event list; `Tape.values(lengths)` the bytes of each block for one setup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from explorer.errors import BadInput
from explorer.estimator.program import Layers, Segment, Unrolled, unroll

LARGEST_BLOCK_BYTES = 1 << 48
"""A block above this is a typing slip, and sums of such would not fit 64 bits."""
VARIABLES = ("batch", "sequence", "target_sequence", "patches")


class Varying(NamedTuple):
    """How a block departs from a polynomial: times `length` rounded up to `multiple`; nothing unless `length` is above `above`;
    times min(`length`, `most`) and a tenth of `length`; or the scratch of a sum over `length` rows of `columns`."""

    length: int
    multiple: int = 0
    above: int = -1
    columns: int = 0
    most: int = 0


MULTIPROCESSORS = 132
"""Of the card that scratch is sized for: an H100 or H200. Others differ by tens of MiB at most."""


def column_sum_scratch(rows: int, columns: int) -> int:
    """Bytes that CUDA's sum over the rows of a contiguous (rows, columns) matrix holds (ATen/native/cuda/Reduce.cuh, `setReduceConfig`).

    Blocks of 128 threads reduce four columns a thread; long columns are split over several blocks that meet in this buffer.
    """
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    threads = 512 // vector
    width = min(_power_below(columns // vector, threads), 32)
    height = min(_power_below(rows, threads), threads // width)
    width = min(_power_below(columns // vector, threads), threads // height)
    values = -(-rows // height) if rows >= min(height * 16, 256) else rows
    grid = -(-(columns // vector) // width)
    target = MULTIPROCESSORS * (2048 // (width * height))
    if values == rows or values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power_below(n: int, most: int) -> int:
    return min(1 << (max(n, 1).bit_length() - 1), most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Everything that changes a tape's events. Batch and lengths are not in it: sizes are expressions in them."""

    model: str
    """Digest of class and config."""
    dtype: str
    attention: str
    """As asked: "sdpa", "eager", "flash_attention_2"."""
    generation: str
    """Of cards: "hopper", "ampere", "older"; "any" where no attention kernel depends on it."""
    checkpointing: Literal["none", "non_reentrant", "reentrant"] = "none"
    padding: bool = False
    use_cache: bool = False
    trainable: tuple[str, ...] = ("*",)
    lora: str = ""
    one_sample: bool = False
    """Batch of one: some copies fall away."""
    beyond_window: bool = False
    """Sequence longer than the model's sliding window."""

    @property
    def text(self) -> str:
        """The key as one line, a file's name or a dictionary's key."""
        parts = [self.model, self.dtype, self.attention, self.generation, self.checkpointing]
        parts += [name for name in ("padding", "use_cache", "one_sample", "beyond_window") if getattr(self, name)]
        parts += [f"lora={self.lora}"] if self.lora else []
        parts += [f"trainable={','.join(self.trainable)}"] if self.trainable != ("*",) else []
        return "/".join(parts)


class Parameter(NamedTuple):
    """One parameter in DeepSpeed's order (`named_parameters`, tied ones once)."""

    name: str
    numel: int
    trainable: bool
    decays: bool = True
    """Whether the Hugging Face Trainer gives it weight decay, which puts it into the first of its two optimizer groups."""


@dataclass(frozen=True, kw_only=True)
class Tape:
    """See the module's text. `to_json` and `from_json` are exact inverses."""

    key: str
    versions: Mapping[str, str]
    variables: tuple[str, ...]
    exponents: tuple[tuple[int, ...], ...]
    """One monomial each: exponents of `variables`."""
    table: np.ndarray
    """float64 (sizes, monomials): coefficients of bytes."""
    lengths: np.ndarray
    """float64 (sizes, monomials): coefficients of a Varying's length; zeros where there is none."""
    rounding: np.ndarray
    """int64 (sizes, 4): multiple (0: none), threshold (−1: none), columns (0: no sum) and most (0: none) of a Varying."""
    parameters: tuple[tuple[str, int, int, bool, bool], ...]
    """name, elements, further elements per patch, trainable, decays."""
    buffers_bytes: int
    modules: tuple[str, ...]
    direct: tuple[tuple[int, ...], ...]
    """Per module: its own parameters."""
    layers: tuple[Layers, ...]
    segments: tuple[Segment, ...]
    program: tuple[tuple[int, ...], ...]
    """(segment,) runs once; (list, direction, first, second, middle, next to last, last) runs a list of layers."""
    batch: tuple[int, ...]
    """Size rows of the batch's own tensors."""
    window: int | None = None
    sent_in_16_bit: tuple[int, ...] = ()
    """Under autocast: the parameters of linear and convolution layers (deepspeed/runtime/torch_autocast.py, `LOWER_PRECISION_SAFE_MODULES`)."""
    packed: int = 0
    """Elements of 4-bit weights beyond those of `parameters`, which count what they are kept in."""
    linear_weights: tuple[int, ...] = ()
    """Parameters of which torch.nn.functional.linear saves a transposed view, unless DeepSpeed's own stands in for it."""
    saved_as_views: tuple[int, ...] = ()
    """Parameters that are transposed before a grouped product, so that autograd saves a view of them (transformers/integrations/moe.py, `_grouped_linear`)."""

    @property
    def checkpointing(self) -> str:
        """As in the key: "none", "non_reentrant" or "reentrant"."""
        return self.key.split("/")[4]

    def model_parameters(self, patches: int = 0) -> tuple[Parameter, ...]:
        """All parameters at a number of image patches."""
        return tuple(Parameter(name, base + per * patches, trainable, decays) for name, base, per, trainable, decays in self.parameters)

    def values(self, lengths: Mapping[str, int | None]) -> np.ndarray:
        """int64 bytes of each row of the size table, given VARIABLES → value."""
        point = [lengths.get(name) or 0 for name in self.variables]
        monomials = np.array([np.prod([float(x) ** e for x, e in zip(point, exponent, strict=True)]) for exponent in self.exponents])
        sizes = self.table @ monomials
        length = np.rint(self.lengths @ monomials)
        multiple, above = self.rounding[:, 0], self.rounding[:, 1]
        rounds = multiple > 0
        sizes[rounds] *= np.ceil(length[rounds] / multiple[rounds]) * multiple[rounds]
        limited = self.rounding[:, 3] > 0
        sizes[limited] *= np.minimum(length[limited], self.rounding[limited, 3]) + length[limited] // 10
        sizes[(above >= 0) & (length <= above)] = 0
        for row in np.flatnonzero(self.rounding[:, 2]):
            sizes[row] = column_sum_scratch(int(length[row]), int(self.rounding[row, 2]))
        if sizes.size and sizes.max() > LARGEST_BLOCK_BYTES:
            raise BadInput("micro_batch", "and the lengths make single tensors that no machine can hold; give smaller ones")
        return np.rint(sizes).astype(np.int64)

    @cached_property
    def unrolled(self) -> Unrolled:
        """The program written out."""
        return unroll(self.segments, self.program, self.layers, self.modules, [p[0] for p in self.parameters])

    @cached_property
    def layer_kinds(self) -> int:
        """Kinds of layer in the forward: different pairs of a module's own parameters and a block that it makes. CUDA's libraries choose
        their kernels by such shapes, so it counts what they load."""
        flat, sizes = self.unrolled, [p[1:3] for p in self.parameters]
        shapes: dict[tuple[Any, ...], int] = {}
        kinds = [shapes.setdefault(tuple(sizes[i] for i in own), len(shapes)) for own in self.direct]
        made = flat.order[: flat.forward_end]
        made = made[made > 0] - 1
        made = made[flat.owners[made] >= 0]
        return len(set(zip(np.array(kinds)[flat.owners[made]].tolist(), flat.size_rows[made].tolist(), strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "key": self.key,
            "versions": dict(self.versions),
            "variables": list(self.variables),
            "exponents": [list(e) for e in self.exponents],
            "table": _sparse(self.table),
            "lengths": _sparse(self.lengths),
            "rounding": self.rounding.tolist(),
            "parameters": [list(p) for p in self.parameters],
            "buffers_bytes": self.buffers_bytes,
            "modules": list(self.modules),
            "direct": [list(d) for d in self.direct],
            "layers": [list(x) for x in self.layers],
            "segments": [[list(s.place), [list(e) for e in s.events]] for s in self.segments],
            "program": [list(p) for p in self.program],
            "batch": list(self.batch),
            "window": self.window,
            "sent_in_16_bit": list(self.sent_in_16_bit),
            "packed": self.packed,
            "linear_weights": list(self.linear_weights),
            "saved_as_views": list(self.saved_as_views),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tape:
        """The tape that `to_json` wrote."""
        width = len(data["exponents"])
        return cls(
            key=data["key"],
            versions=data["versions"],
            variables=tuple(data["variables"]),
            exponents=tuple(tuple(e) for e in data["exponents"]),
            table=_dense(data["table"], width),
            lengths=_dense(data["lengths"], width),
            rounding=np.array(data["rounding"], dtype=np.int64).reshape(-1, 4),
            parameters=tuple((p[0], p[1], p[2], p[3], p[4]) for p in data["parameters"]),
            buffers_bytes=data["buffers_bytes"],
            modules=tuple(data["modules"]),
            direct=tuple(tuple(d) for d in data["direct"]),
            layers=tuple(Layers(*x) for x in data["layers"]),
            segments=tuple(Segment(tuple(place), tuple(_event(e) for e in events)) for place, events in data["segments"]),
            program=tuple(tuple(p) for p in data["program"]),
            batch=tuple(data["batch"]),
            window=data.get("window"),
            sent_in_16_bit=tuple(data.get("sent_in_16_bit", ())),
            packed=data.get("packed", 0),
            linear_weights=tuple(data.get("linear_weights", ())),
            saved_as_views=tuple(data.get("saved_as_views", ())),
        )


def _event(event: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x) if isinstance(x, list) else x for x in event)


def _sparse(matrix: np.ndarray) -> list[list[float]]:
    rows = []
    for row in matrix:
        flat: list[float] = []
        for column in np.flatnonzero(row):
            value = float(row[column])
            flat += [int(column), int(value) if value.is_integer() else value]
        rows.append(flat)
    return rows


def _dense(rows: Sequence[Sequence[float]], width: int) -> np.ndarray:
    matrix = np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        for column, value in zip(row[::2], row[1::2], strict=True):
            matrix[i, int(column)] = value
    return matrix
