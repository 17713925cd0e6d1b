"""What the tools people use today say of the same rows, each only where it speaks.

No tool is asked for what it does not claim: each has a domain (below, in its function's docstring), and outside it says None.
Shapes, GPUs, stage, offload and checkpointing are the row's own; everything a tool has no input for stays at the tool's default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from benchmarks.accuracy import llm_analysis
from benchmarks.accuracy.facts import decoder, load
from benchmarks.accuracy.formulas import Decoder, cookbook, megatron_activations
from benchmarks.accuracy.rows import Pair, Row, read
from explorer.catalog import find_model, lengths
from explorer.dsconfig import Settings, resolve
from explorer.setup import Setup


@dataclass(frozen=True)
class Case:
    """A row in the words that the tools share."""

    row: Row
    facts: Mapping[str, Any]

    @cached_property
    def setup(self) -> Setup:
        """The row's job."""
        return Setup.from_job(self.row.setup)

    @cached_property
    def settings(self) -> Settings:
        """What DeepSpeed makes of it."""
        return resolve(self.setup)

    @cached_property
    def model(self) -> Decoder | None:
        """The shape of a decoder-only model."""
        return decoder(self.facts)

    @cached_property
    def sizes(self) -> tuple[int, int | None]:
        """(samples per GPU, tokens)."""
        at = lengths(self.setup, find_model(self.setup.model))
        return at.micro_batch, at.sequence

    @property
    def nodes(self) -> tuple[int, int]:
        """(GPUs per node, nodes)."""
        per_node = min(self.setup.world_size, self.setup.gpus_per_node)
        return per_node, math.ceil(self.setup.world_size / per_node)

    @property
    def checkpointed(self) -> bool:
        """Whether activations are recomputed."""
        return self.setup.gradient_checkpointing is not False

    @property
    def autocast(self) -> bool:
        """Whether torch.autocast does the mixing, over fp32 weights."""
        section = self.settings.config.get("torch_autocast")
        return isinstance(section, Mapping) and bool(section.get("enabled"))

    @property
    def sixteen_bit(self) -> bool:
        """16-bit weights with fp32 masters, which is what most formulas mean by mixed precision."""
        return self.settings.precision != "fp32" and not self.autocast

    @property
    def all_adam(self) -> bool:
        """Every parameter trains, under Adam or AdamW."""
        return self.setup.trainable == ("*",) and self.setup.lora is None and self.settings.optimizer.name in ("adam", "adamw")

    @property
    def offloaded(self) -> bool:
        """Anything on the host."""
        return self.settings.offload_optimizer is not None or self.settings.offload_param is not None


# --- DeepSpeed


@lru_cache(maxsize=1)
def _deepspeed() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The installed DeepSpeed's two functions, None without DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # arithmetic needs none, and DeepSpeed would say that it looked for one
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return None
    return estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs


def deepspeed_needs(case: Case) -> tuple[int, int] | None:
    """(host bytes of a node, GPU bytes): DeepSpeed's own functions. Stages 2 and 3 (0 and 1 have none), 16 bit, Adam on every parameter.

    Stage 3 with parameters offloaded and the optimizer not has no case there.
    """
    s, functions = case.settings, _deepspeed()
    if functions is None or s.stage < 2 or not case.sixteen_bit or not case.all_adam:
        return None
    per_node, nodes = case.nodes
    shared = {"num_gpus_per_node": per_node, "num_nodes": nodes, "cpu_offload": s.offload_optimizer is not None}
    if s.stage == 2:
        host, gpu = functions[0](case.facts["parameters"], **shared)
        return int(host), int(gpu)
    if s.offload_param is not None and s.offload_optimizer is None:
        return None
    host, gpu, _ = functions[1](case.facts["parameters"], case.facts["largest_layer"], cpu_offload_params=s.offload_param is not None, zero_init=s.zero_init, **shared)
    return int(host), int(gpu)


# --- accelerate


@lru_cache(maxsize=1)
def _accelerate() -> Callable[..., Any] | None:
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    return estimate_training_usage


def accelerate_needs(case: Case) -> int | None:
    """`accelerate estimate-memory`, its column for training with Adam: one GPU, nothing partitioned or offloaded, every parameter, batch of one (it asks for no other)."""
    usage, size = _accelerate(), case.facts["accelerate_bytes"]
    if usage is None or size is None or case.setup.world_size > 1 or case.offloaded or not case.all_adam:
        return None
    return int(max(usage(size, "float32" if case.settings.precision == "fp32" and not case.autocast else "float16").values()))


# --- closed formulas and llm-analysis


def cookbook_needs(case: Case) -> int | None:
    """EleutherAI's calculator: decoder-only models, Adam on every parameter, nothing offloaded; 16 bit or full precision."""
    if case.model is None or not case.all_adam or case.offloaded or case.autocast:
        return None
    batch, sequence = case.sizes
    zero = case.settings.config.get("zero_optimization", {})
    bucket = zero.get("allgather_bucket_size", 500_000_000)
    return int(cookbook(
        case.model, batch=batch, sequence=sequence, stage=case.settings.stage, gpus=case.setup.world_size, checkpointing=case.checkpointed, mixed=case.sixteen_bit,
        allgather_bucket=500_000_000 if bucket == "auto" else int(bucket), live_parameters=case.settings.max_live_parameters,
    ))


def megatron_needs(case: Case) -> int | None:
    """Korthikanti's formula: activations of a dense decoder-only model in 16 bit, whatever trains them and wherever the states are."""
    if case.model is None or case.model.experts or not case.sixteen_bit or case.setup.lora is not None or case.setup.trainable != ("*",):
        return None
    batch, sequence = case.sizes
    return int(megatron_activations(case.model, batch=batch, sequence=sequence, recompute=case.checkpointed, fused=case.setup.attention != "eager"))


def llm_analysis_question(case: Case) -> dict[str, Any] | None:
    """llm-analysis 0.2.2: decoder-only models in 16 bit, Adam on every parameter, nothing offloaded."""
    if case.model is None or not case.all_adam or case.offloaded or not case.sixteen_bit:
        return None
    m, (batch, sequence) = case.model, case.sizes
    return llm_analysis.question(
        layers=m.layers, hidden=m.hidden, heads=m.heads, kv_heads=m.kv_heads, feed_forward=m.feed_forward, vocabulary=m.vocabulary, experts=m.experts, gated=m.mlp_matrices == 3,
        batch=batch, sequence=sequence, gpus=case.setup.world_size, stage=case.settings.stage, flash=case.setup.attention != "eager", recompute=case.checkpointed,
    )


def llm_analysis_questions() -> Iterator[dict[str, Any]]:
    """For every row that it speaks of."""
    facts = load()
    for row in read():
        known = facts.get(find_model(row.setup["model"]).key)
        asked = None if known is None else llm_analysis_question(Case(row, known))
        if asked is not None:
            yield asked


# --- side by side


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One tool against one measured quantity: ratios said / measured, and ours on the same rows."""

    tool: str
    of: str
    said: tuple[float, ...]
    ours: tuple[float, ...]
    names: tuple[str, ...]

    @property
    def worst(self) -> int:
        """The position of the tool's worst ratio."""
        return max(range(len(self.said)), key=lambda i: farness(self.said[i]))


def farness(ratio: float) -> float:
    """How far a ratio is from 1: half as much and twice as much are equally far."""
    return abs(math.log(ratio)) if ratio > 0 else math.inf


_STATES = ("parameters", "gradients", "optimizer", "gathered")


def side_by_side(pairs: Sequence[Pair]) -> list[Line]:
    """Every tool on the rows it speaks of."""
    cases = list(_cases(pairs))
    answers = llm_analysis.load()

    def asked(case: Case) -> int | None:
        question = llm_analysis_question(case)
        return None if question is None else answers.get(llm_analysis.text(question))

    def gpu(case: Case) -> int | None:
        needs = deepspeed_needs(case)
        return None if needs is None else needs[1]

    def host(case: Case) -> int | None:
        needs = deepspeed_needs(case)
        return needs[0] if needs is not None and case.settings.offload_optimizer is not None and case.setup.world_size == 1 else None

    quantities = (
        ("DeepSpeed `estimate_zero2/3_model_states_mem_needs`", "the whole peak", gpu, _peak),
        ("", "model states alone", gpu, _states),
        ("", "host memory, with offload, one GPU", host, _resident),
        ("`accelerate estimate-memory` (training)", "the whole peak", accelerate_needs, _peak),
        ("", "model states alone", accelerate_needs, _states),
        ("EleutherAI `calc_transformer_mem`", "the whole peak", cookbook_needs, _peak),
        ("Korthikanti et al. 2022", "activations alone", megatron_needs, _activations),
        ("llm-analysis 0.2.2", "the whole peak", asked, _peak),
    )
    return [_line(tool, of, tell, both, cases) for tool, of, tell, both in quantities]


def _cases(pairs: Iterable[Pair]) -> Iterator[tuple[Case, Pair]]:
    facts = load()
    for p in pairs:
        known = facts.get(find_model(p.row.setup["model"]).key)
        if known is not None:
            yield Case(p.row, known), p


def not_installed() -> list[str]:
    """Tools that could not be asked because they are not here."""
    return [name for name, found in (("DeepSpeed", _deepspeed()), ("accelerate", _accelerate())) if found is None]


def without_facts(pairs: Iterable[Pair]) -> list[str]:
    """Models that facts.json lacks, so that no tool could be asked of them."""
    facts = load()
    models = {m.key: m.name for m in (find_model(p.row.setup["model"]) for p in pairs)}
    return sorted(name for key, name in models.items() if key not in facts)


def _line(tool: str, of: str, tell: Callable[[Case], int | None], both: Callable[[Pair], tuple[int, int] | None], cases: Sequence[tuple[Case, Pair]]) -> Line:
    said, ours, names = [], [], []
    for case, p in cases:
        told, known = tell(case), both(p)
        if told is not None and known is not None and known[1] > 0:
            said.append(told / known[1])
            ours.append(known[0] / known[1])
            names.append(p.row.name)
    return Line(tool=tool, of=of, said=tuple(said), ours=tuple(ours), names=tuple(names))


def _peak(p: Pair) -> tuple[int, int]:
    """(estimated, measured)."""
    return p.profile.peak.allocated_bytes, p.row.peak["allocated_bytes"]


def _states(p: Pair) -> tuple[int, int] | None:
    if p.row.at_peak is None:
        return None
    return tuple(sum(at.get(name, 0) for name in _STATES) for at in (p.profile.at_peak, p.row.at_peak))


def _activations(p: Pair) -> tuple[int, int] | None:
    """Where the peak stands in forward or backward: in the step they are gone."""
    if p.row.at_peak is None or p.row.peak["allocated_phase"] not in ("forward", "backward"):
        return None
    return p.profile.at_peak.get("activations", 0), p.row.at_peak.get("activations", 0)


def _resident(p: Pair) -> tuple[int, int] | None:
    measured = p.row.host.get("resident_bytes")
    return None if measured is None else (p.profile.host.resident_bytes, measured)
