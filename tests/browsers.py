"""Headless Chromium. Without a browser its tests fail unless LOCKSTEP_WITHOUT_BROWSER is set."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(
    bool(os.environ.get("LOCKSTEP_WITHOUT_BROWSER")), reason="LOCKSTEP_WITHOUT_BROWSER is set"
)
QUIET = (
    "--no-first-run --disable-background-networking --disable-component-update --disable-sync"
    " --disable-quic"
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", *QUIET.split()]
START_MS = 180_000
"""How long Chromium may take to start where cores and disk are busy."""


@contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """Start a browser with a new profile. `options` are Chromium's."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        pytest.fail(
            "there is no chromium: make browser, or set LOCKSTEP_WITHOUT_BROWSER=1 to do without"
            " these tests"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=[*ARGUMENTS, *options], timeout=START_MS
        )
        yield browser
        browser.close()
