"""The records on the page, without a browser: listed once opened, opened, compared, taken in, given out, removed; and what cannot be is one sentence."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from explorer.catalog import find_model
from explorer.dsconfig import resolve
from explorer.errors import CouldNotRun
from explorer.estimator import estimate as estimator
from explorer.estimator.estimate import estimate
from explorer.measure import records
from explorer.measure.comparison import compare
from explorer.measure.nvme import swap_folder
from explorer.profile import Failure, Verdict
from explorer.setup import Setup
from explorer.ui.fields import default_setup
from explorer.ui.measurements import Measurements
from explorer.ui.recordings import Recordings
from explorer.ui.records_panel import RecordsPanel, side_by_side
from explorer.ui.state import ExplorerState
from tests.test_profile import profile
from tests.ui.conftest import make_profile

TINY = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
HOSTILE = "<img src=x onerror=alert(1)>"


def quick(setup, **_):
    """An estimate in no time, of a model that must be one all the same."""
    find_model(setup.model)
    return make_profile(answer=None)


@pytest.fixture
def state(monkeypatch) -> ExplorerState:
    monkeypatch.setattr(estimator, "estimate", quick)
    made = ExplorerState()
    made.wait_estimate()
    return made


@pytest.fixture
def recordings(state) -> Recordings:
    return Recordings(state)


def until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def content(setup: Setup, peak: int = 800, date: str = "2020-01-01T00:00:00+00:00", **changes) -> bytes:
    return json.dumps(records.to_json(setup, profile(peak, **changes), date)).encode()


def test_nothing_is_listed_until_the_list_is_opened(recordings, monkeypatch):
    asked = []
    every = records.all
    monkeypatch.setattr(records, "all", lambda: asked.append(1) or every())
    recordings.state.micro_batch = 32
    assert recordings.rows == () and not asked
    recordings.open_list()
    assert len(recordings.rows) == len(every()) >= 12 and asked


def test_a_row_tells_one_job_from_the_next(recordings):
    recordings.open_list()
    row = next(row for row in recordings.rows if row.name == "clip78-320-ckpt")
    assert (row.model, row.where, row.date, row.peak, row.own) == ("openai/clip-vit-large-patch14", "H200", "2026-12-02", "10.3 GiB", False)
    assert row.words == "micro-batch 320 · ZeRO-2 · fp16 · optimizer on CPU · checkpointing · limit 78 GiB"
    assert next(row for row in recordings.rows if row.name == "clip78-320").peak == "", "it ran out of memory"
    said = [(row.model, row.words, row.where) for row in recordings.rows]
    assert len(set(said)) == len(said)


def test_each_estimate_follows_and_agrees(recordings, monkeypatch):
    monkeypatch.setattr(estimator, "estimate", estimate)
    recordings.open_list()
    recordings.wait(60)
    assert set(recordings.estimates) == {row.name for row in recordings.rows}
    assert recordings.estimates["clip78-320"] == "does not fit"
    assert recordings.estimates["clip78-256"].endswith(" %")


def test_every_shipped_record_opens_and_shows_at_once(recordings):
    for record in records.all():
        recordings.open(record.name)
        assert not recordings.failed, recordings.said
        assert recordings.state.setup == record.setup
        assert (recordings.state.measured.profile, recordings.state.measured.recorded_at) == (record.profile, record.recorded_at), record.name
    recordings.state.wait_estimate()
    assert recordings.state.comparison is not None


def test_of_two_records_of_one_job_the_opened_one_is_shown(recordings):
    setup = default_setup().replace(micro_batch=3)
    for peak, date in ((800, "2020-01-01"), (1600, "2021-01-01")):
        recordings.load(content(setup, peak, date), f"{peak}.json")
    old = next(r.name for r in records.all() if r.recorded_at.startswith("2020"))
    recordings.open_list()
    recordings.state.from_setup(setup)
    assert recordings.state.measured.recorded_at.startswith("2021"), "the newest comes by itself"
    recordings.open(old)
    assert recordings.state.measured.recorded_at.startswith("2020")
    assert [row.name for row in recordings.rows if row.shown] == [old]


def test_a_loaded_record_is_listed_first_and_shown_where_its_job_is_shown(recordings):
    recordings.state.from_setup(default_setup().replace(micro_batch=5))
    recordings.open_list()
    assert recordings.state.measured is None
    recordings.load(content(default_setup().replace(micro_batch=5)), "ann.json")
    assert recordings.said.startswith("Loaded: openai/clip-vit-large-patch14, micro-batch 5") and not recordings.failed
    assert recordings.rows[0].own and recordings.rows[0].shown and recordings.state.measured is not None
    recordings.chosen = (recordings.rows[0].name, "clip78-256")
    recordings.remove(recordings.rows[0].name)
    assert recordings.state.measured is None and not recordings.rows[0].own
    assert recordings.chosen == ("clip78-256",) and recordings.comparison is None


def test_what_the_page_measures_is_listed_and_its_estimate_is_of_the_newest(recordings, monkeypatch):
    from explorer.measure import runner

    def probe(setup, **_):
        records.save(setup, profile(800 * len(done)))
        return profile(800 * len(done))

    monkeypatch.setattr(runner, "probe", probe)
    recordings.state.from_setup(default_setup().replace(micro_batch=6))
    recordings.open_list()
    done, estimates = [], set()
    for n in (1, 2):
        done.append(n)
        recordings.state.run_probe()
        until(lambda: recordings.state.probe_status.state == "done" and recordings.rows[0].shown)
        row = recordings.rows[0]
        assert row.own and row.peak == ("800 B", "1.6 KiB")[n - 1]
        recordings.wait()
        estimates.add(recordings.estimates[row.name])
    assert len(estimates) == 2
    assert sum(row.own for row in recordings.rows) == 1


def test_two_that_are_chosen_are_compared(recordings):
    recordings.open_list()
    recordings.chosen = ("clip78-256",)
    assert recordings.comparison is None
    recordings.chosen = ("clip78-256", "clip78-320-ckpt")
    html = side_by_side(recordings.comparison)
    assert "&minus;61.10" in html and "<code>gradient_checkpointing</code>" in html
    assert side_by_side(None) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b'{"schema": 1, "kind": "rec', "bad.json is not valid JSON"),
        (b'{"kind": "recipe"}', "bad.json is not a record of this program"),
        (content(default_setup()).replace(b'"schema": 1, "kind"', b'"schema": 7, "kind"'), "bad.json was written by a newer version (schema 7)"),
        (b"\xff\xfe\x00", "bad.json is not text in UTF-8"),
        (b" " * (1 << 20) + b"{}", "bad.json is too large"),
    ],
    ids=["truncated", "foreign", "newer", "no text", "too large"],
)
def test_a_file_that_is_no_record_is_one_sentence_and_the_page_goes_on(recordings, given, said):
    recordings.open_list()
    before = (recordings.rows, recordings.state.measured, recordings.state.estimate)
    recordings.load(given, "bad.json")
    assert recordings.failed and recordings.said.startswith(said) and recordings.said.endswith(".") and "\n" not in recordings.said
    assert (recordings.rows, recordings.state.measured, recordings.state.estimate) == before
    recordings.open("gpt2-z2")
    assert not recordings.failed and recordings.state.model == "gpt2"


def test_what_ships_stays_and_what_has_gone_is_said(recordings):
    recordings.open_list()
    recordings.remove("gpt2-z2")
    assert recordings.failed and "ships with the explorer" in recordings.said
    for act in (recordings.open, recordings.remove, recordings.content):
        act("no-such")
        assert recordings.failed and "none is called" in recordings.said.lower()
    recordings.chosen = ("gpt2-z2", "no-such")
    assert recordings.failed and recordings.comparison is None


@pytest.mark.parametrize(
    ("model", "said"),
    [("/no/such/folder", "is no folder with a config.json"), ({**TINY, "n_head": 7}, "not divisible by its 7 attention heads"), ({"model_type": "no-such-type"}, "no-such-type")],
    ids=["a path of another machine", "heads that do not divide", "a type nobody knows"],
)
def test_a_record_whose_model_cannot_be_built_is_one_sentence(recordings, model, said):
    recordings.load(content(Setup(model=model, micro_batch=2, gpu="T4")), "theirs.json")
    assert not recordings.failed, "it is a sound record"
    recordings.open_list()
    recordings.open(recordings.rows[0].name)
    recordings.state.wait_estimate()
    told = recordings.said if recordings.failed else recordings.state.problem[1]
    assert said in told and "\n" not in told
    recordings.open("gpt2-z2")
    recordings.state.wait_estimate()
    assert recordings.state.problem is None and recordings.state.measured is not None and not recordings.state.stale


def test_a_job_that_deepspeed_refuses_is_not_opened(recordings):
    before = recordings.state.setup
    refused = default_setup().with_deepspeed("zero_optimization.stage", 7)
    recordings.load(content(refused), "theirs.json")
    recordings.open_list()
    recordings.open(recordings.rows[0].name)
    assert recordings.failed and "stage" in recordings.said and recordings.state.setup == before


def test_a_batch_beyond_the_positions_is_one_sentence_and_the_page_goes_on(state):
    state.update(model="gpt2", sequence="1025")
    state.wait_estimate()
    assert state.problem == ("sequence", "is 1025, beyond the 1024 positions of gpt2; give at most 1024") and state.estimate is not None
    state.sequence = "1024"
    state.wait_estimate()
    assert state.problem is None and not state.stale


@pytest.mark.parametrize("path", ["/no/such/folder", "/proc"])
def test_an_nvme_path_that_cannot_be_used_is_one_sentence_and_the_page_goes_on(state, monkeypatch, path):
    from explorer.measure import runner

    def probe(setup, **_):
        with swap_folder(resolve(setup), 1000):
            raise AssertionError("there is no such folder")

    monkeypatch.setattr(runner, "probe", probe)
    state.update(stage="3", offload_optimizer="nvme", nvme_path=path)
    state.wait_estimate()
    assert state.problem is None and state.estimate is not None, "an estimate needs no disk"
    state.run_probe()
    until(lambda: state.probe_status.state == "failed")
    assert path in state.probe_status.text and "\n" not in state.probe_status.text
    state.micro_batch = 8
    state.wait_estimate()
    assert not state.stale and state.problem is None


def test_a_damaged_record_is_said_when_the_list_is_opened(recordings):
    recordings.open_list()
    rows = recordings.rows
    assert (recordings.said, recordings.failed) == ("", False)
    records.folder().mkdir(parents=True)
    for name, more in (("a", ""), ("b", " 1 more likewise; python -m explorer records names each.")):
        (records.folder() / f"{name}.json").write_text("[]")
        recordings.open_list()
        assert recordings.failed and recordings.rows == rows
        assert recordings.said == f"Left out of {records.folder()}: a.json is not a record of this program; give a file that it wrote or that was downloaded from its page.{more}"


def test_a_folder_that_cannot_be_read_leaves_the_page_alone(monkeypatch):
    def refuse():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(records, "all", refuse)
    made = Recordings(ExplorerState())
    made.open_list()
    assert made.rows == () and made.state.problem is None and len(Measurements()) == 0


# -- the panel


def test_the_panel_reads_and_builds_nothing_until_it_is_opened(state):
    panel = RecordsPanel(state)
    assert panel.table is None and not panel.recordings.listed
    panel.box.children[0].click()
    assert len(panel.table.rows) == len(records.all()) and panel.box.children[0].icon == "chevron-down"
    panel.box.children[0].click()
    assert not panel.recordings.listed


def test_messages_do_what_they_say(state, monkeypatch):
    panel, sent = RecordsPanel(state), []
    panel.box.children[0].click()
    monkeypatch.setattr(panel.table, "send", sent.append)
    panel._act({"act": "open", "name": "clip78-256"}, [])
    panel._act({"act": "download", "name": "clip78-256"}, [])
    assert sent == [{"opened": "clip78-256"}, {"download": "clip78-256.json", "content": (records.SHIPPED / "clip78-256.json").read_text()}]
    assert state.setup.micro_batch == 256
    panel._act({"act": "load", "name": "x.json"}, [memoryview(b"{")])
    assert panel.table.failed and panel.table.said.startswith("x.json is not valid JSON")
    panel._act({"act": "refuse", "name": "big.iso", "n_bytes": 3 << 30}, [])
    assert panel.table.said == "big.iso has 3.0 GiB; a record has at most 1 MiB."
    panel._act({"act": "no-such-act"}, [])
    panel.table.chosen = ["clip78-256", "clip78-280"]
    assert "Side by side" in panel._compared.value and "micro_batch" in panel._compared.value


def test_nothing_in_a_record_becomes_html():
    failure = Failure(phase="backward", step="first", requested_bytes=1, text=HOSTILE)
    environment = {"gpu": HOSTILE, HOSTILE: HOSTILE}
    first = records.keep(content(Setup(model=HOSTILE, micro_batch=2, deepspeed={HOSTILE: 1}), environment=environment, verdict=Verdict(answer="does not fit", failure=failure)), HOSTILE)
    html = side_by_side(compare(first, replace(records.get("gpt2-z2"))))
    assert "<img" not in html and "&lt;img" in html and "A ran out of memory" in html


def test_a_disk_that_is_full_is_one_sentence(recordings, monkeypatch):
    def full(*_):
        raise CouldNotRun("the disk is full")

    monkeypatch.setattr(records, "keep", full)
    recordings.load(content(default_setup()), "ann.json")
    assert (recordings.failed, recordings.said) == (True, "The disk is full.")
