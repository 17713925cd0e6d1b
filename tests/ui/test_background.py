"""Work off the main thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from explorer.ui.background import Latest, Mailbox


def direct(call):
    call()


def test_an_error_is_a_result():
    got = []
    latest = Latest("test", lambda: direct)
    latest.submit(lambda: 1 / 0, got.append)
    assert latest.wait() and isinstance(got[0], ZeroDivisionError)


def test_what_waits_is_replaced_and_what_is_dropped_is_not_reported():
    got, go = [], threading.Event()
    latest = Latest("test", lambda: direct)
    latest.submit(lambda: go.wait(5) and "first", got.append)
    latest.submit(lambda: "second", got.append)
    latest.submit(lambda: "third", got.append)
    go.set()
    assert latest.wait() and got[-1] == "third" and len(got) <= 2
    latest.submit(lambda: "dropped", got.append, delay_s=5)
    latest.drop()
    assert latest.wait() and "dropped" not in got


def test_a_pause_starts_anew_with_each_job():
    got = []
    latest = Latest("test", lambda: direct)
    for n in range(5):
        latest.submit(lambda n=n: n, got.append, delay_s=0.1)
    assert latest.wait() and got == [4]


def test_a_report_that_fails_does_not_end_the_thread():
    got = []
    latest = Latest("test", lambda: direct)
    latest.submit(lambda: 1, lambda _: 1 / 0)
    latest.wait()
    latest.submit(lambda: 2, got.append)
    assert latest.wait() and got == [2]


def test_mail_is_delivered_in_the_loop_s_thread_and_in_order():
    got = []

    async def main():
        mail = Mailbox(asyncio.get_running_loop())
        here = threading.get_ident()
        thread = threading.Thread(target=lambda: [mail.post(lambda n=n: got.append((n, threading.get_ident() == here))) for n in range(3)])
        thread.start()
        thread.join()
        assert got == []
        mail.drain()
        await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as pool:  # a thread of its own: Playwright, once used, leaves a loop running in this one
        pool.submit(asyncio.run, main()).result()
    assert got == [(0, True), (1, True), (2, True)]
