"""Chromium without a screen, as these tests look at pages."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import JavascriptException, TimeoutException
from selenium.webdriver.chrome.service import Service
from urllib3.exceptions import ReadTimeoutError

REQUIRED = "ELASTICTRAIN_REQUIRE_BROWSER"  # set: tests fail where there is no Chromium
SCREENSHOTS = "ELASTICTRAIN_SCREENSHOTS"  # set: a folder where pictures for the docs go
PATIENCE = 200.0

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)

# All elements of a page, also those within others' shadows.
_ALL = """
const within = root => [...root.querySelectorAll('*')].flatMap(
  one => one.shadowRoot ? [one, ...within(one.shadowRoot)] : [one]);
const all = within(document);
"""


class Page:
    """A window on an address."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, address: str) -> None:
        self._driver.get("about:blank")  # else another tab of the same page would keep what it has
        self._driver.get(address)

    def ask(self, script: str) -> Any:
        """What a script returns, in which ``all`` is every element of the page, and ``within(one)`` those in another."""
        return self._driver.execute_script(_ALL + script)

    def wait_for(self, script: str, is_right: Callable[[Any], Any]) -> Any:
        """What a script returns once that is right."""
        deadline = time.monotonic() + PATIENCE
        found: Any = None
        while True:
            try:
                found = self.ask(script)
                if is_right(found):
                    return found
            except (JavascriptException, TimeoutException, ReadTimeoutError) as error:  # it is still being built
                found = error
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    def errors(self) -> list[str]:
        """What the page has complained of since the last call."""
        return [line["message"] for line in self._driver.get_log("browser") if line["level"] == "SEVERE"]

    def screenshot(self, name: str, *, width: int = 10_000, height: int = 10_000) -> None:
        """Keep the window, or its upper left part, for the docs, where that is asked for."""
        folder = os.environ.get(SCREENSHOTS)
        if not folder:
            return
        hide = "one => { one.style.visibility = 'hidden'; }"  # the path of the run on this machine
        self.ask(f"all.filter(one => one.localName === 'tf-wbr-string').forEach({hide});")
        window = Image.open(io.BytesIO(self._driver.get_screenshot_as_png())).convert("RGB")
        window = window.crop((0, 0, min(width, window.width), min(height, window.height)))
        Path(folder).mkdir(parents=True, exist_ok=True)
        window.quantize(255, dither=Image.Dither.NONE).save(Path(folder) / f"{name}.png", optimize=True)


@contextmanager
def chromium(folder: Path, *, width: int = 1500, height: int = 1000) -> Iterator[Page]:
    """A browser with nothing of any other in it.

    Raises:
        pytest.skip.Exception: there is none here; it is a failure where it is required.
    """
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "chromium" if browser is None else "chromedriver"
        reason = f"{missing} is not installed: `make browser` as root, on Debian, installs it"
        pytest.fail(reason) if os.environ.get(REQUIRED) else pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*_OPTIONS, f"--window-size={width},{height}", f"--user-data-dir={folder / 'chromium'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    window.set_page_load_timeout(PATIENCE)
    try:
        yield Page(window)
    finally:
        window.quit()
