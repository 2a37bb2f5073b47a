"""A headless Chromium, driven over the pipe of its DevTools protocol, which needs no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page in a browser of its own, which notes what the page complains of and asks the network for."""

    def __init__(self, program: str, profile: Path, width: int = 1200, height: int = 900) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._buffer = b""
        # The browser reads commands from its file 3, and writes to its file 4.
        command_end, self._commands = os.pipe()
        self._answers, answer_end = os.pipe()

        def place_pipes() -> None:
            # Copied first, as one may be where the other is to go; and out of the way, since a file that is already
            # where it is to go would be closed in the browser.
            copies = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_end, answer_end)]
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self._process = subprocess.Popen(
            [
                program,
                *options,
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            start_new_session=True,
            preexec_fn=place_pipes,
        )
        os.close(command_end)
        os.close(answer_end)
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command, and gives its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            part = os.read(self._answers, 2**20) if ready else b""
            assert part, "the browser has gone away, or says nothing"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value")) for each in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.errors.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"][:100])

    def open(self, address: str) -> None:
        self.errors.clear()
        self.requests.clear()
        self.send("Page.navigate", url=address)

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, code: str) -> Any:
        """Waits until an expression is true, and gives it."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(code)):
            assert time.monotonic() < end, f"{code} has not come true; errors: {self.errors}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else None
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, selector: str, across: float = 0.5, down: float = 0.5, click: bool = False) -> None:
        """Moves the pointer to a place in an element, and clicks there if told to."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x, b.y, b.width, b.height]; })()"
        )
        place = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def prefer(self, scheme: str) -> None:
        """Prefers the colour scheme `light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path | None = None, whole: bool = True) -> bytes:
        picture = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
        if file is not None:
            file.write_bytes(picture)
        return picture

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
