"""The real page in a real browser: real estimates, a real DeepSpeed step."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page, expect  # noqa: E402

from explorer.ui import address  # noqa: E402
from tests.browser.conftest import TINY  # noqa: E402

pytestmark = pytest.mark.browser

TABLE = ".ex-breakdown"


def bar(page: Page, source: str, category: str):
    """One segment of the picture, by what a screen reader says of it."""
    return page.locator(f".ex-picture .vega-embed svg path[aria-label^='{source}, {category}:']")


def sentence(page: Page):
    return page.locator(".ex-sentence")


def settled(page: Page) -> None:
    """Wait until the figures are of the setup that the job file shows."""
    page.wait_for_function("document.querySelector('.ex-figures')?.dataset.setup === document.querySelector('.ex-job')?.dataset.setup")


def tiny_query(**more: str) -> str:
    return urlencode({"model": "custom", "config": address.pack(TINY), "micro_batch": "2", "precision": "bf16", "offload_optimizer": "none", **more})


def test_a_slider_moves_the_chart_and_the_verdict(open_page):
    page = open_page()
    before = bar(page, "Estimated", "Activations").get_attribute("aria-label")
    slider = page.get_by_role("slider", name="Micro-batch per GPU")
    slider.focus()
    slider.press("PageUp")
    expect(bar(page, "Estimated", "Activations")).not_to_have_attribute("aria-label", before)


def test_every_stage_has_its_own_picture(open_page):
    page = open_page("model=gpt2&micro_batch=4&world_size=8&offload_optimizer=none")
    seen = set()
    for stage in "0123":
        page.get_by_role("radiogroup", name="ZeRO stage").get_by_role("radio", name=stage, exact=True).check(force=True)
        expect(page.locator(".ex-job pre")).to_contain_text(f'"stage": {stage}')
        settled(page)
        seen.add(page.locator(f"{TABLE} tbody").inner_text())
    assert len(seen) >= 3  # stages 1 and 2 can agree at the peak, before gradients are all there


def test_parameter_offload_is_off_with_its_reason_until_stage_three(open_page):
    page = open_page("stage=2")
    group = page.get_by_role("radiogroup", name="Parameter offload")
    expect(group.get_by_role("radio").first).to_be_disabled()
    expect(page.get_by_text("DeepSpeed offloads parameters only at stage 3.")).to_be_visible()
    page.get_by_role("radiogroup", name="ZeRO stage").get_by_role("radio", name="3", exact=True).check(force=True)
    expect(group.get_by_role("radio").first).to_be_enabled()


@pytest.mark.parametrize(("typed", "said"), [("lots", "is 'lots'; give a whole number"), ("-4", "is -4; give a whole number of at least 1")])
def test_a_wrong_number_has_its_notice_and_stays(open_page, typed, said):
    page = open_page()
    field = page.get_by_role("textbox", name="Micro-batch per GPU")
    field.fill(typed)
    expect(page.locator(".ex-number.ex-wrong .ex-notice")).to_contain_text(said)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_value(typed)
    field.fill("16")
    expect(page.locator(".ex-wrong")).to_have_count(0)
    expect(page.locator(".ex-job pre")).to_contain_text('"micro_batch": 16')


def test_a_bad_paste_has_its_notice_and_stays(open_page):
    page = open_page()
    page.get_by_label("Model", exact=True).select_option(label="Paste a config or a path …")
    box = page.get_by_label("config.json, folder or hub id")
    box.fill('{"model_type": "llama", <b>')
    expect(page.locator(".ex-config .ex-notice")).to_contain_text("is not valid JSON")
    box.fill('{"model_type": "no-such-type"}')
    expect(page.locator(".ex-config .ex-notice")).to_contain_text("no-such-type")
    expect(box).to_have_value('{"model_type": "no-such-type"}')


def test_a_link_restores_the_page(open_page):
    page = open_page()
    page.get_by_label("Model", exact=True).select_option("gpt2 · 124 M")
    page.get_by_role("textbox", name="Micro-batch per GPU").fill("12")
    page.get_by_role("radiogroup", name="ZeRO stage").get_by_role("radio", name="1", exact=True).check(force=True)
    page.wait_for_url(re.compile(r"model=gpt2.*micro_batch=12.*stage=1"))
    settled(page)
    said = page.locator(TABLE).inner_text()
    open_page(page.url.partition("?")[2])
    expect(page.get_by_role("textbox", name="Micro-batch per GPU")).to_have_value("12")
    settled(page)
    assert page.locator(TABLE).inner_text() == said


def test_a_bad_address_opens_the_page_with_a_notice(open_page):
    page = open_page("stage=9&job=junk")
    expect(page.locator(".ex-verdict .ex-notice")).to_have_count(2)


def test_the_probe_button_ends_with_a_measured_bar(open_page):
    page = open_page(tiny_query(stage="1"))
    expect(bar(page, "Estimated", "Parameters")).to_have_count(1)
    button = page.get_by_role("button", name="Run a real DeepSpeed step")
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    expect(bar(page, "Measured", "Parameters")).to_have_count(1, timeout=600_000)  # DeepSpeed compiles its optimizer the first time
    expect(page.locator(".ex-where")).to_contain_text("Measured on")
    expect(page.locator(f"{TABLE} thead")).to_contain_text("Difference")


def test_a_running_probe_can_be_cancelled(open_page):
    page = open_page(tiny_query(stage="2", micro_batch="3"))
    page.get_by_role("button", name="Run a real DeepSpeed step").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text(re.compile(r"Cancelled after"))).to_be_visible(timeout=30_000)
    expect(page.get_by_role("button", name="Run a real DeepSpeed step")).to_be_enabled()


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_nothing_is_wider_than_the_window(open_page, width):
    page = open_page()
    page.set_viewport_size({"width": width, "height": 900})
    page.get_by_role("button", name="Advanced").click()
    expect(page.get_by_role("textbox", name="reduce_bucket_size")).to_be_visible()
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    page.wait_for_function("document.querySelector('.ex-picture .vega-embed svg').getBoundingClientRect().width > 200")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(open_page, page, scheme):
    page.emulate_media(color_scheme=scheme)
    open_page()
    for selector in (".ex-sentence", ".ex-why", ".ex-figures dt", ".ex-side label", ".ex-table th", ".ex-lede", ".ex-tag"):
        assert contrast(page, selector) >= 4.5, f"{selector} in {scheme}"


_CONTRAST = """(selector) => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const el = document.querySelector(selector);
  let ground = el; while (ground && (rgb(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
  const [a, b] = [light(rgb(getComputedStyle(el).color)), light(rgb(getComputedStyle(ground).backgroundColor))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast ratio of an element's text and what lies behind it."""
    return page.evaluate(_CONTRAST, selector)


def test_every_control_has_a_name(open_page):
    page = open_page()
    page.get_by_role("button", name="Advanced").click()
    for role in ("slider", "textbox", "combobox", "radiogroup", "checkbox", "button"):
        for element in page.get_by_role(role).all():
            name = element.evaluate("e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent")
            assert name.strip(), f"a {role} without a name: {element.evaluate('e => e.outerHTML')[:200]}"


def test_the_keyboard_reaches_everything(open_page):
    page = open_page(tiny_query())
    expect(page.get_by_role("button", name="Run a real DeepSpeed step")).to_be_enabled()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.labels?.[0]?.textContent || document.activeElement.textContent.slice(0, 40)"))
    for name in ("Copy link", "Model", "Micro-batch per GPU", "GPU card", "Advanced", "Run a real DeepSpeed step"):
        assert any(name in r for r in reached), f"{name} is not in {sorted(reached)}"


def test_pages_that_are_left_and_come_back_do_not_share_state(open_page):
    page = open_page()
    page.get_by_role("textbox", name="Micro-batch per GPU").fill("7")
    expect(page.locator(".ex-job pre")).to_contain_text('"micro_batch": 7')
    open_page("gpu=T4")
    expect(page.locator(".ex-job pre")).to_contain_text('"micro_batch": 64')
