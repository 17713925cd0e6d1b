"""Make a tape: the real Hugging Face model, on the meta device, at a few sizes (torch; runs in a forked worker).

Deep models are recorded with four or six units of each repeated list of layers (the ends and two middle ones); the compiler checks
that the middle ones agree before it writes a loop. Shapes are small: on the meta device only their expressions matter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from explorer.catalog import Model, find_model, image_tokens, lengths, own_model
from explorer.dsconfig import resolve
from explorer.errors import BadInput, CouldNotRun, one_line
from explorer.estimator.bound import states_bound
from explorer.estimator.compiler import Basis, Irregular, SizeTable, basis, check_layers, compile_events
from explorer.estimator.program import Layers
from explorer.estimator.tape import Key, Tape
from explorer.setup import Setup

Emit = Callable[[dict[str, Any]], None]


def record(argument: Mapping[str, Any], emit: Emit) -> dict[str, Any]:
    """Worker entry: `argument` has "job" (a job file's content), "key" (the fields of a Key) and "factory" (an own model's function and folder, or None); returns the tape as JSON."""
    key = Key(**{**argument["key"], "trainable": tuple(argument["key"]["trainable"])})
    if argument.get("factory"):
        reference, folder = argument["factory"]
        sys.path.insert(0, folder)
        own_model(reference)
    setup = Setup.from_job(argument["job"])
    try:
        return make_tape(setup, key).to_json()
    except CouldNotRun as error:
        raise CouldNotRun(f"{error}; {_bound(setup, key)}") from None


def _bound(setup: Setup, key: Key) -> str:
    """What is known without a forward."""
    model = find_model(setup.model)
    found = lengths(setup, model)
    return states_bound(resolve(setup), _Recording(setup, model, key, None).inventory(), {"patches": found.patches})


def make_tape(setup: Setup, key: Key) -> Tape:
    """The tape of a setup's model under `key`. Raises CouldNotRun where the model's forward cannot be followed."""
    model = find_model(setup.model)
    reason = ""
    for units in (4, 6, None):
        try:
            return _Recording(setup, model, key, units).tape()
        except Irregular as error:
            reason = str(error)
    raise CouldNotRun(f"{model.name} cannot be written as a tape: {reason}; the probe measures it")


class _Recording:
    """One attempt at one tape: lists of layers thinned to `units`, or the model whole (None)."""

    def __init__(self, setup: Setup, model: Model, key: Key, units: int | None) -> None:
        self.setup, self.model, self.key, self.units = setup, model, key, units
        self.built: dict[int, tuple[Any, tuple[Layers, ...]]] = {}

    def tape(self) -> Tape:
        import torch

        torch.set_num_threads(1)
        basis_ = self._basis()
        first = dict(zip(basis_.variables, basis_.points[0], strict=True))
        traces = [self._trace(basis_, basis_.points[0])]
        _, layers = self._model(first.get("patches", 0))
        check_layers(traces[0].events, traces[0].categories, layers, self.units or 0)
        traces += [self._trace(basis_, point) for point in basis_.points[1:]]
        table = SizeTable(basis_)
        segments, program = compile_events([t.events for t in traces], traces[0].categories, table, layers, self.units or 0)
        batch = self._batch_rows(basis_, table)
        return replace(
            self.inventory(),
            variables=basis_.variables,
            exponents=basis_.exponents,
            table=np.array(table.table),
            lengths=np.array(table.lengths),
            rounding=np.array(table.rounding, dtype=np.int64),
            layers=layers,
            segments=segments,
            program=program,
            batch=batch,
        )

    def inventory(self) -> Tape:
        """A tape of the whole model's modules and parameters, with no events."""
        import torch
        import transformers

        nothing = np.zeros((0, 1))
        return Tape(
            key=self.key.text,
            versions={"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__},
            variables=(), exponents=((),), table=nothing, lengths=nothing, rounding=np.zeros((0, 4), dtype=np.int64), layers=(), segments=(), program=(), batch=(),
            window=sliding_window(self.model),
            **self._inventory(),
        )

    # --- sizes to trace at

    def _basis(self) -> Basis:
        values: dict[str, tuple[int, ...]] = {}
        contrastive = self.model.task == "contrastive"
        if not self.key.one_sample:
            values["batch"] = (2, 3, 5, 7) if contrastive else (2, 3, 5)
        if "sequence" in self.model.axes:
            values["sequence"] = self._lengths((32, 48, 80, 128), self.model.sequence_limit)
        if "target_sequence" in self.model.axes:
            values["target_sequence"] = self._lengths((16, 24, 40, 56), self.model.target_sequence_limit)
        if "image_size" in self.model.axes:
            values["patches"] = self._patches
        return basis(values, squares_of_batch=contrastive)

    @property
    def _patches(self) -> tuple[int, ...]:
        return tuple((side * (self.model.token_side or 1)) ** 2 for side in (2, 3, 4, 5))

    def _lengths(self, usual: tuple[int, ...], limit: int | None) -> tuple[int, ...]:
        window = sliding_window(self.model)
        start = window or 0 if self.key.beyond_window else image_tokens(self.model, self._patches[-1])
        if window is not None and not self.key.beyond_window:
            limit = min(limit or window, window)
        if limit is not None and start + usual[-1] > limit:
            return tuple(start + max(2, (limit - start) * k // 5) for k in (1, 2, 3, 5))
        return tuple(start + n for n in usual)

    # --- one trace

    def _trace(self, basis_: Basis, point: tuple[int, ...]) -> Any:
        import torch

        from explorer import vision
        from explorer.estimator.autocast import Autocast
        from explorer.estimator.trace import record as record_trace
        from explorer.workload import make_batch

        at = dict(zip(basis_.variables, point, strict=True))
        setup = self._setup(at)
        model, _ = self._model(at.get("patches", 0))
        batch = make_batch(self.model, setup, device="meta", dtype=getattr(torch, DTYPES[self.key.dtype]))
        autocast = Autocast(getattr(torch, AUTOCAST[self.key.dtype])) if self.key.dtype in AUTOCAST else None
        forced = "flash" if self.key.attention == "flash_attention_2" else None
        try:
            with vision.recordable(self.model, self.key.attention):
                return record_trace(model, batch, self.key.generation, forced, self.key.padding if self.model.factory is None else None, autocast)
        except (BadInput, CouldNotRun):
            raise
        except Exception as error:
            raise CouldNotRun(f"{self.model.name}'s forward stopped while it was recorded on tensors without data ({type(error).__name__}: {one_line(error, 200)}); try \"attention\": \"eager\", or the probe") from error

    def _setup(self, at: Mapping[str, int]) -> Setup:
        changes: dict[str, Any] = {"micro_batch": at.get("batch", 1), "deepspeed": {}}
        changes |= {name: at[name] for name in ("sequence", "target_sequence") if name in at}
        if at.get("patches"):
            changes["image_size"] = round(at["patches"] ** 0.5) * self.model.patch_size
        if self.key.attention == "flash_attention_2":
            changes["attention"] = "sdpa"
        return self.setup.replace(**changes, lengths=None, padding=self.key.padding)

    def _model(self, patches: int) -> tuple[Any, tuple[Layers, ...]]:
        """The model with its layers thinned out, and what was thinned; one per image size."""
        if patches not in self.built:
            model = self._full(patches)
            layers = () if self.units is None else thin_out(model, self.units)
            self.built[patches] = model, layers
        return self.built[patches]

    def _full(self, patches: int) -> Any:
        import torch

        from explorer.workload import build_model

        return build_model(self.model, self._setup({"patches": patches}), device="meta", dtype=getattr(torch, DTYPES[self.key.dtype]))

    def _batch_rows(self, basis_: Basis, table: SizeTable) -> tuple[int, ...]:
        import torch

        from explorer.workload import make_batch

        sizes = []
        for point in basis_.points:
            setup = self._setup(dict(zip(basis_.variables, point, strict=True)))
            batch = make_batch(self.model, setup, device="meta", dtype=getattr(torch, DTYPES[self.key.dtype]))
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in batch.values() if isinstance(t, torch.Tensor)}
            sizes.append(list(storages.values()))
        return tuple(table.row(together, [None] * len(together), "the batch") for together in zip(*sizes, strict=True))

    # --- the model's parts

    def _inventory(self) -> dict[str, Any]:
        """The fields of a Tape that tell of modules and parameters: of the whole model."""
        import torch

        from explorer.quantized import packed_away

        has_patches = "image_size" in self.model.axes
        unit = (self.model.token_side or 1) ** 2
        model = self._full(4 * unit if has_patches else 0)
        larger = dict(self._full(9 * unit).named_parameters()) if has_patches else {}
        named = list(model.named_parameters())
        index = {id(p): i for i, (_, p) in enumerate(named)}
        decaying = decaying_names(model)
        parameters = []
        for name, p in named:
            per_patch = (larger[name].numel() - p.numel()) // (5 * unit) if name in larger else 0
            parameters.append((name, p.numel() - 4 * unit * per_patch, per_patch, p.requires_grad, name in decaying))
        modules = list(model.modules())
        return {
            "modules": tuple(name for name, _ in model.named_modules()),
            "direct": tuple(tuple(index[id(p)] for p in m._parameters.values() if p is not None) for m in modules),
            "parameters": tuple(parameters),
            "buffers_bytes": sum(b.numel() * b.element_size() for b in model.buffers()),
            "sent_in_16_bit": _sent_in_16_bit(modules, index) if self.key.dtype in AUTOCAST else (),
            "linear_weights": _indices((m.weight for m in modules if isinstance(m, torch.nn.Linear)), index),
            "saved_as_views": _transposed_experts(modules, index),
            "packed": packed_away(model) if self.model.in_4_bit else 0,
        }


def _indices(parameters: Iterable[Any], index: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({index[id(p)] for p in parameters}))


def _sent_in_16_bit(modules: Iterable[Any], index: Mapping[int, int]) -> tuple[int, ...]:
    """Parameters of exactly these classes, tied ones included: those that DeepSpeed marks under autocast."""
    from deepspeed.runtime.torch_autocast import LOWER_PRECISION_SAFE_MODULES

    return _indices((p for m in modules if m.__class__ in LOWER_PRECISION_SAFE_MODULES for p in m.parameters(recurse=False)), index)


def _transposed_experts(modules: Iterable[Any], index: Mapping[int, int]) -> tuple[int, ...]:
    """Experts' weights, one tensor for all experts of a layer, that are kept (out, in) and so transposed at each use."""
    experts = [m for m in modules if hasattr(m, "num_experts") and not getattr(m, "is_transposed", False)]
    return _indices((p for m in experts for p in m.parameters(recurse=False) if p.dim() == 3), index)


def decaying_names(model: Any) -> set[str]:
    """Names of the parameters to which the Hugging Face Trainer gives weight decay, by its own rule (transformers/trainer.py, `get_decay_parameter_names`)."""
    from transformers.trainer import Trainer

    return set(Trainer.get_decay_parameter_names(None, model))


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "autocast_fp16": "float32", "autocast_bf16": "float32"}
"""Of the weights and the batch, by a key's dtype."""
AUTOCAST = {"autocast_fp16": "float16", "autocast_bf16": "bfloat16"}


def sliding_window(model: Model) -> int | None:
    """The model's sliding window in tokens, where its config says one is used."""
    config = model.config
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    return window


def thin_out(model: Any, units: int) -> tuple[Layers, ...]:
    """Keep `units` units of every long list of equal layers, in place; returns the lists with their real lengths."""
    import torch

    thinned: list[Layers] = []
    for path, module in list(model.named_modules()):
        inside = any(path.startswith(x.path + ".") for x in thinned)
        if not isinstance(module, torch.nn.ModuleList) or inside:
            continue
        period = _period([_fingerprint(layer) for layer in module], units)
        if period is None:
            continue
        keep = [*range((units - 1) * period), *range(len(module) - period, len(module))]
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, path.rpartition(".")[2], torch.nn.ModuleList(module[i] for i in keep))
        thinned.append(Layers(path, len(module) // period, period))
    return tuple(thinned)


def _period(prints: list[Any], units: int) -> int | None:
    """The shortest period of a list of layers, its first and last unit apart; None where it is too short or has none."""
    n = len(prints)
    for period in range(1, 9):
        if n % period or n // period <= units:
            continue
        if all(prints[i] == prints[i + period] for i in range(period, n - 2 * period)):
            return period
    return None


_NUMBERING = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "training"}


def _fingerprint(layer: Any) -> Any:
    """Everything that can make a layer act otherwise than its neighbour: classes, shapes and plain settings."""
    parts = []
    for name, module in layer.named_modules():
        settings = sorted((k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and k not in _NUMBERING)
        shapes = [(k, tuple(p.shape), p.requires_grad) for k, p in module._parameters.items() if p is not None]
        parts.append((name, type(module).__name__, settings, shapes))
    return repr(parts)
