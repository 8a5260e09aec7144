"""What documents point to is there: links, headings, files; no document or script is left out of its index.

All pages together stay as short as CONTRIBUTING.md promises.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = "bench|client|common|compose|docs|examples|native|requirements|services|sim|src|tests"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "docs/*", "bench", "bench/*", "examples/*")
    for page in ROOT.glob(f"{folder}/*.md")
)
CODE = sorted(
    file.relative_to(ROOT).as_posix()
    for room in ROOMS.split("|")
    for file in (ROOT / room).rglob("*")
    if file.suffix in (".py", ".toml", ".hpp", ".cpp", ".yaml") and file.is_file()
)
WORDS = 40_000
"""Most words of README.md, CONTRIBUTING.md and docs/ together, as `wc -w` counts them."""
GENERATED = {"docs/http_fields.md"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w/.-])(?:{ROOMS})/[\w/.-]*\w")
NAMED_IN_CODE = re.compile(r"(?<![\w/.-])(?:bench|docs)/[\w/-]+\.(?:py|md)\b")


def prose(page: str) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page.relative_to(ROOT).as_posix()), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)) for title in titles)
    return {each.strip().lower().replace(" ", "-") for each in words}


def exists(path: str) -> bool:
    return (ROOT / path).exists() or bool(list(ROOT.glob(f"{path}.*")))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page):
    assert not [path for path in PATH.findall((ROOT / page).read_text()) if not exists(path)]


def test_every_document_and_script_that_code_names_exists():
    named = [(file, path) for file in CODE for path in NAMED_IN_CODE.findall((ROOT / file).read_text())]
    assert named
    assert not [(file, path) for file, path in named if not (ROOT / path).exists()]


def test_the_indexes_name_every_document_and_script():
    documents, scripts = (ROOT / "docs" / "README.md").read_text(), (ROOT / "bench" / "README.md").read_text()
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).as_posix() for page in docs.rglob("*.md") if page.name != "README.md"]
    files = [file for file in (ROOT / "bench").glob("*/*.py") if file.parent.name != "lib"]
    assert pages
    assert files
    assert not [page for page in pages if f"({page})" not in documents]
    assert not [file.name for file in files if file.name not in scripts]


def test_all_pages_together_keep_the_promised_bound():
    own = {page for page in PAGES if page.startswith("docs/")} | {"README.md", "CONTRIBUTING.md"}
    words = {page: len((ROOT / page).read_text().split()) for page in own - GENERATED}
    largest = sorted(words.items(), key=lambda each: -each[1])[:8]
    total = sum(words.values())
    assert f"at most {WORDS:,} words" in " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert total <= WORDS, f"{total:,} words: delete what is said twice, first in {largest}"
