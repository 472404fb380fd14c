"""A real browser without a window, driven by its own protocol over a pair of pipes: no package is needed for it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-extensions", "--disable-sync", "--hide-scrollbars"),
)
PATIENCE = 60.0

Message = dict[str, Any]


def find() -> str | None:
    """The browser that is installed here, if one is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the numbers that the browser knows its own by."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Browser:
    """A browser with one tab; what it tells unasked is kept in `events`."""

    def __init__(self, program: str, profile: Path) -> None:
        (reading, self._out), (self._in, writing) = _pipe(), _pipe()
        command = f'exec "$0" "$@" 3<&{reading} 4>&{writing}'
        arguments = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *arguments],
            pass_fds=(reading, writing),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reading)
        os.close(writing)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[Message] = []

    def __enter__(self) -> Browser:
        try:
            self._attach()
        except BaseException:
            self._end()
            raise
        return self

    def _attach(self) -> None:
        tab = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: object) -> Message:
        """Call a method of the protocol and return its result."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def _next(self) -> Message:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def open(
        self, path: Path, fragment: str = "", *, width: int = 1280, height: int = 900, scripts: bool = True
    ) -> None:
        """Show a file, and wait until it is loaded; what was told of the one before is forgotten."""
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Page.navigate", url="about:blank")
        self._wait("Page.loadEventFired")
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri() + fragment)
        self._wait("Page.loadEventFired")

    def _wait(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())
        self.events[:] = [event for event in self.events if event.get("method") != method]

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def told(self, method: str) -> list[Message]:
        """What was told under this name since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def emulate(self, *, dark: bool) -> None:
        """Prefer dark colours, or light ones."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is to be seen as a PNG."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start the browser that is installed, and end it."""
    program = find()
    assert program is not None, "no Chromium or Chrome is installed"
    with Browser(program, profile) as browser:
        yield browser
