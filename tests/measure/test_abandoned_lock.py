"""A probe that was cancelled while it compiled does not block the next one."""

from __future__ import annotations

from explorer.measure.locks import clear_abandoned


def test_a_lock_whose_owner_is_gone_is_removed_and_a_held_one_stays(tmp_path):
    lock = tmp_path / "lock"
    with lock.open("w"):
        clear_abandoned(lock)
        assert lock.exists()
    clear_abandoned(lock)
    assert not lock.exists()
    clear_abandoned(lock)  # nothing there: nothing to do
