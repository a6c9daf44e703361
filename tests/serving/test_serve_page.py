"""The playground page in a real browser, against a real server: what it draws is what the API's trace says."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from transformers import AutoModelForCausalLM

import skipdecode
from page_tools import DESKTOP, PHONE, answers, drawn_layers, opened, serious, traced
from serve_tools import serving
from skipdecode import Schedule
from textgen_tools import save_tiny_model
from tiny import LAYERS

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium: install it (Debian: apt-get install chromium)"),
]
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
ADAPTER = Path(skipdecode.__file__).parent / "models" / "adapters" / "e2e-smollm2-135m"
STOP_AT_THE_FIRST_TOKEN = """new Promise((done) => {
  const stop = (_, observer) => { observer.disconnect(); document.getElementById("stop").click(); done(); };
  new MutationObserver(stop).observe(document.querySelector("#full .tokens"), { childList: true });
  document.getElementById("run").click();
})"""
KEY = "a-key-of-the-tests"
TWO = Schedule.from_speedup(LAYERS, 2, 12, name="two")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model that carries a schedule, and one more, as arguments of `serve`."""
    folder = tmp_path_factory.mktemp("page")
    directory = save_tiny_model(folder / "model", context=512, skipdecode=TWO.to_dict())
    (folder / "even.json").write_text(Schedule.even(LAYERS, (6, 5, 5, 4)).to_json())
    return [directory, "--schedule", str(folder / "even.json")]


@pytest.fixture(scope="module")
def address(model: list[str]) -> Iterator[str]:
    with serving(*model) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=ARGUMENTS.split())
        yield browser
        browser.close()


def check_column(page: Page, column: str, answer: dict[str, Any], num_layers: int, drop_order: list[int]) -> None:
    tokens, figures = traced(answer["chunks"]), answer["figures"][0]
    fastest = max(answer["figures"], key=lambda run: run["tokens_per_s"] or 0)
    part = page.locator(f"#{column}")
    assert [t["position"] for t in tokens] == list(range(figures["completion_tokens"]))
    assert part.locator(".tokens").evaluate("e => e.textContent") == "".join(t["text"] for t in tokens)
    paths = part.locator("svg .ran").evaluate_all("all => all.map(e => e.getAttribute('d'))")
    height = part.locator("svg").evaluate("e => e.clientHeight")
    everything = set(range(num_layers))
    expected = [sorted(everything - set(drop_order[: num_layers - t["layers"]])) for t in tokens]
    assert [drawn_layers(path, num_layers, height) for path in paths] == expected
    assert {str(len(layers)): layers for layers in expected} == figures["layer_sets"]
    depths = part.locator(".token").evaluate_all("all => all.map(e => Number(e.style.getPropertyValue('--depth')))")
    assert depths == pytest.approx([t["layers"] / num_layers for t in tokens])

    shown = {name: part.locator(f"[data-figure={name}]").inner_text() for name in ("rate", "time", "tokens", "layers")}
    assert (shown["rate"] == "") == (fastest["tokens_per_s"] is None)  # if all tokens were written at once
    if shown["rate"]:
        assert float(shown["rate"].replace(",", "")) == pytest.approx(fastest["tokens_per_s"], rel=0.01)
    assert float(shown["time"].removesuffix(" s")) == pytest.approx(
        fastest["first_token_s"] + fastest["decode_s"], abs=0.06
    )
    assert shown["tokens"] == str(len(tokens))
    assert sum(t["layers"] for t in tokens) == figures["layers_run"]
    assert percent(shown["layers"]) == pytest.approx(100 * figures["layers_run"] / figures["layers_full"], abs=0.51)


def percent(text: str) -> float:
    return float(text.removesuffix("%"))


def run_to_the_end(page: Page, timeout_s: float = 60, *, again: bool = False) -> None:
    page.get_by_label("Measure the speeds three times").set_checked(again)
    page.get_by_role("button", name="Run both").click()
    expect(page.locator("#tiles")).to_be_visible(timeout=1000 * timeout_s)
    expect(page.get_by_role("button", name="Run both")).to_be_enabled(timeout=1000 * timeout_s)


@pytest.mark.parametrize(("kind", "again"), [("Completion", True), ("Chat", False)], ids=["completion", "chat"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_columns_show_the_answers(browser: Browser, address: str, size: tuple[int, int], kind: str, again: bool):
    with opened(browser, address, size) as page:
        page.get_by_text(kind, exact=True).click()
        page.get_by_label("Prompt", exact=True).fill("The quick brown fox")
        run_to_the_end(page, again=again)
        found = answers(page)
        assert [len(answer["figures"]) for answer in found.values()] == [1 + 2 * again] * 2
        assert list(found) == ["full", "two"]  # one after the other, full depth first
        assert all(("chat" in answer["path"]) == (kind == "Chat") for answer in found.values())
        check_column(page, "full", found["full"], LAYERS, [])
        check_column(page, "reduced", found["two"], LAYERS, list(TWO.drop_order))

        figures = {name: max(a["figures"], key=lambda run: run["tokens_per_s"] or 0) for name, a in found.items()}
        full, two = (figures[name]["tokens_per_s"] for name in ("full", "two"))
        speedup = page.locator("#speedup").inner_text()
        assert (speedup == "–") == (two is None or full is None)
        if speedup != "–":
            assert float(speedup.rstrip("×").replace(",", "")) == pytest.approx(two / full, abs=0.006)
        remark = "fastest of 3 runs each" if again else "one run each"
        expect(page.locator("#speedup-note")).to_have_text(f"nominal 2×; {remark}")
        held, saved = figures["two"]["kv_bytes"], figures["two"]["kv_bytes_saved"]
        assert percent(page.locator("#kv").inner_text()) == pytest.approx(100 * saved / (held + saved), abs=0.51)
        assert page.get_by_role("status").filter(has_text="Measured speed-up").count() == 1
        edges = page.locator("main *").evaluate_all("all => all.map(e => e.getBoundingClientRect().right)")
        assert max(edges) <= size[0]  # nothing sticks out


def test_it_opens_as_the_model_is_used_and_names_the_schedule(browser: Browser, address: str, tmp_path: Path):
    with opened(browser, address) as page:
        expect(page.get_by_label("Chat", exact=True)).to_be_checked()
        lead = page.locator("#lead")
        expect(lead).to_contain_text(f"On the right two: {TWO.budgets[0]} down to {TWO.budgets[-1]} of {LAYERS} layers")
        page.get_by_role("slider", name="Schedule").press("ArrowLeft")
        expect(lead).to_contain_text("On the right even: 6 down to 4")
    with serving(save_tiny_model(tmp_path, chat=False)) as (plain, _), opened(browser, plain) as page:
        expect(page.locator("#lead")).to_have_text(f"All {LAYERS} layers for every token: this server has no schedule.")
        expect(page.get_by_label("Completion", exact=True)).to_be_checked()


def test_differences_are_marked_and_listed(browser: Browser, address: str):
    with opened(browser, address) as page:
        run_to_the_end(page)
        texts = [page.locator(f"#{c} .tokens").evaluate("e => e.textContent") for c in ("full", "reduced")]
        assert texts[0] != texts[1]
        marked = page.locator("#reduced .token.differs")
        assert 0 < marked.count() < page.locator("#reduced .token").count() or texts[0][0] != texts[1][0]
        assert "underline" in marked.first.evaluate("e => getComputedStyle(e).textDecorationLine")
        rows = page.get_by_role("table").get_by_role("row")
        assert rows.nth(0).inner_text().split("\t") == ["Full depth", "two"]
        for row in rows.all()[1:]:
            for text, cell in zip(texts, row.locator("td").all(), strict=True):
                said = cell.evaluate("e => e.textContent")
                assert said in text or said == "nothing"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_serious(browser: Browser, address: str, size: tuple[int, int], scheme: str):
    with opened(browser, address, size, color_scheme=scheme) as page:
        expect(page.get_by_role("button", name="Run both")).to_be_enabled()
        assert serious(page) == []
        page.get_by_role("button", name="API key").click()
        page.get_by_text("How to read this page").click()
        run_to_the_end(page)
        assert serious(page) == []


def test_two_empty_answers_are_not_called_equal(browser: Browser, tmp_path: Path):
    directory = save_tiny_model(tmp_path, context=512)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.lm_head.weight.data.zero_()  # the likeliest token is then the first of all, whose text is empty
    model.generation_config.eos_token_id = 0
    model.save_pretrained(directory)
    with serving(directory, "--schedule", "2x") as (address, _), opened(browser, address) as page:
        expect(page.get_by_label("Schedule", exact=True)).to_be_hidden()  # there is one
        run_to_the_end(page)
        for column in ("full", "reduced"):
            expect(page.locator(f"#{column}")).to_contain_text("the model ended its answer at once")
        expect(page.locator("#same")).to_have_text("–")
        expect(page.locator("#differences")).not_to_contain_text("the same")


def test_schedules_of_one_speedup_say_how_their_prompts_differ(browser: Browser, model: list[str], tmp_path: Path):
    TWO.with_prompt(tuple(range(4))).save(tmp_path / "split.json")
    Schedule.split(LAYERS, 4, LAYERS, name="alone").save(tmp_path / "alone.json")
    files = [str(tmp_path / name) for name in ("split.json", "alone.json")]
    with serving(*model, *files) as (address, _), opened(browser, address) as page:
        ticks = page.locator("#schedule-ticks span")
        expect(ticks).to_have_count(4)
        assert sorted(ticks.all_inner_texts()) == ["1.6×", "1×\nprompts\n4", "2×\nprompts\n4", f"2×\nprompts\n{LAYERS}"]
        slider, said = page.get_by_role("slider", name="Schedule"), []
        slider.focus()
        for key in ("End", "ArrowLeft"):
            page.keyboard.press(key)
            said.append(str(slider.get_attribute("aria-valuetext")).rpartition(", ")[2])
        assert sorted(said) == ["prompts through 4 layers", f"prompts through {LAYERS} layers"]
        page.keyboard.press("Home")
        expect(page.locator("#lead")).to_contain_text(f"alone: All {LAYERS} layers for every new token; 4 for prompts")


def test_by_keyboard_alone(browser: Browser, address: str):
    with opened(browser, address) as page:
        slider = page.get_by_role("slider", name="Schedule")
        expect(slider).to_be_enabled()
        order = []
        for _ in range(13):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        wanted = ["Skip to the results", "key-open", "prompt", "schedule", "max-tokens", "together", "again", "run"]
        assert [name for name in order if name in wanted] == wanted
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert slider.get_attribute("aria-valuetext") == "even, nominal speed-up 1.60"
        page.keyboard.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == "two, nominal speed-up 2.00"
        page.get_by_label("Prompt", exact=True).focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#tiles")).to_be_visible(timeout=60_000)
        scrub = page.get_by_role("slider", name="Look at one token of two")
        scrub.focus()
        page.keyboard.press("ArrowRight")
        said = scrub.get_attribute("aria-valuetext")
        assert re.match(r"Token 2 of \d+: .*\. \d of 8 layers", said, re.DOTALL)
        assert page.locator("#reduced .token").nth(1).evaluate("e => e.classList.contains('looked')")
        expect(page.locator("#reduced .readout")).to_contain_text("token 2")


def test_stop_ends_both(browser: Browser, address: str):
    with opened(browser, address) as page:
        page.get_by_label("Max tokens").fill("256")
        expect(page.get_by_role("button", name="Run both")).to_be_enabled()
        page.evaluate(STOP_AT_THE_FIRST_TOKEN)
        expect(page.locator("#full .state")).to_have_text("Stopped")
        expect(page.locator("#reduced .state")).to_have_text("Ready")
        expect(page.get_by_role("button", name="Run both")).to_be_enabled()
        page.get_by_label("Max tokens").fill("8")
        run_to_the_end(page)


def test_together(browser: Browser, address: str):
    with opened(browser, address) as page:
        page.get_by_label("Run both together").check()
        run_to_the_end(page)
        assert set(answers(page)) == {"full", "two"}
        assert "sharing the machine" in page.locator("#speedup-note").inner_text()


def test_empty_prompt_is_asked_for(browser: Browser, address: str):
    with opened(browser, address) as page:
        page.get_by_label("Prompt", exact=True).fill("  ")
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_text("Write a prompt first")).to_be_visible()
        assert page.evaluate("document.activeElement.id") == "prompt"


def test_key_is_asked_for(browser: Browser, model: list[str]):
    with serving(*model, key=KEY) as (address, _), opened(browser, address, PHONE) as page:
        expect(page.get_by_text("This server wants an API key.")).to_be_visible()
        assert serious(page) == []
        page.get_by_label("API key", exact=True).fill("another")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not accept this API key.")).to_be_visible()
        page.get_by_label("API key", exact=True).fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        run_to_the_end(page)


def test_server_without_room_and_server_that_goes(browser: Browser, model: list[str]):
    with (
        serving(*model, "--max-waiting", "0", "--max-rows", "1") as (address, server),
        opened(browser, address) as page,
    ):
        page.get_by_label("Max tokens").fill("256")
        page.get_by_label("Run both together").check()
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_text("The server is busy: its queue is full. Try again in")).to_be_visible(timeout=30_000)
        expect(page.get_by_role("button", name="Run both")).to_be_enabled(timeout=60_000)
        server.terminate()
        server.wait(30)
        page.get_by_role("button", name="Run both").click()
        expect(page.get_by_text("No answer from the server. Is it still running?").first).to_be_visible()


@pytest.mark.model
def test_real_model_and_the_pictures_of_the_docs(browser: Browser, tmp_path: Path):
    """The bundled adapter: good text at 3x, and faster than full depth. SKIPDECODE_PICTURES names a folder to keep."""
    pictures = Path(os.environ.get("SKIPDECODE_PICTURES", tmp_path))
    arguments = ["--name", "smollm2-135m-e2e", "--threads", "2"]
    order = Schedule.load(ADAPTER / "skipdecode.json").drop_order
    with serving(str(ADAPTER), *arguments) as (address, _):
        for size, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")):
            phone = size == PHONE
            with opened(browser, address, size, color_scheme=scheme, device_scale_factor=1 + phone) as page:
                run_to_the_end(page, 120, again=True)
                found = answers(page)
                check_column(page, "full", found["full"], 30, [])
                check_column(page, "reduced", found["e2e-p30-3x"], 30, order)
                for column in ("full", "reduced"):
                    assert "Blue Heron" in page.locator(f"#{column} .tokens").inner_text()
                page.locator("#reduced .token").nth(5 if phone else 9).hover()
                picture = pictures / f"playground-{'phone' if phone else 'desktop'}-{scheme}.png"
                page.screenshot(path=picture, full_page=not phone)
                assert picture.stat().st_size < 300_000
