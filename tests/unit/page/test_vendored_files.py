"""The page's files of others are those listed in VENDOR.md, and the page loads nothing from other hosts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[3] / "testbed" / "page" / "static"
VENDOR = STATIC / "vendor"
ROW = re.compile(
    r"^\| (\S+) \| (\S+) \| \d+\.\d+\.\d+ \| `[^`]+` \| (?:MIT|ISC) \| `([0-9a-f]{64})` \|$", re.M
)


def test_vendored_files_have_the_hashes_that_stand_beside_their_versions() -> None:
    listed = {name: digest for name, _, digest in ROW.findall((VENDOR / "VENDOR.md").read_text())}
    there = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css", ".json")}
    assert set(listed) == there
    assert {name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in there} == listed


def test_vendored_packages_have_their_licences_beside_them() -> None:
    packages = {package for _, package, _ in ROW.findall((VENDOR / "VENDOR.md").read_text())}
    for package in packages:
        assert "Copyright" in (VENDOR / f"{package}.LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted([*STATIC.glob("*.*"), *STATIC.glob("js/*.js")]), ids=lambda p: p.name)
def test_page_files_name_no_other_host_and_read_no_text_as_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
    )


@pytest.mark.parametrize("path", sorted(STATIC.glob("js/*.js")), ids=lambda p: p.name)
def test_page_modules_have_the_form_that_a_report_can_hold(path: Path) -> None:
    """Every import is one line that lists the imported names; every export has a name."""
    text = path.read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith("import ")]
    assert all(re.fullmatch(r"import \{ [\w, ]+ \} from '\./\w+\.js';", line) for line in imports), imports
    assert not re.search(r"^export (default|\{|\*|let|var)", text, re.M)
