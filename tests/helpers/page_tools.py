"""For the playground's tests: the page in a browser, and what its answers were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

# A second reader on each answer: the browser's own record of a stream's body is not always there.
_KEEP_ANSWERS = """
window.answers = [];
const original = window.fetch;
window.fetch = async (url, options) => {
  const answer = await original(url, options);
  if (answer.ok && options?.method === "POST") {
    const text = answer.clone().text().catch(() => "");
    window.answers.push(text.then((text) => [new URL(url).pathname, options.body, text]));
  }
  return answer;
};
"""
DESKTOP, PHONE = (1280, 900), (360, 760)


@contextmanager
def opened(browser: Browser, address: str, size: tuple[int, int] = DESKTOP, **options: Any) -> Iterator[Page]:
    """The page, connected; at the end nothing was asked of another host and the console has no complaint."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, **{"reduced_motion": "reduce"} | options
    )
    page = context.new_page()
    hosts: set[str] = set()
    complaints: list[str] = []
    page.on("request", lambda request: hosts.add("/".join(request.url.split("/")[:3])))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.add_init_script(_KEEP_ANSWERS)
    page.goto(address)
    yield page
    assert hosts == {address}, hosts
    # A status that the page explains is also a line in the console.
    complaints = [line for line in complaints if "Failed to load resource" not in line]
    assert not complaints, complaints
    context.close()


def answers(page: Page) -> dict[str, dict[str, Any]]:
    """The page's generations so far, by schedule in their order: path, chunks of the stream, figures of all runs."""
    found: dict[str, dict[str, Any]] = {}
    for path, body, text in page.evaluate("Promise.all(window.answers)"):
        request = json.loads(body)
        entry = found.setdefault(request["skipdecode"]["schedule"], {"path": path, "figures": []})
        if request.get("stream"):
            data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert data[-1] == "[DONE]"
            entry["chunks"] = [json.loads(line) for line in data[:-1]]
            entry["figures"].append(entry["chunks"][-1]["skipdecode"])
        else:
            entry["figures"].append(json.loads(text)["skipdecode"])
    return found


def traced(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokens of a stream, as its trace tells them."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice.get("skipdecode", {}).get("tokens", [])]


def drawn_layers(path: str, num_layers: int, height: float) -> list[int]:
    """The layers of a column of the picture, from the corners of its cells."""
    tops = [int(top) for top in re.findall(r"M\d+ (\d+)", path)]
    return [num_layers - 1 - round(top * num_layers / height) for top in tops]


def serious(page: Page) -> list[str]:
    """What axe-core finds, from serious on."""
    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {n['html']}" for v in found if v["impact"] in ("serious", "critical") for n in v["nodes"]]
