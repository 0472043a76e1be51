"""Holds the style that can be counted: small functions, small files, one sentence on top, no broad except."""

from __future__ import annotations

import ast
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvrelay", "docs", "benchmarks", "examples", "requirements")

MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 10
MAX_FILE_LINES = 400

MIN_CLASS_WORDS = 4
FRAGMENTS = frozenset({"Of", "By", "That", "Those", "Whoever"})
"""First words of class docstrings that say whose the class is, and not what it is."""
HALVES = frozenset({"and", "or", "That", "By"})
"""First words of attribute docstrings that only go on with what stands before: a tool tip shows one of them alone."""
POINTING = ("of these",)
"""Words of attribute docstrings that point at something which a tool tip does not show."""
UNNAMED = "Of"
"""First word of attribute docstrings that say whose the value is, and not what it is."""
WITH_UNNAMED = ("store/", "connector/")
"""Folders with such docstrings still. The list only shrinks."""
UNDEFINED = frozenset(
    {
        "store/answers.py: Answers", "store/batch.py: Batch", "store/inbound.py: Inbound", "store/packing.py: Packed",
        "store/segments.py: Columns", "store/transfers.py: Transfer",
    }
)  # fmt: skip
"""Classes whose docstrings do not say yet what they are. The list only shrinks."""

BORDER = "# border:"
"""Marks a broad except, with the reason: the place where a foreign failure is turned into one of ours."""
BROAD = frozenset({"Exception", "BaseException"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One parsed file."""

    name: str
    text: str
    tree: ast.Module

    @functools.cached_property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def read(folder: Path) -> list[Source]:
    """Every Python file below ``folder``."""
    texts = ((str(path.relative_to(folder)), path.read_text()) for path in sorted(folder.rglob("*.py")))
    return [Source(name, text, ast.parse(text)) for name, text in texts]


def lines_of(function: Function) -> int:
    """Length of a function, its decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_functions(source: Source) -> Iterator[str]:
    for function in source.functions:
        if lines_of(function) > MAX_FUNCTION_LINES:
            yield f"{source.name}:{function.lineno}: {function.name} has {lines_of(function)} lines"


def long_file(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{source.name}: {lines} lines"


def no_sentence_on_top(source: Source) -> Iterator[str]:
    empty = not source.tree.body and Path(source.name).name == "__init__.py"
    if not empty and not (ast.get_docstring(source.tree) or "").split("\n\n")[0].endswith((".", ":")):
        yield f"{source.name}: the docstring on top does not begin with a sentence"


def fragment_docstrings(source: Source) -> Iterator[str]:
    """Docstrings of classes that define nothing."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and f"{source.name}: {node.name}" not in UNDEFINED:
            words = (ast.get_docstring(node) or "").split()
            if words and (len(words) < MIN_CLASS_WORDS or words[0] in FRAGMENTS):
                yield f"{source.name}:{node.lineno}: the docstring of {node.name} does not say what it is"


def half_docstrings(source: Source) -> Iterator[str]:
    """Docstrings of attributes and constants that do not stand alone."""
    for node in ast.walk(source.tree):
        body = getattr(node, "body", None)
        for named, text in itertools.pairwise(body if isinstance(body, list) else ()):
            said = _text(text) if isinstance(named, ast.Assign | ast.AnnAssign) else ""
            first = said.partition(" ")[0]
            unnamed = first == UNNAMED and not source.name.startswith(WITH_UNNAMED)
            points = any(words in said.partition(".")[0] for words in POINTING)
            if said.endswith(",") or first in HALVES or unnamed or points:
                yield f"{source.name}:{text.lineno}: {said!r} is no sentence of its own"


def _text(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return str(ast.literal_eval(node.value)).strip() if is_text else ""  # type: ignore[attr-defined]


def not_annotated(source: Source) -> Iterator[str]:
    for function in source.functions:
        names = [arg.arg for arg in _arguments(function) if arg.annotation is None and arg.arg not in ("self", "cls")]
        if function.returns is None:
            names.append("the result")
        if names:
            yield f"{source.name}:{function.lineno}: {function.name} does not annotate {', '.join(names)}"


def _arguments(function: Function) -> list[ast.arg]:
    given = function.args
    starred = [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def broad_excepts(source: Source) -> Iterator[str]:
    """Handlers that catch everything and go on, unless marked as a border."""
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        swallows = isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node)
        if (swallows or _suppresses(node)) and BORDER not in lines[_line(node) - 1]:
            yield f"{source.name}:{_line(node)}: broad except without {BORDER!r}"


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(each) for each in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in BROAD)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _suppresses(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("suppress"):
        return False
    return any(_is_broad(each) for each in node.args)


CHECKS: tuple[Callable[[Source], Iterator[str]], ...] = (
    long_functions,
    long_file,
    no_sentence_on_top,
    fragment_docstrings,
    half_docstrings,
    not_annotated,
    broad_excepts,
)


def median_function_lines(sources: list[Source]) -> float:
    """Median length of all functions."""
    return statistics.median(lines_of(function) for source in sources for function in source.functions)


# ---------------------------------------------------------------- the repository


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_code_keeps_to_its_style(check: Callable[[Source], Iterator[str]], folder: str) -> None:
    assert [problem for source in read(ROOT / folder) for problem in check(source)] == []


def test_the_median_function_is_short() -> None:
    assert median_function_lines(read(ROOT / "kvrelay")) <= MAX_MEDIAN_FUNCTION_LINES


# ---------------------------------------------------------------- the checker

GOOD = '''"""One noun: what it is for."""

class Page:
    """KV of some tokens, all layers."""

    size_bytes: int
    """Bytes of all layers, without the header."""

def add(first: int, *rest: int, scale: float = 1.0) -> float:
    try:
        return scale * (first + sum(rest))
    except BaseException:
        print("says so, then goes on failing")
        raise

async def border() -> None:
    try:
        await add(1)
    except Exception:  # border: whatever the engine raises becomes Lost
        pass
'''


def source_of(text: str) -> Source:
    return Source("planted.py", text, ast.parse(text))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_code_passes(check: Callable[[Source], Iterator[str]]) -> None:
    assert list(check(source_of(GOOD))) == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (long_functions, "async def f() -> None:\n" + "    x = 1\n" * 60),
        (long_file, "x = 1\n" * 401),
        (no_sentence_on_top, "import os\n"),
        (no_sentence_on_top, '"""helpers"""\n'),
        (fragment_docstrings, 'class A:\n    """Three short words."""\n'),
        (fragment_docstrings, 'class A:\n    """Of all requests of one router."""\n'),
        (half_docstrings, 'class A:\n    size: int\n    """Bytes of a page,"""\n'),
        (half_docstrings, 'WEIGHT = 0.1\n"""Of the newest value."""\n'),
        (half_docstrings, 'class A:\n    routers: int\n    """That share a port."""\n'),
        (half_docstrings, 'class A:\n    pages: dict[str, int]\n    """By worker."""\n'),
        (half_docstrings, 'class A:\n    begun: int\n    """When each of these others was started."""\n'),
        (fragment_docstrings, 'class A:\n    """That share one port of the router."""\n'),
        (half_docstrings, 'def f(a: A) -> None:\n    a.at_byte = 1\n    """and where it lies."""\n'),
        (not_annotated, "def f(x) -> None: ...\n"),
        (not_annotated, "def f(*, x=1) -> None: ...\n"),
        (not_annotated, "class A:\n    def f(self): ...\n"),
        (not_annotated, "def f(*rest, **named: int) -> None: ...\n"),
        (broad_excepts, "try: pass\nexcept Exception: pass\n"),
        (broad_excepts, "try: pass\nexcept (OSError, BaseException) as e: raise KeyError from e\n"),
        (broad_excepts, "try: pass\nexcept: pass\n"),
        (broad_excepts, "with contextlib.suppress(Exception): pass\n"),
    ],
)
def test_a_planted_fault_is_found(check: Callable[[Source], Iterator[str]], text: str) -> None:
    assert len(list(check(source_of(text)))) == 1


def test_the_median_counts_every_function() -> None:
    long = "def f() -> None:\n" + "    x = 1\n" * 20
    assert median_function_lines([source_of(long), source_of(GOOD)]) == 6
    assert median_function_lines([source_of(long)]) == 21


def test_sixty_lines_are_still_a_function() -> None:
    assert list(long_functions(source_of("def f() -> None:\n" + "    x = 1\n" * 59))) == []
