"""What llm-analysis says: the question in its words, and its answers as kept in `llm_analysis.json` (ask_llm_analysis.py asks it)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SAID = Path(__file__).parent / "llm_analysis.json"

ASK = r"""
import json, logging, sys
logging.disable(logging.CRITICAL)
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig
gpu = GPUConfig("any", 1e6, 4800, 900, 1e-6, 989)  # so much memory that it never refuses a batch
for line in sys.stdin:
    q = json.loads(line)
    model = ModelConfig(name="m", max_seq_len=q["sequence"], **q["model"])
    asked = LLMAnalysis(model, gpu, DtypeConfig("w16a16e16", 16, 16, 16), ParallelismConfig(dp_size=q["gpus"]))
    said = asked.training(
        batch_size_per_gpu=q["batch"], seq_len=q["sequence"], ds_zero=DSZeRO(q["stage"]), flash_attn=q["flash"], mlp_gated_linear_units=q["gated"],
        activation_recomputation=ActivationRecomputation.FULL if q["recompute"] else ActivationRecomputation.NONE)
    json.dump(int(said["(weight+op_state+grad+act)_memory_per_gpu"]), sys.stdout)
    print()
"""
"""Run by the other environment's interpreter: a question a line in, bytes of one GPU a line out."""


def question(*, layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int, experts: int, gated: bool, batch: int, sequence: int, gpus: int, stage: int, flash: bool, recompute: bool) -> dict[str, Any]:
    """The same shapes in llm-analysis's words; all that it has no word for is left at its default."""
    model = {"num_layers": layers, "n_head": heads, "hidden_dim": hidden, "vocab_size": vocabulary, "num_key_value_heads": kv_heads, "ffn_embed_dim": feed_forward, "expansion_ratio": feed_forward / hidden}
    if experts:
        model |= {"moe_num_experts": experts, "moe_top_k": 2}
    return {"model": model, "gated": gated, "batch": batch, "sequence": sequence, "gpus": gpus, "stage": stage, "flash": flash, "recompute": recompute}


def load() -> dict[str, int]:
    """Question, as one text → bytes; empty where nothing has been asked."""
    return json.loads(SAID.read_text(encoding="utf-8")) if SAID.exists() else {}


def text(asked: Mapping[str, Any]) -> str:
    """One text for equal questions."""
    return json.dumps(asked, sort_keys=True)


def ask(python: str, questions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Every answer of the llm-analysis that `python` has. Raises CalledProcessError where it has none."""
    texts = list(dict.fromkeys(map(text, questions)))
    done = subprocess.run([python, "-c", ASK], input="\n".join(texts), stdout=subprocess.PIPE, text=True, check=True)
    answers = [line for line in done.stdout.splitlines() if line.strip().isdigit()]
    return dict(zip(texts, map(int, answers), strict=True))
