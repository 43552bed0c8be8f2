"""What `mkdocs build` is told beside the pages of docs/: pages made of other files and of the code.

mkdocs calls `on_files` once, then the other two for every page. All that can be said without
mkdocs is said by the functions next to this file, which tests call by themselves.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs import autolink, code, links, lists, places, reference

ROOT = Path(__file__).parents[2]
# Who searches for a word wants its meaning first, and last what was measured about it.
SEARCHED = {
    reference.KEYS: 2, reference.VERBS: 2, "kernels.md": 0.5, "CLAIMS.md": 0.5, "LOG.md": 0.25,
}  # fmt: skip
SOURCES: dict[str, str] = {}  # places of the source files that documents name
GENERATED: set[str] = set()  # places of pages whose links are the site's own already


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the documents at the root, sources that documents link to, the icon."""
    GENERATED.clear()
    documents = {
        f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()
    }
    for name in places.AT_ROOT:
        if (ROOT / name).is_file():
            documents[name] = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=documents[name]))
    SOURCES.clear()
    SOURCES.update(code.mentions(documents, ROOT))
    pages = {
        "results/index.md": code.folder_page(ROOT / "docs" / "results"),
        **code.pages_named(documents, ROOT),
        **reference.pages(),
    }
    for place, text in pages.items():
        GENERATED.add(place)
        files.append(File.generated(config, place, content=text))
    icon = ROOT / "speedrun" / "serve" / "page" / "icon.svg"
    files.append(File.generated(config, "icon.svg", abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn what a forge reads into what the site does, and weigh the page in searches."""
    place = page.file.src_uri
    source = place.startswith("code/")
    page.meta["search"] = {"exclude": True} if source else {"boost": SEARCHED.get(place, 1)}
    if place in GENERATED:
        return markdown
    document = place if place in places.AT_ROOT else f"docs/{place}"
    markdown = lists.spaced(markdown)
    return links.rewrite(markdown, lambda link: places.followed(link, document, ROOT))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Link names to where the reference explains them, and sources to their text."""
    return autolink.linked(html, page.file.src_uri, {**SOURCES, **reference.explained()})
