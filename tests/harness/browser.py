"""Control Chromium without a window, through two pipes, with its DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from itertools import count

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One page of one browser, `width` x `height` pixels; `folder` takes the browser's profile. A context manager."""

    def __init__(self, folder, width=1200, height=900):
        self._numbers = count(1)
        self.errors = []
        """what the page's scripts said went wrong"""
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, str(theirs_in), str(theirs_out), CHROMIUM, "--headless"),
                *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, ours_in
        self._rest = b""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Runtime.enable")
        self.ask("Page.enable")
        self.ask("Network.enable")
        self.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def open(self, path):
        """Load a file, and wait until it has run its scripts."""
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while self.value("document.readyState + location.protocol") != "completefile:":
            pass

    def value(self, expression):
        """What a JavaScript expression gives."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind, x, y, **more):
        """`mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel` at a place of the page."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x, y):
        """With the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key):
        """A key by its name, such as `ArrowLeft` or `+`."""
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self):
        """PNG of what is to be seen."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def printed(self):
        """PDF of the page as it prints."""
        return base64.b64decode(self.ask("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def ask(self, method, **words):
        """A command of the protocol to the page; returns its result."""
        return self._ask(method, self._session, **words)

    def _ask(self, method, session=None, **words):
        message = {"id": next(self._numbers), "method": method, "params": words}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _pipe():
    """Both ends beyond the numbers 3 and 4, which the browser's own ends get."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved
