"""A headless Chromium, where there is one: what a page's DOM comes to, and what it looks like."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def chromium() -> str:
    """The browser's program; skips without one. CHROMIUM names another."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here (looked for chromium, chromium-browser, google-chrome; CHROMIUM names another)")
    return found


def dom_of(page: Path, folder: Path) -> str:
    """The DOM once the page is loaded, without a network."""
    return _run(page, folder, "--dump-dom").stdout


def screenshot(page: Path, folder: Path, width: int = 1100, height: int = 1000) -> Path:
    """A picture of the page."""
    picture = folder / "page.png"
    _run(page, folder, f"--screenshot={picture}", f"--window-size={width},{height}", "--hide-scrollbars")
    return picture


def _run(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    quiet = ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, *quiet, *options, page.as_uri()], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done
