"""README, documentation and schema say what the code says, and the site builds and stands alone."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
"""A tag that makes a browser load something from elsewhere."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_generated_parts_are_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["docs/generate.py", "--check"])
    status = runpy.run_path(str(ROOT / "docs" / "generate.py"))["main"]()
    assert status == 0, capsys.readouterr().out


def test_picture_of_the_readme_is_there() -> None:
    assert (ROOT / "docs" / "assets" / "report.png").stat().st_size > 10_000


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / link).exists(), link


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built strictly: a dead link, an anchor that is gone or a page that no menu names fails."""
    folder = tmp_path_factory.mktemp("site")
    result = python("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.glob("**/*.html"))
    assert len(pages) > 20
    for page in pages:
        found = [tag for tag in LOADED.findall(page.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag]
        assert found == [], f"{page.relative_to(site)}: {found}"


def test_a_tag_that_loads_from_elsewhere_is_found() -> None:
    for tag in (
        '<script src="https://cdn.example/x.js">',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        "<img src=http://a.example/b>",
    ):
        assert LOADED.search(tag)
    assert not LOADED.search('<a href="https://arxiv.org/abs/1503.02531"><img src="report.png"></a>')
