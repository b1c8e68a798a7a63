"""Keeps the pages true: what they name exists, and what exists is named."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from service.store import list_models

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        *(f"{folder}/**/*.md" for folder in ("docs", "load_tests", "model_store", "tests", "training")),
    )
    for path in ROOT.glob(pattern)
)


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_generated_pages_are_fresh() -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)", text)
    missing = [link for link in links if "://" not in link and not (page.parent / unquote(link)).exists()]
    assert missing == []


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    decisions = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
    assert decisions
    assert [page.name for page in decisions if page.name not in listed] == []


def test_architecture_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {f"service/{path.name}" for path in (ROOT / "service").glob("[!_]*.py")}
    assert sorted(room for room in rooms if f"`{room}`" not in page) == []
    named = re.findall(r"`(service/\w+\.py)`", page)
    assert sorted(room for room in named if not (ROOT / room).is_file()) == []


def plain(text: str) -> str:
    """Letters and digits alone, without case: SST-2 and sst2 are one name."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_the_notice_names_what_each_version_is_made_from() -> None:
    notice = plain((ROOT / "NOTICE").read_text(encoding="utf-8"))
    listings = list_models(ROOT / "model_store")
    assert listings
    for listing in listings:
        assert listing.manifest is not None, listing.problem
        sources = [listing.manifest.base_model, *listing.manifest.training_data]
        missing = [source.name for source in sources if plain(source.name) not in notice]
        assert missing == [], f"{listing.name} {listing.version}"


def test_readme_and_makefile_agree() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z]+)\b`", page.read_text(encoding="utf-8")))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_settings_named_in_the_pages_exist() -> None:
    known = set(
        re.findall(
            r"^#?\s*(VALENCE_[A-Z_]+)=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert known
    for page in PAGES:
        named = set(re.findall(r"\bVALENCE_[A-Z_]+[A-Z]\b", page.read_text(encoding="utf-8")))
        assert named <= known | {"VALENCE_DATA"}, page_name(page)
