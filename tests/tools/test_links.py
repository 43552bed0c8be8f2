"""Links of documents, as the site follows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT
from tools.docs import code, links, lists, places


@pytest.mark.parametrize(
    ("link", "document", "expected"),
    [
        ("LOG.md#muon", "docs/CLAIMS.md", "LOG.md#muon"),
        ("docs/muon.md", "CONTRIBUTING.md", "muon.md"),
        ("../CONTRIBUTING.md", "docs/index.md", "CONTRIBUTING.md"),
        ("../README.md", "docs/using.md", "index.md"),
        ("results", "docs/CLAIMS.md", "results/index.md"),
        ("results/race-muon-18.json", "docs/CLAIMS.md", "results/race-muon-18.json"),
        ("../speedrun/cli/use.py", "docs/index.md", "code/speedrun/cli/use.py.md"),
        (
            "../speedrun/cli/use.py#L12",
            "docs/a.md",
            "code/speedrun/cli/use.py.md#__codelineno-0-12",
        ),
        ("../speedrun/no.py", "docs/index.md", "../speedrun/no.py"),
    ],
)
def test_a_link_of_a_document_on_the_site(link: str, document: str, expected: str) -> None:
    assert places.followed(link, document, ROOT) == expected


def test_links_in_code_and_to_other_sites_stay() -> None:
    text = "[a](b.md) [c](https://x.y) [d](#e)\n```\n[a](b.md)\n```\n![p](q.svg)"
    changed = links.rewrite(text, lambda link: f"new/{link}")
    assert changed == (
        "[a](new/b.md) [c](https://x.y) [d](#e)\n```\n[a](b.md)\n```\n![p](new/q.svg)"
    )
    assert links.targets(text) == ["b.md", "q.svg"]


def test_sources_that_documents_link_to_are_pages() -> None:
    documents = {"docs/a.md": "[f](../speedrun/cli/use.py#L3) [g](b.md)"}
    [(place, text)] = code.pages_named(documents, ROOT).items()
    assert place == "code/speedrun/cli/use.py.md"
    assert (ROOT / "speedrun/cli/use.py").read_text() in text
    assert "linenums=1" in text


def test_sources_that_documents_name_are_pages() -> None:
    text = "`gpt.py`, `model/gpt.py: GPT.forward`, `model/gpt.py: nothing`, `loader.py`, `no.py`"
    named = code.mentions({"docs/a.md": text}, ROOT)
    place, lines = "code/speedrun/model/gpt.py.md", (ROOT / "speedrun/model/gpt.py").read_text()
    *_, forward = [
        number
        for number, line in enumerate(lines.splitlines(), start=1)
        if line.startswith("    def forward(")
    ]
    assert named == {
        "gpt.py": place,
        "model/gpt.py: GPT.forward": f"{place}#__codelineno-0-{forward}",
        "model/gpt.py: nothing": place,
    }, "of loader.py there are several, of no.py there is none"
    assert list(code.pages_named({"docs/a.md": text}, ROOT)) == [place]


def test_every_link_of_our_documents_has_a_place() -> None:
    for page in PAGES:
        document = page.relative_to(ROOT).as_posix()
        for link in links.targets(page.read_text()):
            path = links.in_repository(link, document)
            assert places.place_of(path, ROOT) is not None, f"{document}: {link}"


def test_a_folder_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    assert "- [a.json](a.json)" in code.folder_page(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A line:\n- one\n  goes on\n- two", "A line:\n\n- one\n  goes on\n- two"),
        ("A line:\n1. one\n2. two", "A line:\n\n1. one\n2. two"),
        ("A line\n\n- one\n- two", "A line\n\n- one\n- two"),
        ("- one\ngoes on\n- two", "- one\ngoes on\n- two"),
        ("# Head\n- one", "# Head\n- one"),
        ("```\na\n- b\n```", "```\na\n- b\n```"),
    ],
)
def test_a_list_may_follow_a_paragraph(text: str, expected: str) -> None:
    assert lists.spaced(text) == expected
