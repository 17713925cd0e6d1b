"""Records: kept, found again by what a setup means, refused in one sentence where they are not ours."""

from __future__ import annotations

import json

import pytest

from explorer.errors import BadInput, CouldNotRun
from explorer.measure import records
from explorer.measure.comparison import compare
from explorer.profile import CATEGORIES
from explorer.setup import Setup
from tests.test_profile import profile

SETUP = Setup(model={"model_type": "gpt2", "n_layer": 2}, micro_batch=3, gpu="T4")


def test_saved_and_found_by_an_equal_setup():
    assert records.find(SETUP) is None
    path = records.save(SETUP, profile())
    again = Setup.from_job(json.loads(json.dumps(SETUP.to_job())))
    found = records.find(again)
    assert found.profile == profile() and found.setup == SETUP and found.path == path and not found.shipped
    assert found.recorded_at.endswith("+00:00")
    assert records.find(SETUP.replace(micro_batch=4)) is None
    assert path.parent == records.folder() and not list(path.parent.glob("*.part"))


def test_a_later_record_takes_the_place_of_the_former():
    records.save(SETUP, profile(800))
    records.save(SETUP, profile(1600))
    assert records.find(SETUP).profile.peak.allocated_bytes == 1600
    assert len(list(records.folder().glob("*.json"))) == 1


def written(tmp_path, change=None, text=None):
    content = records.to_json(SETUP, profile(), "2026-01-01T00:00:00+00:00")
    if change:
        change(content)
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content) if text is None else text(json.dumps(content)))
    return path


BAD = {
    "truncated": ({"text": lambda t: t[: len(t) // 2]}, "not valid JSON"),
    "empty": ({"text": lambda t: ""}, "is empty"),
    "foreign": ({"text": lambda t: '{"name": "something else"}'}, "not a record"),
    "a list": ({"text": lambda t: "[]"}, "not a record"),
    "newer": ({"change": lambda c: c.update(schema=2)}, "newer version (schema 2)"),
    "a newer job": ({"change": lambda c: c["setup"].update(schema=2)}, "newer version (schema 2 of its job); this one reads schema 1"),
    "a newer answer": ({"change": lambda c: c["profile"].update(schema=99)}, "newer version (schema 99 of its answer); this one reads schema 1"),
    "a schema that is no number": ({"change": lambda c: c["profile"].update(schema="2")}, 'damaged: the schema of its answer is "2"'),
    "no profile": ({"change": lambda c: c.pop("profile")}, "damaged"),
    "no date": ({"change": lambda c: c.pop("recorded_at")}, "damaged"),
    "profile a list": ({"change": lambda c: c.update(profile=[])}, "damaged"),
    "a phase without a field": ({"change": lambda c: c["profile"]["steps"]["first"][0].pop("peak_allocated_bytes")}, "damaged"),
    "a setup that cannot be": ({"change": lambda c: c["setup"].update(micro_batch=-1)}, "damaged, or its job is one of a newer version: micro_batch: is -1"),
    "a setup of a newer version": ({"change": lambda c: c["setup"].update(hovercraft=True)}, "newer version: hovercraft: is not a key of a job"),
    "a date that is none": ({"change": lambda c: c.update(recorded_at="yesterday")}, "damaged"),
    "a size as text": ({"change": lambda c: c["profile"]["host"].update(pinned_bytes="1e9")}, "damaged"),
    "a size below zero": ({"change": lambda c: c["profile"]["peak"].update(reserved_bytes=-1)}, "damaged"),
    "a size of no memory": ({"change": lambda c: c["profile"]["peak"].update(reserved_bytes=10**300)}, "damaged"),
    "categories that do not add up": ({"change": lambda c: c["profile"]["at_peak"].update(gathered=1 << 30)}, "damaged"),
    "a category of nobody's": ({"change": lambda c: c["profile"]["at_peak"].update(magic=0)}, "damaged"),
    "a phase of nobody's": ({"change": lambda c: c["profile"]["peak"].update(allocated_phase="lunch")}, "damaged"),
    "an estimate": ({"change": lambda c: c["profile"].update(source="estimated")}, "damaged"),
    "a card that is no text": ({"change": lambda c: c["profile"]["environment"].update(gpu=["H200"])}, "damaged"),
    "no JSON at all": ({"text": lambda t: "PK\x03\x04"}, "not valid JSON"),
    "too large": ({"text": lambda t: t + " " * (1 << 20)}, "too large"),
    "verdict null": ({"change": lambda c: c["profile"].update(verdict=None)}, "damaged"),
}


@pytest.mark.parametrize(("how", "words"), BAD.values(), ids=BAD)
def test_what_is_no_record_is_one_sentence_and_is_passed_over(how, words, tmp_path):
    path = written(tmp_path, **how)
    with pytest.raises(BadInput) as caught:
        records.load(path)
    assert caught.value.field == "record" and words in str(caught.value)
    assert str(caught.value).startswith("record: one.json ") and "\n" not in str(caught.value)
    with pytest.raises(BadInput):
        records.keep(path.read_bytes(), path.name)
    records.save(SETUP, profile())
    (records.folder() / "aaa.json").write_text(path.read_text())
    assert [r.setup for r in records.all() if not r.shipped] == [SETUP]
    (said,) = records.unreadable()
    assert said.startswith(f"left out of {records.folder()}: aaa.json ") and words in said and "\n" not in said


def test_nothing_is_left_out_where_nothing_was_kept_and_all_of_a_folder_that_cannot_be_read(monkeypatch, tmp_path):
    assert records.unreadable() == []
    monkeypatch.setenv("EXPLORER_DATA", str(tmp_path / ("a" * 300)))
    (said,) = records.unreadable()
    assert "the folder cannot be read (File name too long)" in said and "EXPLORER_DATA" in said
    assert all(record.shipped for record in records.all()) and records.find(SETUP) is None


def test_the_form_in_the_file_is_read_back(tmp_path):
    assert records.load(written(tmp_path)).profile == profile()


def test_what_a_killed_writer_left_is_removed_and_a_living_one_s_stays():
    import os
    import subprocess
    import sys

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    records.folder().mkdir(parents=True)
    (records.folder() / f"0123.{dead.pid}.part").write_text('{"schema"')
    (records.folder() / f"0123.{os.getppid()}.part").write_text('{"schema"')
    path = records.save(SETUP, profile())
    assert {p.name for p in records.folder().iterdir()} == {path.name, f"0123.{os.getppid()}.part"}


# -- records of others


def others(setup: Setup = SETUP, peak: int = 800, date: str = "2020-01-01T00:00:00+00:00") -> bytes:
    return json.dumps(records.to_json(setup, profile(peak), date), indent=1).encode()


def test_a_record_of_others_is_kept_as_it_is_beside_one_s_own():
    own = records.save(SETUP, profile(1600))
    kept = records.keep(others(), "from-ann.json")
    assert records.content(kept) == others() and not kept.shipped and kept.path.parent == records.folder()
    assert records.find(SETUP).path == own, "the newer one is found"
    assert records.keep(others(), "again.json").name == kept.name
    assert len(list(records.folder().iterdir())) == 2
    newer = records.keep(others(peak=2400, date="2999-01-01T00:00:00+00:00"), "newer.json")
    assert records.find(SETUP).name == newer.name
    assert records.load(own).profile.peak.allocated_bytes == 1600


def test_a_folder_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPLORER_DATA", str(tmp_path / "file"))
    with pytest.raises(CouldNotRun, match="could not be kept: .* cannot be written to"):
        records.keep(others(), "one.json")


def test_one_s_own_can_be_removed_and_a_shipped_one_stays():
    name = records.save(SETUP, profile()).stem
    assert records.remove(name).setup == SETUP and records.find(SETUP) is None
    with pytest.raises(BadInput, match=f'none is called "{name}"'):
        records.remove(name)
    with pytest.raises(BadInput, match="clip78-256 ships with the explorer and stays"):
        records.remove("clip78-256")
    assert records.get("clip78-256").path.exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "clip78-256.json", "clip78-25"])
def test_a_name_is_looked_up_never_opened(name):
    with pytest.raises(BadInput, match="none is called"):
        records.get(name)


def test_every_shipped_record_is_sound_and_is_its_file():
    shipped = [record for record in records.all() if record.shipped]
    assert len(shipped) == len(list(records.SHIPPED.glob("*.json"))) >= 12
    assert all(records.content(record) == record.path.read_bytes() for record in shipped)


# -- two side by side


def test_two_records_differ_by_category_and_by_key():
    found = compare(records.get("clip78-256"), records.get("clip78-320-ckpt"))
    first, second = found.first.profile, found.second.profile
    assert found.memory.by_category == {c: second.at_peak[c] - first.at_peak[c] for c in CATEGORIES}
    assert sum(found.memory.by_category.values()) == found.memory.peak_allocated_bytes == 11_031_515_136 - 74_729_629_184
    assert [(c.key, c.first, c.second) for c in found.setups] == [("micro_batch", 256, 320), ("gradient_checkpointing", False, True)]
    assert found.environments == ()


def test_a_setting_deep_in_the_config_has_its_own_line():
    found = compare(records.get("clip78-320"), records.get("clip78-320-z3"))
    assert [(c.key, c.first, c.second) for c in found.setups] == [("deepspeed.zero_optimization.stage", 2, 3), ("deepspeed.zero_optimization.offload_param", None, {"device": "cpu"})]


def test_what_only_one_gives_and_another_machine_are_told():
    one = records.keep(others(), "one.json")
    there = profile(environment={"torch": "2.13", "gpu": "T4", "date": "now"})
    other = records.keep(json.dumps(records.to_json(SETUP.with_deepspeed("bf16", {"enabled": True}), there, "2020-01-01T00:00:00+00:00")).encode(), "two.json")
    found = compare(one, other)
    assert [(c.key, c.first, c.second) for c in found.setups] == [("deepspeed.bf16", None, {"enabled": True})]
    assert [(c.key, c.first, c.second) for c in found.environments] == [("gpu", None, "T4")]
    assert json.loads(json.dumps(found.to_json()))["changes"] == {"deepspeed.bf16": [None, {"enabled": True}]}


def test_a_measurement_that_cannot_be_kept_is_not_lost(monkeypatch, tmp_path):
    from explorer.measure import runner

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPLORER_DATA", str(tmp_path / "file"))
    monkeypatch.setattr(runner, "why_not", lambda setup: None)
    monkeypatch.setattr(runner, "run_in_worker", lambda *_, **__: profile().to_record())
    got = runner.probe(SETUP)
    assert got.peak == profile().peak and "could not be kept" in got.notes[-1]
