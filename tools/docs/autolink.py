"""Names that the site has a page for become links to it, wherever a document writes them as code.

Documents write `model.softcap`, `speedrun race`, `record-18` or `data/loader.py` and need no links
for it, which a forge could not follow: the pages they lead to exist on the site alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

from tools.docs.links import from_page

# What is code already inside of a link, a heading or a block of code stays as it is.
PIECES = re.compile(r"(<(a|pre|h[1-6])\b.*?</\2>)|<code>([^<]+)</code>", re.DOTALL)


def linked(content: str, page: str, explained: Mapping[str, str]) -> str:
    """The HTML of a page with the first mention of each name turned into a link.

    `explained` has the place of each name on the site; `page` is the place of this page.
    """
    seen: set[str] = set()

    def replaced(match: re.Match[str]) -> str:
        name = html.unescape(match[3] or "")
        place = explained.get(name)
        if place is None or name in seen or place.partition("#")[0] == page:
            return match.group()
        seen.add(name)
        file, _, anchor = place.partition("#")
        address = from_page(file, page).removesuffix(".md") + ".html"
        address += f"#{anchor}" if anchor else ""
        return f'<a class="explained" href="{address}">{match.group()}</a>'

    return PIECES.sub(replaced, content)
