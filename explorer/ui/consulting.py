"""What a person pastes, and what the doctor says of it and of what the controls say. No widgets, no browser, no kernel needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import traitlets as T

from explorer.errors import BadInput
from explorer.setup import Setup
from explorer.ui import fields
from explorer.ui.background import Latest
from explorer.ui.state import ExplorerState
from explorer.ui.texts import in_words, sentence, text

if TYPE_CHECKING:
    from explorer.advice import Consultation
    from explorer.advice.message import Message
    from explorer.dsconfig.read import Pasted

PASTE_PAUSE_S = 0.2
"""How long what is typed rests before it is read."""
ADVICE_PAUSE_S = 0.5
"""How long the controls rest before changes are sought: it takes some dozens of estimates."""
NEEDS_HELP = ("does not fit", "tight")
ITSELF = ""
"""In the place of a fix's id: the job as it is, without a change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One control that what was pasted moved."""

    control: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """Something to take away: a name to save it under, and its text."""

    name: str
    content: str


class Consulting(T.HasTraits):
    """Set `text`; `pasted`, the controls and `advice` follow. `advice` also follows the controls, where their job does not fit or is tight."""

    text = T.Unicode("", help="What is pasted; it stays as it is.")
    busy = T.Unicode("", help="What is being worked out of the text.")
    problem = T.Unicode("", help="Why the text, or what it says, cannot be shown.")
    pasted = T.Any(None, help="The Consultation of the text.")
    moves = T.Tuple(help="A Move for each control that stands elsewhere than before the text was pasted.")
    undone = T.Bool(False, help="Whether the person has put the controls back.")
    advice = T.Any(None, help="The Consultation that the cause and the fixes are of; None where there is nothing to change.")
    outdated = T.Bool(False, help="Whether the controls say another job than `advice` is of.")
    in_use = T.Unicode(None, allow_none=True, help="Id of the fix that the controls say, ITSELF for the job as it is, None for any other.")
    files_open = T.Bool(False, help="Whether the files are looked at; until then none is written.")
    files = T.Tuple(help="The Files that run what the controls say.")

    def __init__(self, state: ExplorerState) -> None:
        super().__init__()
        self.state = state
        self._readings = Latest("reading of what is pasted", lambda: state.post)
        self._advices = Latest("what would help", lambda: state.post)
        self._stop = threading.Event()
        self._marks: Mapping[Setup, str] = {}
        self._marks_of_pasted: Mapping[Setup, str] = {}
        self._start: tuple[Setup | None, dict[str, Any], Callable[[], None]] | None = None
        self._last_right = state.setup
        state.observe(lambda _: self._setup_changed(), "setup")
        state.observe(lambda _: self._estimated(), "stale")
        self.observe(lambda _: self._take_text(), "text")
        self.observe(lambda _: self._write_files(), "files_open")

    def wait(self, timeout_s: float = 30.0) -> None:
        """Block until what is pasted is read and what would help is known (for a notebook cell or a test)."""
        self._readings.wait(timeout_s)
        self.state.wait_estimate(timeout_s)
        self._advices.wait(timeout_s)

    # -- what is pasted -----------------------------------------------------------------------------------------------

    def refuse(self, said: str) -> None:
        """Say why a text was not even sent."""
        self._readings.drop()
        with self.hold_trait_notifications():
            self.busy, self.problem, self.pasted, self.moves = "", said, None, ()

    def _take_text(self) -> None:
        given = self.text
        if not given.strip():
            self.refuse("")
            return
        base = self._base()
        self.busy = text("doctor.reading")
        self._readings.submit(lambda: _consulted(given, base, self._progress), lambda result: self._read(given, result), delay_s=PASTE_PAUSE_S)

    def _base(self) -> Setup | None:
        """The job that the text changes: the one shown; or while that is the text's own, typed on, the one from before it."""
        untouched = self._start is not None and self.pasted is not None and self._marks_of_pasted.get(self.state.setup) == ITSELF
        if not untouched:
            self._start = (self._last_right, self.state.values(), self.state.bookmark())
        return self._start[0]

    def _progress(self, said: str, _seconds: float) -> None:
        self.state.post(lambda: self._say(said))

    def _say(self, said: str) -> None:
        if self.busy:
            self.busy = said

    def _read(self, given: str, result: Any) -> None:
        if given != self.text:
            return
        if isinstance(result, Exception):
            self.refuse(sentence(in_words(result).removeprefix("text: ")))
            return
        consultation, marks = result
        with self.hold_trait_notifications():
            self.busy, self.problem, self.pasted, self.moves, self.undone = "", "", consultation, (), False
        self._marks_of_pasted = marks
        if consultation.setup is not None:
            self.use()

    def use(self) -> None:
        """Move the controls to what was pasted."""
        consultation: Consultation = self.pasted
        self._advise(consultation if consultation.profile is not None else None, self._marks_of_pasted)
        try:
            self.state.from_setup(consultation.setup)
        except BadInput as error:
            self.problem = sentence(str(error))
            return
        before, after = self._start[1], self.state.values()
        with self.hold_trait_notifications():
            self.moves = tuple(Move(control=name, before=before[name], after=after[name]) for name in fields.FIELDS if before[name] != after[name])
            self.undone = False

    def undo(self) -> None:
        """Put every control back to where it stood before the text was pasted."""
        if self._start is not None:
            self._start[2]()
            self.undone = True

    # -- what would help ------------------------------------------------------------------------------------------------

    def apply(self, fix: str) -> None:
        """Move the controls to the job with this change; to the job as it is for ITSELF."""
        setup = next((setup for setup, name in self._marks.items() if name == fix), None)
        if setup is not None:
            self.state.from_setup(setup)

    def probe(self, fix: str) -> None:
        """Apply this change, and run the real step of it."""
        self.apply(fix)
        if self.in_use == fix:
            self.state.run_probe()

    def _advise(self, consultation: Consultation | None, marks: Mapping[Setup, str]) -> None:
        self._marks = marks
        with self.hold_trait_notifications():
            self.advice, self.outdated, self.in_use = consultation, False, marks.get(self.state.setup)

    def _setup_changed(self) -> None:
        setup = self.state.setup
        self._last_right = setup or self._last_right
        with self.hold_trait_notifications():
            self.in_use = self._marks.get(setup)
            self.outdated = self.advice is not None and self.in_use is None
        if self.in_use is None:
            self._advices.drop()
            self._stop.set()  # give way to the estimate: two threads would halve each other's speed
        self._write_files()

    def _estimated(self) -> None:
        """The estimate of what the controls say has come: where it needs help, seek that once they rest."""
        state = self.state
        if state.stale or state.setup is None or self.in_use is not None:
            return
        if state.estimate.verdict.answer not in NEEDS_HELP:
            self._advise(None, {})
            return
        setup, message = state.setup, self.pasted.message if self.pasted else None
        stop = self._stop = threading.Event()
        self._advices.submit(lambda: _advised(setup, message, stop), lambda result: self._advised(setup, result), delay_s=ADVICE_PAUSE_S)

    def _advised(self, setup: Setup, result: Any) -> None:
        if setup != self.state.setup:
            return
        if isinstance(result, Exception):
            in_words(result)  # an estimate of this very job has just been shown, so this is a fault, and logged
            self._advise(None, {})
        else:
            self._advise(*result)

    # -- out again --------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        if self.files_open and self.state.setup is not None:
            self.files = files(self.state.setup)


def says_something(pasted: Pasted, message: Message) -> bool:
    """Whether anything of a job or an error was in the text."""
    return bool(pasted.forms) or bool(pasted.changes) or message.kind != "none" or bool(message.cause)


def _consulted(given: str, base: Setup | None, progress: Callable[[str, float], None]) -> tuple[Consultation, Mapping[Setup, str]]:
    """The doctor on a text; a text that says nothing is asked nothing of."""
    from explorer.advice import Consultation, consult, oom
    from explorer.dsconfig.read import read

    given = given.encode(errors="replace").decode()  # half a character has no form in UTF-8
    pasted, message = read(given), oom.read(given)
    found = consult(base, pasted, message, progress) if says_something(pasted, message) else Consultation(message=message, pasted=pasted)
    return found, _marks(found)


def _advised(setup: Setup, message: Message | None, stop: threading.Event) -> tuple[Consultation, Mapping[Setup, str]]:
    """The doctor on a job alone; with the message that was pasted, where it can be this job's."""
    from explorer.advice import consult
    from explorer.advice.message import Message
    from explorer.dsconfig.read import Pasted

    nothing = Pasted(changes={})
    found = consult(setup, nothing, message, batch_known=True, stop=stop) if message is not None else None
    if found is None or found.setup != setup:  # the message's card or GPUs are not this job's
        found = consult(setup, nothing, Message(kind="none"), batch_known=True, stop=stop)
    return found, _marks(found)


def _marks(consultation: Consultation) -> dict[Setup, str]:
    """Each job that the consultation is of, as the controls write it, with the id of its fix."""
    found: dict[Setup, str] = {}
    given = [] if consultation.setup is None else [(ITSELF, consultation.setup)]
    for name, setup in [*given, *((fix.id, fix.setup) for fix in consultation.fixes)]:
        try:
            found.setdefault(fields.write(setup, fields.read(setup)), name)
        except BadInput:
            continue
    return found


def files(setup: Setup) -> tuple[File, ...]:
    """The files and lines that run a job: ds_config.json, TrainingArguments, the lines that make the model, the launch command, the environment. Empty where DeepSpeed would refuse it."""
    from explorer.catalog import find_model
    from explorer.dsconfig.write import CONFIG, model_lines, write

    try:
        out = write(setup)
        model = "" if find_model(setup.model).source == "own" else model_lines(setup)  # whose lines are the person's own
    except BadInput:
        return ()
    found = [(CONFIG, out.config_text), ("training_args.py", out.arguments_text), ("model.py", model), ("launch.sh", f"{out.launch}\n"), ("environment.sh", out.environment_text)]
    return tuple(File(name=name, content=content) for name, content in found if content)
