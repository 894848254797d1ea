"""Headless Chromium: what a page becomes in a browser, without a network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
"""The browser; None: there is none."""

_LOOK = """<script>
window.addEventListener("load", () => {
const texts = [...document.querySelectorAll("svg.tk")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
      box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);
});
const svg = document.querySelector("svg.tk rect");
parent.postMessage(JSON.stringify({
  background: getComputedStyle(document.body).backgroundColor,
  plot: svg ? getComputedStyle(svg).fill : null,
  ink: getComputedStyle(document.body).color,
  page_width: document.documentElement.scrollWidth,
  window_width: window.innerWidth,
  texts_outside: texts,
  tables_that_scroll: [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length,
  plots: document.querySelectorAll("svg.tk").length,
  plot_widths: [...document.querySelectorAll("svg.tk")].map(svg => Math.round(svg.getBoundingClientRect().width)),
  requests: performance.getEntriesByType("resource").map(one => one.name).filter(name => !name.startsWith("data:")),
}), "*");
});
</script>"""

# No window of Chromium is narrower than 500 pixels, whatever it is asked for. A frame in it may be, like a phone.
_FRAME = """<!doctype html><body style="margin:0"><script>
window.addEventListener("message", message => {
const seen = document.createElement("pre");
seen.id = "seen";
seen.textContent = message.data;
document.body.append(seen);
});
</script><iframe src="%s" style="border:0;width:%dpx;height:2000px"></iframe></body>"""


@dataclass(frozen=True)
class Seen:
    """A page in the browser."""

    facts: dict[str, Any]
    """Facts that a script found in the page."""
    console: list[str]
    """Messages of the console."""


def look_at(page: Path, folder: Path, *, is_dark: bool = False, width: int = 1000) -> Seen:
    """Open a page, `width` pixels wide, and look at it. A script is added to a copy of it; the page itself has none."""
    copy = folder / f"look-{is_dark}-{width}.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_LOOK}</body>"), encoding="utf-8")
    frame = folder / f"frame-{is_dark}-{width}.html"
    frame.write_text(_FRAME % (copy.name, width), encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(width, 500)},2000", f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        "--enable-logging=stderr", "--virtual-time-budget=1000", "--dump-dom", f"file://{frame}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    facts = json.loads(html.unescape(seen))
    assert facts["window_width"] == width, "the page was laid out for another width"
    return Seen(facts, console)
