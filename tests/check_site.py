"""What ``make site`` checks of the built site: nothing comes from elsewhere, and a browser without a network shows it.

Its name keeps it out of the suite, which builds no site. With CI set, a missing Chromium fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import chromium
import pytest

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))
ASSET = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["'](?P<place>[^"']+)["']"""
)
STYLE = re.compile(r"""url\(\s*["']?(?P<place>[^"')]+)|@import\s+["'](?P<other>[^"']+)""")
NO_NETWORK = (
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
)

needs_chromium = pytest.mark.skipif(
    not chromium.PROGRAM and not os.environ.get("CI"),
    reason="needs Chromium: apt-get install chromium",
)


def test_it_is_built() -> None:
    names = {page.relative_to(SITE).as_posix() for page in PAGES}
    assert {
        "index.html",
        "messages.html",
        "tutorials/fit.html",
        "reference/npu_device.distribute.html",
    } <= names


def test_every_asset_is_there_and_nothing_is_loaded_from_elsewhere() -> None:
    places = [
        (page, match["place"]) for page in PAGES for match in ASSET.finditer(page.read_text())
    ]
    assert len(places) > 100
    for page, place in places:
        if not place.startswith(("data:", "#")):
            assert (page.parent / place.partition("?")[0].partition("#")[0]).exists(), (
                f"{page}: {place}"
            )
    for sheet in SITE.rglob("*.css"):
        places += [
            (sheet, match["place"] or match["other"]) for match in STYLE.finditer(sheet.read_text())
        ]
    assert not [place for place in places if re.match(r"(?:[a-z]+:)?//", place[1])]


@needs_chromium
def test_search_works_without_a_network(tmp_path: Path) -> None:
    flags = (*NO_NETWORK, "--virtual-time-budget=10000", "--dump-dom")
    found = chromium.visit(f"{SITE.as_uri()}/search.html?q=replicate", tmp_path, *flags)
    assert re.search(r'class="search-summary"[^>]*>[^<]*found \d+ page', found), found[-3000:]
    assert "npu_device.distribute.html" in found


@needs_chromium
@pytest.mark.parametrize(
    ("page", "window", "dark"),
    [
        ("index", "1280,900", False),
        ("recipes", "1280,1600", False),
        ("reference/npu_device.distribute", "1280,1600", False),
        ("messages", "1280,1600", True),
        ("tutorials/fit", "390,844", False),
    ],
)
def test_pages_can_be_drawn(page: str, window: str, dark: bool, tmp_path: Path) -> None:
    """The pictures stay in ``build/site_pictures``, to be looked at."""
    folder = SITE.parent / "site_pictures"
    folder.mkdir(exist_ok=True)
    picture = folder / f"{page.replace('/', '_')}.png"
    picture.unlink(missing_ok=True)
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    url = f"{SITE.as_uri()}/{page}.html"
    chromium.draw(url, tmp_path, picture, window, *NO_NETWORK, *flags, "--virtual-time-budget=5000")
