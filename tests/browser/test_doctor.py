"""The doctor's panel in the real page: from a paste to the cause, a fix and the files that run it; and pastes that mean harm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page, expect  # noqa: E402

pytestmark = pytest.mark.browser

WORK_MS = 30_000
"""How long a consultation may take on a machine that is busy; how long it takes is measured in benchmarks/."""
CASE = (Path(__file__).parent.parent / "ui" / "clip-stage2.txt").read_text(encoding="utf-8")


def box(page: Page):
    return page.get_by_role("textbox", name=re.compile("^Paste what you have"))


def row(page: Page, fix: str):
    return page.locator(f'.ex-fixes tr[data-fix="{fix}"]')


def test_from_the_paste_to_the_fix_and_out_again(open_page):
    page = open_page()
    box(page).fill(CASE)
    expect(page.locator(".ex-cause p").first).to_contain_text("are activations", timeout=WORK_MS)
    expect(page.locator(".ex-sentence")).to_have_text(re.compile("^Does not fit one A100-80GB"))
    expect(page.get_by_role("textbox", name="GPUs", exact=True)).to_have_value("2")
    expect(row(page, "stage-3-offload")).to_contain_text("does not fit")
    expect(row(page, "gradient-checkpointing")).to_contain_text(re.compile("fits"))
    promised = row(page, "gradient-checkpointing").locator(".ex-peak b").inner_text()
    row(page, "gradient-checkpointing").get_by_role("button", name="Apply").press("Enter")
    expect(page.locator(".ex-sentence")).to_have_text(re.compile("^Fits one A100-80GB"))
    expect(page.get_by_role("checkbox", name="Gradient checkpointing")).to_be_checked()
    expect(row(page, "gradient-checkpointing")).to_contain_text("in use")
    expect(page.locator(".ex-figures .ex-value").first).to_contain_text(promised.split()[0])
    page.locator(".ex-away > summary").click()
    expect(page.locator(".ex-out pre").nth(1)).to_contain_text("gradient_checkpointing=True")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download: ds_config.json").click()
    assert '"reduce_bucket_size": 200000000' in Path(download.value.path()).read_text(encoding="utf-8")
    expect(box(page)).to_have_value(CASE)


def test_undo_puts_the_controls_back(open_page):
    page = open_page()
    box(page).fill('{"zero_optimization": {"stage": 3}}')
    stage = page.get_by_role("radiogroup", name="ZeRO stage")
    expect(stage.get_by_role("radio", name="3", exact=True)).to_be_checked(timeout=WORK_MS)
    page.get_by_role("button", name="Undo").click()
    expect(stage.get_by_role("radio", name="2", exact=True)).to_be_checked()
    page.get_by_role("button", name="Use these settings").click()
    expect(stage.get_by_role("radio", name="3", exact=True)).to_be_checked(timeout=WORK_MS)


def test_what_would_help_comes_without_a_paste(open_page):
    page = open_page("micro_batch=320")
    expect(row(page, "gradient-checkpointing")).to_contain_text("fits", timeout=WORK_MS)
    page.get_by_role("textbox", name="Micro-batch per GPU").fill("16")
    expect(page.locator(".ex-fixes")).to_have_count(0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">", "Nothing of a configuration"),
        ("\0\0\ud83d" + '{"zero_optimization": {"stage": 1, "<img src=x onerror=alert(1)>": "\0"}}', "Read: DeepSpeed config."),
        ("# padding\n" * 104_000 + '{"zero_optimization": {"stage": 1}}', "Read: DeepSpeed config."),
        ("x" * (1 << 20), "Nothing of a configuration"),
        ("é" * (3 << 20), "at most 1 MiB is read"),
    ],
    ids=["script", "NULs and half a character", "1 MB around a config", "1 MB of nothing", "3 MB"],
)
def test_a_hostile_paste_leaves_the_page_alive(open_page, text, said):
    page = open_page()
    box(page).evaluate("(area, text) => { area.value = text; area.dispatchEvent(new Event('input', { bubbles: true })); }", text)
    expect(page.locator(".ex-doctor .ex-said")).to_contain_text(said, timeout=WORK_MS)
    assert page.locator(".ex-doctor :is(script, img)").count() == 0 and page.title() != "taken"
    assert len(box(page).input_value()) == len(text.encode("utf-16-le", "surrogatepass")) // 2  # nothing of it is lost
    box(page).fill("")
    expect(page.locator(".ex-doctor .ex-said")).to_have_text("", timeout=WORK_MS)
    page.get_by_role("textbox", name="Micro-batch per GPU").fill("24")
    expect(page.locator(".ex-job pre")).to_contain_text('"micro_batch": 24')
