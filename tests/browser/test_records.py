"""What was measured before, on the real page: opened, compared, downloaded, loaded from a file, removed; with the keyboard, and in a narrow window."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page, expect  # noqa: E402

from explorer.measure import records  # noqa: E402
from tests.browser.test_page import bar, contrast  # noqa: E402

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def listed(open_page):
    """`listed(query="")`: the page with the list open."""

    def opened(query: str = "") -> Page:
        page = open_page(query)
        page.get_by_role("button", name="Measured before").click()
        expect(row(page, "clip78-256")).to_be_visible()
        return page

    return opened


def row(page: Page, name: str):
    return page.locator(f".ex-records tr[data-name='{name}']")


def give(page: Page, name: str, content: bytes) -> None:
    page.get_by_label("Load from a file").set_input_files({"name": name, "mimeType": "application/json", "buffer": content})


def said(page: Page):
    return page.locator(".ex-records .ex-said")


def test_a_shipped_record_opens_from_the_keyboard_with_its_bar_and_its_date(listed):
    page = listed("model=gpt2&micro_batch=5")
    expect(bar(page, "Measured", "Activations")).to_have_count(0)
    page.get_by_role("button", name="Measured before").focus()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.labels?.[0]?.textContent || document.activeElement.className"))
    assert reached[0].startswith("Load from a file")
    for word in ("Compare: ", "Open: ", "Download: "):
        assert any(name.startswith(word) for name in reached), reached
    button = row(page, "clip78-256").get_by_role("button", name="Open:")
    button.focus()
    page.keyboard.press("Enter")
    expect(bar(page, "Measured", "Activations")).to_have_count(1)
    expect(page.locator(".ex-where")).to_contain_text("Measured on NVIDIA H200, recorded 2026-12-02")
    expect(page.get_by_role("textbox", name="Micro-batch per GPU")).to_have_value("256")
    expect(row(page, "clip78-256")).to_contain_text("shown")
    expect(page.locator(".ex-verdict")).to_be_in_viewport()
    expect(button).to_be_focused()


def test_two_are_compared_in_light_and_dark_and_on_a_phone(listed):
    page = listed()
    for name in ("clip78-256", "clip78-320-ckpt"):
        row(page, name).get_by_role("checkbox").check()
    table = page.locator(".ex-side-by-side")
    expect(table.get_by_role("row", name="Activations")).to_contain_text("−61.10")
    expect(table.get_by_role("row", name="gradient_checkpointing")).to_contain_text("true")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    for _ in ("light", "dark"):
        for selector in (".ex-model", ".ex-records small", ".ex-quiet", ".ex-records .ex-tool", ".ex-changes code"):
            assert contrast(page, selector) >= 4.5, selector
        page.get_by_role("button", name="Dark/light").click()
    row(page, "clip78-320").get_by_role("checkbox").check()  # the third takes the first one's place
    expect(row(page, "clip78-256").get_by_role("checkbox")).not_to_be_checked()
    expect(table).to_contain_text("B ran out of memory")
    row(page, "clip78-320").get_by_role("checkbox").uncheck()
    expect(table).to_have_count(0)


def test_a_download_is_the_file_and_comes_back(listed, tmp_path):
    page = listed()
    with page.expect_download() as download:
        row(page, "gpt2-z2").get_by_role("button", name="Download:").click()
    download.value.save_as(tmp_path / download.value.suggested_filename)
    content = (tmp_path / "gpt2-z2.json").read_bytes()
    assert content == (records.SHIPPED / "gpt2-z2.json").read_bytes()

    give(page, "cut.json", content[:2000])
    expect(said(page)).to_contain_text("cut.json is not valid JSON")
    give(page, "big.json", b" " * (2 << 20))
    expect(said(page)).to_have_text("big.json has 2.0 MiB; a record has at most 1 MiB.")
    mine = json.loads(content)
    mine["setup"]["micro_batch"] = 11
    mine["profile"]["environment"]["gpu"] = HOSTILE
    give(page, "mine.json", json.dumps(mine).encode())
    expect(said(page)).to_contain_text("Loaded: gpt2, micro-batch 11")
    own = page.locator(".ex-records tbody tr", has_text="yours").filter(has_text="micro-batch 11")
    expect(own).to_have_count(1)
    own.get_by_role("button", name="Open:").click()
    expect(page.locator(".ex-where")).to_contain_text(f"Measured on {HOSTILE}")
    expect(page.locator("img")).to_have_count(0)

    own.get_by_role("button", name="Remove").click()
    own.get_by_role("button", name="Remove").click()
    expect(said(page)).to_contain_text("Removed: gpt2, micro-batch 11")
    expect(own).to_have_count(0)
    expect(bar(page, "Measured", "Activations")).to_have_count(0)
