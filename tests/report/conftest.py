"""A headless browser for the tests that look at a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.browser import CHROMIUM, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("NOT TESTED: the page in a browser, since there is no Chromium here")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
