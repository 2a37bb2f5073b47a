"""The pages in docs/ideas work: their Python runs, page by page, prints what they say, and draws their pictures."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.support.fresh import run_python

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "ideas"
PICTURES = ROOT / "docs" / "images" / "ideas"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
SLOW = {"bert": pytest.mark.slow}  # it pretrains one
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def chunks_of(page: str, kind: str) -> list[str]:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    return [block for found, block in BLOCK.findall(text) if found == kind]


@pytest.mark.parametrize("page", [pytest.param(page, marks=SLOW.get(page, ())) for page in PAGES])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    done = run_python("\n".join(chunks_of(page, "python")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(chunks_of(page, "text"))
    drawn = [path.name for path in tmp_path.iterdir()]
    assert drawn == [f"{page}.png"]
    with Image.open(tmp_path / drawn[0]) as new, Image.open(PICTURES / drawn[0]) as kept:
        assert new.size == kept.size


def test_each_idea_has_its_page_and_its_picture() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+)\.md\)", index)) == PAGES
    assert sorted(path.name for path in PICTURES.iterdir()) == [f"{page}.png" for page in PAGES]
    for page in PAGES:
        assert (PICTURES / f"{page}.png").stat().st_size < 100_000
        assert f"](../images/ideas/{page}.png)" in (FOLDER / f"{page}.md").read_text(encoding="utf-8")
        assert "https://arxiv.org/abs/" in (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        assert links
        assert not [link for link in links if "://" not in link and not (FOLDER / link).exists()]
