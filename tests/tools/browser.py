"""A headless Chromium, driven over loopback by its own driver's protocol (W3C WebDriver): no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def missing() -> str:
    """Why there is no browser to test with; empty if there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver" if absent else ""


class Browser:
    def __init__(self, address: str, session: str) -> None:
        self.address, self.session = address, session
        self.width, self.dark = 1280, False

    def call(self, method: str, path: str, **body: Any) -> Any:
        return _call(f"{self.address}/session/{self.session}{path}", method, body)

    def open(self, path: Path) -> None:
        self.call("POST", "/url", url=path.resolve().as_uri())

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page itself, which a window cannot have below 500 pixels, and the colours of the system."""
        self.width, self.dark = width, dark
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def devtools(self, command: str, **params: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=params)

    def run(self, script: str, *args: Any) -> Any:
        return self.call("POST", "/execute/sync", script=script, args=list(args))

    def hover(self, selector: str, x: float, y: float, index: int = 0) -> None:
        """Move the pointer to a place of an element, in shares of its size."""
        box = self.run(
            "const e = document.querySelectorAll(arguments[0])[arguments[1]]; e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
            index,
        )
        place = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.devtools("Input.dispatchMouseEvent", type="mouseMoved", **place)

    def click(self, selector: str, index: int = 0) -> None:
        self.run("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, index)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        found: list[str] = self.run(script, selector)
        return found

    def problems(self) -> list[str]:
        """Everything that the console has been told since the last call."""
        return [entry["message"] for entry in self.call("POST", "/se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        """Of the whole page, however long."""
        height = self.run("scrollTo(0, 0); return document.documentElement.scrollHeight")
        self.resize(self.width, height, dark=self.dark)
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A fresh browser, which ends with the block."""
    log = profile.with_suffix(".log")
    with log.open("w") as out:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{_port(log, driver)}"
            options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            started = _call(f"{address}/session", "POST", {"capabilities": {"alwaysMatch": wanted}})
            process = started["capabilities"].get("goog:processID")
            browser = Browser(address, started["sessionId"])
            try:
                yield browser
            finally:
                try:
                    browser.call("DELETE", "")  # ends the browser, too
                except (RuntimeError, OSError):  # it hangs
                    if process:
                        os.kill(process, signal.SIGKILL)
        finally:
            driver.terminate()
            driver.wait(timeout=10)


def _port(log: Path, driver: subprocess.Popen[bytes], seconds: float = 20.0) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end and driver.poll() is None:
        for line in log.read_text().splitlines():
            if "started successfully on port" in line:
                return int(line.rsplit(" ", 1)[1].rstrip("."))
        time.sleep(0.05)
    raise RuntimeError(f"chromedriver did not start: {log.read_text()}")


def _call(url: str, method: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode() if method == "POST" else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with DIRECT.open(request, timeout=20) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error
