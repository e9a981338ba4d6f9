"""Look at pages of runs in a headless browser: python -m bench.pages --out DIR RUN/report.html [...] [--axe axe.min.js]

Takes screenshots at 1280 and 390 pixels, light and dark. Checks each page: nothing is wider than the window, there
is no error in the console and no network request, the file is below 1 MB; and with --axe (npm install axe-core), there
is no serious fault of accessibility. The exit code is 1 if a check fails. Needs Chromium, which is controlled through a
pipe (the DevTools protocol).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
LARGEST = 1_000_000  # bytes of a page
TALLEST = 16_000  # pixels of a screenshot
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The elements that are wider than the window, unless they scroll by themselves.
OVERFLOW = """(() => {
  const wide = document.documentElement.clientWidth, found = [];
  const scrolls = e => e && (/(auto|scroll|hidden)/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (box.right > wide + 1 && box.width && !e.closest('svg svg, svg *') && !scrolls(e.parentElement))
      found.push(e.tagName + ' ' + (e.textContent || '').trim().slice(0, 40) + ' ' + Math.round(box.right));
  }
  return {page: document.documentElement.scrollWidth > wide, found: found.slice(0, 5)};
})()"""
AXE = """axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(
  v => [v.impact, v.id, v.nodes.length, v.nodes[0].html.slice(0, 120), v.nodes[0].failureSummary.slice(0, 300)]))"""


class Browser:
    """A tab of a headless Chromium, and the events that it has sent."""

    def __init__(self, send: Any, receive: Any) -> None:
        self.to, self.source, self.number, self.session = send, receive, 0, ""
        self.events: list[dict[str, Any]] = []
        self.read = b""  # of messages that are not complete
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result. Raises RuntimeError if it fails."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        self.to.write(json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        self.to.flush()
        while (answer := self._next()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.read:
            piece = os.read(self.source.fileno(), 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self.read += piece
        text, _, self.read = self.read.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        if "method" in found:
            self.events.append(found)
        return found

    def open(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        self.events.clear()
        self("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def complaints(self, address: str) -> Iterator[str]:
        """Yield the errors in the console, and the requests, except for the page itself."""
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                yield f"exception: {params['exceptionDetails']['text']}"
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                yield f"console: {params['args'][:1]}"
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                yield f"console: {params['entry']['text']}"
            if event["method"] == "Network.requestWillBeSent":
                wanted = params["request"]["url"]
                if wanted != address and not wanted.startswith("data:"):
                    yield f"request: {wanted[:100]}"


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium, and end it after the `with` block."""
    program = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if program is None:
        raise SystemExit(f"bench.pages needs one of {', '.join(CHROMIUM)}")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads from file 3 and writes to file 4.
    words = f"exec 3<&{theirs_in} 4>&{theirs_out}; exec \"$0\" \"$@\""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage"]  # fmt: skip
        process = subprocess.Popen(["bash", "-c", words, program, *flags], pass_fds=(theirs_in, theirs_out),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        with open(ours_out, "wb") as send, open(ours_in, "rb") as receive:
            try:
                yield Browser(send, receive)
            finally:
                process.terminate()
                process.wait(20)


def look(tab: Browser, page: Path, out: Path, axe: str) -> list[str]:
    """Take the screenshots of a page; return what is wrong with it."""
    wrong = [f"{page.stat().st_size:,} bytes"] if page.stat().st_size > LARGEST else []
    address = page.resolve().as_uri()
    for width in WIDTHS:
        for scheme in SCHEMES:
            where = f"{width} {scheme}"
            tab("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
            tab("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            tab.open(address)
            found = tab.evaluate(OVERFLOW)
            if found["page"] or found["found"]:
                wrong.append(f"{where}: wider than the window: {found}")
            wrong += [f"{where}: {each}" for each in tab.complaints(address)]
            height = min(TALLEST, tab.evaluate("document.documentElement.scrollHeight"))
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            shot = tab("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
            name = f"{page.parent.name}-{page.stem}-{width}-{scheme}.png"
            (out / name).write_bytes(base64.b64decode(shot["data"]))
            if axe:
                tab.evaluate(f"{axe};0")
                wrong += [f"{where}: axe: {fault}" for fault in tab.evaluate(AXE)
                          if fault[0] in ("serious", "critical")]  # fmt: skip
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the screenshots")
    parser.add_argument("--axe", type=Path, help="axe.min.js")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    axe, bad = given.axe.read_text() if given.axe else "", 0
    with browser() as tab:
        for page in given.pages:
            wrong = look(tab, page, given.out, axe)
            bad += bool(wrong)
            print(f"{page}: {'; '.join(wrong) or 'good'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
