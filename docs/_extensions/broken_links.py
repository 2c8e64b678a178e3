"""Warns of links of the built pages that lead to no file or to no place in one, and adapts those
of files that lie outside of docs and are included by a page.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


class Links(HTMLParser):
    """Collects the places of a page and what it links to."""

    def __init__(self, text: str):
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            if name in ("href", "src") and value:
                self.links.add(value)


def warn_of_broken_links(app: Sphinx, exception: Exception | None) -> None:
    """Look at every link from one built page to another."""
    if exception is not None or app.builder.format != "html":
        return
    site = Path(app.outdir).resolve()
    html = [path for path in sorted(site.rglob("*.html")) if site / "_static" not in path.parents]
    pages = {path: Links(path.read_text()) for path in html}
    for page, found in pages.items():
        name = page.relative_to(site)
        for link in sorted(found.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = unquote(parts.fragment)
            if not target.exists():
                logger.warning("%s links to %s, which is not there", name, link)
                continue
            # Listings of source code lead back by a name that need not be the one documented.
            is_checked = place and target in pages and site / "_modules" not in page.parents
            if is_checked and place not in pages[target].places:
                logger.warning("%s links to %s, which has no such place", name, link)


def move_links(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    """Rewrite links of an included Markdown file of the repository to be relative to docs."""
    if path.suffix == ".md":
        content[0] = re.sub(
            r"\]\((?!\w+:|#)(?:docs/)?",
            lambda link: "](" if link[0].endswith("docs/") else "](../",
            content[0],
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", warn_of_broken_links)
    app.connect("include-read", move_links)
    return {"parallel_read_safe": True}
