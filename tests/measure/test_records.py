"""Records: kept, found again by what a setup means, refused in one sentence where they are not ours."""

from __future__ import annotations

import json

import pytest

from explorer.errors import BadInput
from explorer.measure import records
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
    "no profile": ({"change": lambda c: c.pop("profile")}, "damaged"),
    "no date": ({"change": lambda c: c.pop("recorded_at")}, "damaged"),
    "profile a list": ({"change": lambda c: c.update(profile=[])}, "damaged"),
    "a phase without a field": ({"change": lambda c: c["profile"]["steps"]["first"][0].pop("peak_allocated_bytes")}, "damaged"),
    "a setup that cannot be": ({"change": lambda c: c["setup"].update(micro_batch=-1)}, "damaged"),
    "verdict null": ({"change": lambda c: c["profile"].update(verdict=None)}, "damaged"),
}


@pytest.mark.parametrize(("how", "words"), BAD.values(), ids=BAD)
def test_what_is_no_record_is_one_sentence_and_is_passed_over(how, words, tmp_path):
    path = written(tmp_path, **how)
    with pytest.raises(BadInput) as caught:
        records.load(path)
    assert caught.value.field == "record" and words in str(caught.value)
    records.save(SETUP, profile())
    (records.folder() / "aaa.json").write_text(path.read_text())
    assert [r.setup for r in records.all() if not r.shipped] == [SETUP]


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
