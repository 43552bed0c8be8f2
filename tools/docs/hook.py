"""What `mkdocs build` is told beside the pages of docs/: pages made of other files and of the code.

mkdocs calls `on_files` once and `on_page_markdown` for every page. All that can be said without
mkdocs is said by the functions next to this file, which tests call by themselves.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.docs import code, links, places

ROOT = Path(__file__).parents[2]
GENERATED: set[str] = set()  # places of pages whose links are the site's own already


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents at the root, the source files that documents link to, and the icon."""
    GENERATED.clear()
    documents = {
        f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()
    }
    for name in places.AT_ROOT:
        if (ROOT / name).is_file():
            documents[name] = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=documents[name]))
    pages = {
        "results/index.md": code.folder_page(ROOT / "docs" / "results"),
        **code.pages_linked(documents, ROOT),
    }
    for place, text in pages.items():
        GENERATED.add(place)
        files.append(File.generated(config, place, content=text))
    icon = ROOT / "speedrun" / "serve" / "page" / "icon.svg"
    files.append(File.generated(config, "icon.svg", abs_src_path=str(icon)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn the links of a document into links of the site."""
    place = page.file.src_uri
    if place in GENERATED:
        return markdown
    document = place if place in places.AT_ROOT else f"docs/{place}"
    return links.rewrite(markdown, lambda link: places.followed(link, document, ROOT))
