"""What the doctor says, as HTML. Pure functions of Consulting; everything shown is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from explorer.errors import shown
from explorer.profile import Profile
from explorer.ui import fields
from explorer.ui.consulting import ITSELF, Consulting, File, Move, says_something
from explorer.ui.texts import ENGLISH, sentence, starts_with_verb, text
from explorer.units import human, pytorch_size

if TYPE_CHECKING:
    from explorer.advice import Consultation
    from explorer.advice.fixes import Fix
    from explorer.advice.message import Message
    from explorer.advice.remarks import Remark

TONES = {"fits": "good", "tight": "warn", "does not fit": "bad", None: "plain"}
_MOST_ROWS = 6
"""Of one kind; of the rest, which costs more or helps less, only the number is said."""


# -- what is pasted -------------------------------------------------------------------------------------------------------


def said(consulting: Consulting) -> str:
    """One sentence for the line under the text, as plain text."""
    if consulting.busy or consulting.problem:
        return consulting.busy or consulting.problem
    if consulting.pasted is None:
        return ""
    if not says_something(consulting.pasted.pasted, consulting.pasted.message):
        return text("doctor.nothing")
    forms = [*consulting.pasted.pasted.forms, *([text("doctor.message")] if consulting.pasted.message.kind != "none" else [])]
    return text("doctor.read", forms=", ".join(forms)) if forms else ""


def reading(consulting: Consulting) -> str:
    """What was understood: the controls that moved, where DeepSpeed would have stopped, and the message's numbers."""
    pasted = consulting.pasted
    if pasted is None or not says_something(pasted.pasted, pasted.message):
        return ""
    stops = _remarks("stops", pasted.stops)
    return _moved(consulting) + _message(pasted.message) + stops


def _moved(consulting: Consulting) -> str:
    if consulting.undone:
        return f'<p class="ex-moved">{escape(text("doctor.undone"))} {_button("use", "doctor.use")}</p>'
    if not consulting.moves:
        return f'<p class="ex-moved">{escape(text("doctor.moved.none"))}</p>' if consulting.pasted.setup is not None else ""
    items = "".join(f"<li>{_move(move)}</li>" for move in consulting.moves)
    return f'<div class="ex-moved"><span>{escape(text("doctor.moved"))}</span><ul>{items}</ul>{_button("undo", "doctor.undo")}</div>'


def _move(move: Move) -> str:
    return f'{escape(text(f"control.{move.control}"))} <s>{escape(_value(move.control, move.before))}</s> <b>{escape(_value(move.control, move.after))}</b>'


def _value(control: str, value: Any) -> str:
    if isinstance(value, bool):
        return text("doctor.on" if value else "doctor.off")
    if value is None or value == "":
        return text("option.default")
    if isinstance(value, int):
        return fields.written(value)
    return ENGLISH.get(f"option.{value}", value if control != "config_text" else "…")[:60]


def _message(m: Message) -> str:
    """Its numbers in one line; those that cannot be are struck."""
    sizes = [("asked", "requested", m.requested), ("allocated", "allocated", m.allocated), ("reserved", "reserved", m.reserved), ("free", "free", m.free), ("capacity", "capacity", m.capacity), ("limit", "limit", m.limit)]
    parts = [_number(word, pytorch_size(size.bytes), m.doubted(field)) for word, field, size in sizes if size is not None]
    parts += [_number("others", human(m.other_processes_bytes), False)] if m.other_processes_bytes else []
    if not parts:
        return ""
    index = f" · {escape(text('doctor.gpu', index=m.device_index))}" if m.device_index is not None else ""
    return f'<p class="ex-numbers"><span>{escape(text("doctor.oom"))}{index}</span> {" ".join(parts)}</p>'


def _number(word: str, size: str, doubted: bool) -> str:
    value = f'<s>{escape(size)}</s> <em>{escape(text("doctor.doubted"))}</em>' if doubted else f"<b>{escape(size)}</b>"
    return f'<span>{escape(text(f"doctor.{word}"))} {value}</span>'


# -- why, and what to change ----------------------------------------------------------------------------------------------


def advice(consulting: Consulting, has_accelerator: bool) -> str:
    """The cause in sentences, and the fixes as a table."""
    found = _shown(consulting)
    if found is None:
        return ""
    causes = "".join(f"<p>{escape(said)}</p>" for said in _causes(found))
    why = f'<h3>{escape(text("doctor.cause"))}</h3><div class="ex-cause">{causes}</div>' if causes else ""
    problems = _remarks("problems", [r for r in found.remarks if r.severity == "problem" and r not in found.stops])
    hints = _remarks("hints", [r for r in found.remarks if r.severity == "hint"])
    return why + (_table(consulting, has_accelerator) if _wanted(consulting) else "") + problems + hints


def heard(consulting: Consulting) -> str:
    """The cause and the first change that fits, as plain text for a screen reader."""
    found = _shown(consulting)
    if found is None or consulting.outdated:
        return ""
    best = found.best if consulting.in_use == ITSELF and _wanted(consulting) else None
    fits = "" if best is None else text("doctor.heard", change=_title(best), peak=human(best.profile.peak.allocated_bytes)) if best.scarce == "gpu" else text("doctor.heard.host", change=_title(best), size=human(best.profile.host.per_node_bytes))
    return " ".join([*_causes(found)[:1], *([fits] if fits else [])])


def _shown(consulting: Consulting) -> Consultation | None:
    """Of which consultation causes and remarks are shown: of a text whose job could not be estimated, what it says by itself."""
    if consulting.advice is not None:
        return consulting.advice
    return consulting.pasted if consulting.pasted is not None and consulting.pasted.profile is None else None


def _causes(found: Consultation) -> list[str]:
    return [sentence(r.text) for r in found.remarks if r.severity == "cause"]


def _wanted(consulting: Consulting) -> bool:
    """Whether there is something to change: what is pasted may fit."""
    found = consulting.advice
    return found is not None and bool(found.fixes) and (found.message.is_gpu or found.message.is_host or found.profile.verdict.answer != "fits")


def _table(consulting: Consulting, has_accelerator: bool) -> str:
    rows = _Rows(consulting, has_accelerator)
    heads = "".join(f'<th scope="col"{" class=ex-num" if key == "host" else ""}>{escape(text(f"doctor.{key}"))}</th>' for key in ("change", "peak", "verdict", "host", "cost"))
    return (
        f'<h3>{escape(text("doctor.fixes"))}</h3><table class="ex-table ex-fixes{" ex-outdated" if consulting.outdated else ""}"><caption class="ex-hidden">{escape(text("doctor.caption"))}</caption>'
        f"<thead><tr>{heads}<th></th></tr></thead>{''.join(rows.bodies())}</table>"
    )


class _Rows:
    """The table's rows, all on one scale."""

    def __init__(self, consulting: Consulting, has_accelerator: bool) -> None:
        self.advice, self.in_use, self.outdated = consulting.advice, consulting.in_use, consulting.outdated
        state = consulting.state
        self.probe, self.measured, self.obstacle = state.probe_status, state.measured, state.probe_obstacle
        self.probe_is_of_it = self.probe.setup == state.setup
        self.can_probe = has_accelerator and not self.obstacle and self.probe.state != "running" and not self.outdated
        before: Profile = self.advice.profile
        self.capacity = before.verdict.capacity_bytes
        profiles = [before, *(f.profile for f in self.advice.fixes if f.profile is not None)]
        self.scale = max([p.peak.allocated_bytes for p in profiles] + [self.capacity or 0, 1])

    def bodies(self) -> Iterator[str]:
        fixes: Sequence[Fix] = self.advice.fixes
        solving = [f for f in fixes if f.solves]
        useless = [f for f in fixes if not f.solves and not f.helps]
        helping = [f for f in fixes if not f.solves and f.helps]
        yield f"<tbody>{self._row(ITSELF, text('doctor.itself'), '', self.advice.profile, '')}</tbody>"
        yield self._body("", solving)
        yield self._body("partly", helping)
        yield self._body("useless", useless)

    def _body(self, key: str, fixes: Sequence[Fix]) -> str:
        if not fixes:
            return ""
        head = f'<tr class="ex-kind"><th scope="colgroup" colspan="6">{escape(text(f"doctor.{key}"))}</th></tr>' if key else ""
        rest = f'<tr class="ex-rest"><td colspan="6">{escape(text("doctor.rest", n=len(fixes) - _MOST_ROWS))}</td></tr>' if len(fixes) > _MOST_ROWS else ""
        return f'<tbody class="ex-{key or "solving"}">{head}{"".join(self._fix(f, key) for f in fixes[:_MOST_ROWS])}{rest}</tbody>'

    def _fix(self, fix: Fix, key: str) -> str:
        cost = self._frees(fix) if key == "useless" else sentence(fix.cost)
        return self._row(fix.id, _title(fix), change_words(fix.change), fix.profile, cost)

    def _frees(self, fix: Fix) -> str:
        if fix.profile is None:
            return fix.text
        if fix.scarce == "host":
            key = "saved" if fix.lowers_host else "more" if fix.moves_host else "same"
            return sentence(text(f"doctor.{key}.host", size=human(abs(fix.saved_host_bytes))))
        return sentence(text("doctor.saved" if fix.saved_bytes >= 0 else "doctor.more", size=human(abs(fix.saved_bytes))))

    def _row(self, name: str, title: str, change: str, profile: Profile | None, cost: str) -> str:
        used = self.in_use == name
        mark = f' <span class="ex-tag ex-measured">{escape(text("doctor.in_use"))}</span>' if used else ""
        small = f"<small><code>{escape(change)}</code></small>" if change else ""
        return (
            f'<tr data-fix="{escape(name)}" class="{"ex-used" if used else ""}"><th scope="row">{escape(title)}{mark}{small}</th>{self._peak(profile, used)}{self._verdict(profile)}'
            f'<td class="ex-num ex-host">{escape(human(profile.host.peak_bytes or profile.host.resident_bytes)) if profile else "–"}</td><td class="ex-cost">{escape(cost)}</td><td class="ex-do">{self._buttons(name, title, used)}</td></tr>'
        )

    def _peak(self, profile: Profile | None, used: bool) -> str:
        if profile is None:
            return '<td class="ex-peak">–</td>'
        size = profile.peak.allocated_bytes
        tick = f'<u style="left:{100 * self.capacity / self.scale:.2f}%"></u>' if self.capacity else ""
        bar = f'<span class="ex-gauge ex-{TONES[profile.verdict.answer]}" aria-hidden="true"><i style="width:{100 * size / self.scale:.2f}%"></i>{tick}</span>'
        return f'<td class="ex-peak"><b>{escape(human(size))}</b>{bar}{self._real(used)}</td>'

    def _real(self, used: bool) -> str:
        """What a real step of the row in use took, or how far it is."""
        if not used:
            return ""
        if self.probe_is_of_it and self.probe.state == "running":
            return f'<small>{escape(self.probe.text or text("probe.starting"))} {text("probe.seconds", seconds=self.probe.seconds)}</small>'
        if self.measured is not None:
            return f'<small>{escape(text("doctor.measured", size=human(self.measured.profile.peak.allocated_bytes)))}</small>'
        return f"<small>{escape(text('probe.failed', text=self.probe.text))}</small>" if self.probe_is_of_it and self.probe.state == "failed" else ""

    def _verdict(self, profile: Profile | None) -> str:
        answer = profile.verdict.answer if profile else None
        return f'<td class="ex-answer ex-{TONES[answer]}">{escape(text(f"answer.{answer}" if answer else "answer.none"))}</td>'

    def _buttons(self, name: str, title: str, used: bool) -> str:
        apply = "" if used else _button("apply", "doctor.apply" if name != ITSELF else "doctor.back", name, title, self.outdated)
        return apply + _button("probe", "doctor.probe", name, title, not self.can_probe, sentence(self.obstacle))


def _title(fix: Fix) -> str:
    """A fix's id as the page says it."""
    return " + ".join(ENGLISH.get(f"fix.{part}") or part.replace("-", " ").capitalize() for part in fix.id.split("+"))


_ELSEWHERE = ("trainer", "pin_memory", "gradient_checkpointing_kwargs", "use_reentrant")
"""Keys that say what another of the same change says already, or that no one decides by."""


def change_words(change: Mapping[str, Any]) -> str:
    """What to write where, in a line: "stage 3 · offload_param cpu"."""
    return " · ".join(dict.fromkeys(_words(change, "")))


def _words(change: Mapping[str, Any], parent: str) -> Iterator[str]:
    for key, value in change.items():
        name = parent if key in ("device", "enabled", "type") else key
        if key in _ELSEWHERE and len(change) > 1:
            continue
        if key == "gradient_checkpointing":
            yield f"{key} true"
        elif isinstance(value, Mapping):
            yield from _words(value, key)
        elif value is not None:
            yield f"{name} {value if isinstance(value, str) else shown(value, 40)}"


# -- the rest -------------------------------------------------------------------------------------------------------------


def more(consulting: Consulting) -> str:
    """What else was read, folded away: notes, and every setting."""
    found = consulting.advice or consulting.pasted
    notes = [r for r in found.remarks if r.severity == "note"] if found is not None else []
    understood = consulting.pasted.pasted.understood if consulting.pasted is not None else ()
    parts = []
    if notes:
        title = text("doctor.note") if len(notes) == 1 else text("doctor.notes", n=len(notes))
        parts.append(_fold("notes", title, f'<ul class="ex-notes">{_items(notes)}</ul>'))
    if understood:
        rows = "".join(f'<tr><th scope="row"><code>{escape(path.removeprefix("deepspeed."))}</code></th><td><code>{escape(shown(value, 120))}</code></td></tr>' for path, value in understood)
        parts.append(_fold("understood", text("doctor.understood", n=len(understood)), f'<table class="ex-table ex-changes"><tbody>{rows}</tbody></table>'))
    return "".join(parts)


def _fold(name: str, title: str, inside: str) -> str:
    return f'<details class="ex-fold" data-fold="{name}"><summary>{escape(title)}</summary>{inside}</details>'


def files(given: Sequence[File]) -> str:
    """Each file or line with its buttons."""
    return "".join(
        f'<section class="ex-out"><h3><code>{escape(f.name)}</code>{_button("copy", "doctor.copy", f.name, f.name)}{_button("save", "doctor.save", f.name, f.name)}</h3><pre tabindex="0">{escape(f.content)}</pre></section>' for f in given
    )


def _remarks(key: str, remarks: Iterable[Remark]) -> str:
    items = _items(remarks)
    return f'<h3>{escape(text(f"doctor.{key}"))}</h3><ul class="ex-remarks ex-{key}">{items}</ul>' if items else ""


def _items(remarks: Iterable[Remark]) -> str:
    return "".join(f"<li>{escape(_spoken(r))}</li>" for r in remarks)


def _spoken(remark: Remark) -> str:
    """A remark as a sentence; a colon after the key that it starts with, where that is not its subject."""
    rest = remark.text.removeprefix(f"{remark.key} ")
    joined = remark.text == rest or starts_with_verb(rest)
    return sentence(remark.text if joined else f"{remark.key}: {rest}")


def _button(act: str, key: str, name: str = "", of: str = "", off: bool = False, why: str = "") -> str:
    look = "ex-quiet" if act in ("undo", "probe", "save") else "ex-tool"
    more = [f'aria-label="{escape(text(key))}: {escape(of)}"'] if of else []
    more += [f'title="{escape(why)}"'] if why else []
    more += ["disabled"] if off else []
    return f'<button type="button" class="{look}" data-act="{act}" data-name="{escape(name)}" {" ".join(more)}>{escape(text(key))}</button>'
