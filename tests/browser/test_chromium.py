"""Where there is no browser, tests are skipped; where there must be one, they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import chromium


@pytest.mark.parametrize("is_required", [False, True])
def test_without_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_required: bool) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(chromium.REQUIRED, "1" if is_required else "")
    outcome = pytest.fail.Exception if is_required else pytest.skip.Exception
    with pytest.raises(outcome, match="chromium is not installed: `make browser`"), chromium.chromium(tmp_path):
        pass
