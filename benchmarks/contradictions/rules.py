"""What no consultation may say: each rule yields a sentence for each contradiction it finds in one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from explorer.advice import host
from explorer.advice.consultation import Consultation
from explorer.advice.message import Message, Size
from explorer.advice.situation import situation
from explorer.dsconfig import resolve
from explorer.units import GiB, KiB, MiB

_SIZE = r"(\d[\d,]*(?:\.\d+)?) (GiB|MiB|KiB|bytes|B)\b"
_UNITS = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "bytes": 1, "B": 1}
_MUCH = 0.05
"""Part of the card that is much to be free on a full one."""


def contradictions(found: Consultation) -> list[str]:
    """Each contradiction of a consultation, the rule's name first."""
    return [f"{rule.__name__.strip('_')}: {said}" for rule in _RULES for said in rule(found)]


def _room(c: Consultation) -> Iterator[str]:
    """No full card beside free memory."""
    full = [r.text for r in c.remarks if re.search(r"card was full|card is full|taken the card whole|why the card is full", r.text)]
    m = c.message
    if full and m.free is not None and m.capacity is not None and not m.doubted("free", "capacity") and m.free.bytes > max(_MUCH * m.capacity.bytes, m.requested.bytes):
        yield f"{full[0]!r} with {m.free.bytes / GiB:.2f} GiB free"
    if full and (enough := _of(c, "free-was-enough", "process-limit")):
        yield f"{full[0]!r} beside {enough.text!r}"
    if _of(c, "fits-here") and c.profile.verdict.answer != "fits":
        yield f"'fits-here' of a job that is {c.profile.verdict.answer}"


_FOR = re.compile(r"(expandable_segments|max_split_size_mb)[^.;]*?(?:may let it through|is the remedy|lets it through)")
_AGAINST = re.compile(r"no setting of (?:the|PyTorch's) allocator|(?:expandable_segments|max_split_size_mb)[^.;]*(?:cannot help|would not help|does not help)")
_OPTIONS = {"expandable-segments": "expandable_segments", "max-split-size": "max_split_size_mb"}


def _allocator(c: Consultation) -> Iterator[str]:
    """No option of the allocator both advised and advised against; none that this backend or PyTorch lacks; none that the job has."""
    advised = {option: r.text for r in c.remarks for option in _FOR.findall(r.text)}
    against = [r.text for r in c.remarks if _AGAINST.search(r.text)]
    for fix in c.fixes:
        for option in (_OPTIONS[part] for part in fix.id.split("+") if part in _OPTIONS):
            if fix.helps or fix.solves:
                advised[option] = f"the fix {fix.text}"
            elif "+" not in fix.id and option in advised and fix.answer != "fits" and "not on the host" not in advised[option]:
                yield f"{advised[option]!r} beside the fix {fix.text!r}"
    if advised and against:
        yield f"{[*advised.values()][0]!r} against {against[0]!r}"
    if advised and situation(c.message) in ("too little together", "larger than the card"):
        yield f"{[*advised.values()][0]!r} where it cannot help"
    for option, text in advised.items():
        if c.message.kind == "hip" and (option == "expandable_segments" or "PYTORCH_CUDA" in text):
            yield f"{text!r} on ROCm"
        if c.setup is not None and c.setup.allocator.get(option):
            yield f"{text!r} of a job that has it"


_STATES = frozenset(("stage-1", "stage-2", "stage-3", "offload-optimizer", "stage-3-offload", "offload-to-nvme"))


def _fixes(c: Consultation) -> Iterator[str]:
    """No fix that fits where the node cannot hold it, or where a sentence says that such a change does not help."""
    for fix in c.fixes:
        fits = fix.to_json()["verdict"] == "fits" or re.search(r"(?:; |and )fits[;.]", fix.text)
        if fits and fix.profile is not None and not host.holds(fix.setup, fix.profile):
            yield f"{fix.id} fits, and the node does not hold it: {fix.text!r}"
        if fix.solves and fix.text.startswith("Does not help"):
            yield f"{fix.id} is a solution: {fix.text!r}"
        if (cannot := _of(c, "offload-cannot-help")) and fix.id in _STATES and fix.solves:
            yield f"{cannot.text!r} beside {fix.id}: {fix.text!r}"
    if _of(c, "fits-here") and c.fixes:
        yield f"nothing to change, and {len(c.fixes)} fixes"


_GPU_CAUSES = re.compile(r"dominant-|offload-cannot-help|states-dominate|weights-kept")


def _causes(c: Consultation) -> Iterator[str]:
    """One memory ran out: the host's or the GPU's; what fits has no cause in itself."""
    causes = [r for r in c.remarks if r.severity == "cause"]
    of_gpu = [r for r in causes if _GPU_CAUSES.match(r.id)]
    if (c.message.is_host or c.message.cause == "shared-memory" or c.message.other) and of_gpu:
        yield f"{causes[0].text!r} beside {of_gpu[0].text!r}"
    here = _of(c, "fits-here")
    if here and of_gpu:
        yield f"{here.text!r} beside {of_gpu[0].text!r}"
    if here and situation(c.message) in ("too little together", "larger than the card", "free enough") and "fragmentation" in here.text:
        yield f"{here.text!r} against the message's numbers"
    if here and "there is nothing to change" in here.text:
        for r in c.remarks:
            if r.id in ("request-larger", "not-pasted", "request-bucket", "ran-otherwise") or r.id == "fragmentation" and "may let it through" in r.text:
                yield f"nothing to change beside {r.text!r}"
    if here and (other := _of(c, "other-processes")) and "which nvidia-smi shows" in here.text:
        yield f"{here.text!r} beside {other.text!r}"
    if (small := _of(c, "small-request")) and (named := _of(c, "request-named", "request-weight", "request-frame")):
        yield f"{small.text!r} beside {named.text!r}"
    if (not_pasted := _of(c, "not-pasted")) and (named := _of(c, "request-named")) and "answered for the job with it" not in not_pasted.text:
        yield f"{not_pasted.text!r} beside {named.text!r}"


def _host(c: Consultation) -> Iterator[str]:
    """A node holds it or does not; nothing is to be offloaded to a host that is full."""
    if c.profile is None:
        return
    holds = host.holds(c.setup, c.profile)
    for r in c.remarks:
        if "would hold what the step takes" in r.text and not holds:
            yield f"{r.text!r} where it does not"
    if (small := _of(c, "host-too-small")) and c.message.is_gpu and any("offload" in f.id and f.solves and resolve(c.setup).offload_optimizer is None for f in c.fixes):
        yield f"{small.text!r} beside an offload that fits"


_NUMBERS = {
    rf"{_SIZE} cached": "cached", rf"{_SIZE} (?:was )?free\b": "free", rf"{_SIZE} (?:is|are) free": "free", rf"{_SIZE} asked for": "requested", rf"(?:as it asks for|enough for) {_SIZE}": "requested",
    rf"The message has {_SIZE} allocated": "allocated", rf"{_SIZE} were allocated": "allocated", rf"{_SIZE} are in use by tensors": "allocated", rf"The {_SIZE} that failed": "requested",
    rf"on a card of {_SIZE}": "capacity", rf"may take {_SIZE} only": "limit", rf"The message's card has {_SIZE}": "capacity", rf"fragmentation: {_SIZE} were reserved": "cached",
}


def _numbers(c: Consultation) -> Iterator[str]:
    """A number of the message is quoted as it is printed there, and not where it is not believed."""
    m = c.message
    for r in c.remarks:
        if r.id.startswith("impossible-"):
            continue
        for pattern, name in _NUMBERS.items():
            for number, unit in re.findall(pattern, r.text):
                if m.doubted(name) and name not in ("requested", "capacity") or not _is(_quoted(m, name), float(number.replace(",", "")) * _UNITS[unit], unit):
                    yield f"{number} {unit} is not {name} in {r.text!r}"


def _quoted(m: Message, name: str) -> Size | None:
    if name == "cached":
        return None if m.cached_bytes is None else Size(bytes=m.cached_bytes, least=(m.reserved - m.allocated).least, most=(m.reserved - m.allocated).most)
    return getattr(m, name)


def _is(size: Size | None, said: float, unit: str) -> bool:
    """Up to what a sentence's own rounding leaves."""
    slack = 0.06 * _UNITS[unit]
    return size is not None and size.least - slack <= said <= size.most + slack


def _twice(c: Consultation) -> Iterator[str]:
    """Nothing is said twice; a negative size and "0 B" of help are no sentences."""
    for text, times in Counter(r.text for r in c.remarks).items():
        if times > 1:
            yield f"{times} times {text!r}"
    for name, times in Counter(f.id for f in c.fixes).items():
        if times > 1:
            yield f"{times} fixes {name}"
    for text in [r.text for r in c.remarks] + [f.text for f in c.fixes]:
        if re.search(r"(?<![\w-])-\d+(?:\.\d+)? (?:GiB|MiB|KiB|B)\b|\bNone\b|\bnan\b", text):
            yield f"a size that is none in {text!r}"


def _of(c: Consultation, *ids: str):
    """The first remark of one of these names."""
    return next((r for r in c.remarks if r.id in ids), None)


_RULES = (_room, _allocator, _fixes, _causes, _host, _numbers, _twice)
