"""DeepSpeed's releases: what of them changes memory, and which of them it holds for, as data. No torch.

Releases are told by version.txt at the commits named. The rules of `estimator/rules/` are those of `RULES`; a job that names
another version gets the differences listed here, and a word that nothing else of that version was read.
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from explorer.errors import BadInput, shown

RULES = "0.19.8"
"""The release whose source the rules were read from."""


class Behaviour(NamedTuple):
    """What some releases did and `RULES` does not: those from `since` on (None: all) and before `before`."""

    since: str | None
    before: str
    text: str
    source: str


BEHAVIOURS: dict[str, Behaviour] = {
    "bucket-4.5": Behaviour(None, "0.3.17", "reduce buckets are 4.5 times reduce_bucket_size", "#1042, 2021-05-19"),
    "fp32-copy-at-step": Behaviour("0.14.1", "0.16.10", "an offloaded optimizer's fp32 partition visits the GPU whole at each step of stages 1 and 2", "#5301, 2024-04-14; #7309, 2025-05-27"),
    "all-gather-copies": Behaviour(
        None, "0.12.4", "the all-gather after a step takes a copy of allgather_bucket_size elements (5e8 where it is not given) at stages 1 and 2",
        "#4705, 2023-11-29",
    ),
    "one-dtype": Behaviour(
        "0.7.6", "0.10.1", "ZeRO adds gradients up in the weights' dtype, but for bf16 with fp32 at stage 1",
        "#2512, 2022-11-27; #2847, 2023-07-19",
    ),
    "bf16-optimizer-at-stage-0": Behaviour(
        "0.7.6", "0.17.6", "bf16 at stage 0 adds gradients up in fp32, in BF16_Optimizer, which divides the masters and the states over the GPUs",
        "#2512, 2022-11-27; #7515, 2025-08-27",
    ),
    "flatten-on-cpu": Behaviour(None, "0.18.7", "stages 1 and 2 flatten the weights on the CPU, however much the card has free", "#7828, 2026-02-13"),
    "pageable-offload": Behaviour(None, "0.19.5", "offloaded tensors are not pinned unless pin_memory says so", "#8207, 2026-08-07"),
    "no-clipping": Behaviour(None, "0.19.3", "gradient_clipping is 0 where it is not given", "#8068, 2026-06-23"),
    "plain-linear": Behaviour(None, "0.19.3", "at stage 3, a model not built under zero.Init keeps every linear layer's whole weight from forward to backward", "#8189, 2026-07-31"),
}


def read(written: str | None) -> Version:
    """The version a job names; `RULES` where it names none. Raises BadInput."""
    if written is None:
        return Version(RULES)
    try:
        return Version(written) if isinstance(written, str) else Version("")
    except InvalidVersion:
        raise BadInput("deepspeed_version", f"is {shown(written)}; give a release such as \"0.16.4\", or leave it out for {RULES}") from None


def in_force(version: Version) -> frozenset[str]:
    """Names of the behaviours that a release has."""
    release = Version(version.base_version)
    return frozenset(name for name, b in BEHAVIOURS.items() if release < Version(b.before) and (b.since is None or release >= Version(b.since)))


def notes(written: str | None) -> list[str]:
    """What is to be said of a version that a job names."""
    version = read(written)
    if version == Version(RULES):
        return []
    texts = [BEHAVIOURS[name].text for name in sorted(in_force(version))]
    return [f"of DeepSpeed {version} this is followed: {'; '.join(texts) or 'nothing that differs is known'}; all else is as in {RULES}, whose source the rules were read from"]
