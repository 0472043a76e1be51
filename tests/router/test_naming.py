"""Names of prompts, whole and growing."""

from __future__ import annotations

from kvrelay.identity import name_pages, root_name
from kvrelay.router.naming import Naming
from kvrelay.types import PageName
from tests.fleet.values import fingerprint

PAGE = fingerprint().format.page_tokens
ROOT, KIND = root_name(fingerprint(), salt="a"), PageName(b"k" * 16)
IDS = list(range(5 * PAGE + 3))


def naming() -> Naming:
    return Naming(lambda: {KIND: (ROOT, PAGE)}, context_tokens=len(IDS))


def test_prompts_are_named_as_engines_name_them() -> None:
    assert naming().of([IDS, IDS[:PAGE]]) == (
        {KIND: tuple(name_pages(ROOT, IDS, PAGE))},
        {KIND: tuple(name_pages(ROOT, IDS[:PAGE], PAGE))},
    )


def test_prompts_that_engines_refuse_have_no_names() -> None:
    assert naming().of([[*IDS, 1]]) == naming().of([]) == ()


def test_a_text_that_grows_has_the_names_of_its_full_pages() -> None:
    growing, whole = naming().growing(), name_pages(ROOT, IDS, PAGE)
    for tokens in (3, PAGE, PAGE + 1, 4 * PAGE - 1, len(IDS)):
        assert growing.of(IDS[:tokens]) == {KIND: tuple(whole[: tokens // PAGE])}


def test_a_page_that_has_its_name_is_not_read_again() -> None:
    growing = naming().growing()
    growing.of(IDS[: 2 * PAGE])
    changed = [0] * (2 * PAGE) + IDS[2 * PAGE :]
    assert growing.of(changed) == {KIND: tuple(name_pages(ROOT, IDS, PAGE)[:5])}


def test_a_kind_of_worker_that_comes_later_is_named_from_the_beginning() -> None:
    roots = {KIND: (ROOT, PAGE)}
    growing = Naming(lambda: roots, len(IDS)).growing()
    growing.of(IDS)
    later, root = PageName(b"l" * 16), root_name(fingerprint(), salt="b")
    roots[later] = (root, PAGE)
    assert growing.of(IDS)[later] == tuple(name_pages(root, IDS, PAGE)[:5])
