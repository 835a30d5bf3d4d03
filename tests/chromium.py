"""A headless Chromium that is told what to do through a pipe, without a driver or a package for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One browser with one page; see https://chromedevtools.github.io/devtools-protocol/."""

    def __init__(self, folder: Path) -> None:
        assert BINARY is not None
        ours, theirs = os.pipe(), os.pipe()  # what it writes, what it reads

        def as_3_and_4() -> None:
            # The two are moved out of the way first: either may be 3 or 4 already.
            reads, writes = os.dup(theirs[0]), os.dup(ours[1])
            while reads in (3, 4):
                reads = os.dup(reads)
            while writes in (3, 4):
                writes = os.dup(writes)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [
                BINARY,
                "--headless=new",
                "--no-sandbox",  # as root in a container it cannot make one
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            preexec_fn=as_3_and_4,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[1])
        os.close(theirs[0])
        self._reads = os.fdopen(ours[0], "rb", buffering=0)
        self._writes = os.fdopen(theirs[1], "wb", buffering=0)
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        """Everything that the browser told of without being asked."""
        (target,) = (t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writes.close()
        self._reads.close()
        self._process.kill()
        self._process.wait()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the page."""
        return self._ask(method, self._session, **params)

    def show(self, page: Path, *, width: int, scheme: str) -> None:
        """Load a file in a window of that width, in a light or dark scheme."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, target: Path) -> None:
        """The whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        target.write_bytes(base64.b64decode(data))

    def _ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._writes.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._reads.read(1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
