"""Finds the Prometheus metrics that the code defines, by reading it. It must never import or run what it reads.

A metric is a call (``Counter(...)`` or a method of that name) or a tuple whose first item is a name beginning with
``kvrelay_`` and whose second is its sentence; a tuple of names alone defines nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

PREFIX = "kvrelay_"
NAME = re.compile(PREFIX + r"[A-Za-z0-9_]+")
COUNT = re.compile(r"[a-z]+(?:_[a-z]+)*")
KINDS = ("counter", "histogram", "gauge", "summary")


class Metric(NamedTuple):
    """One metric as the code defines it; a part in capitals varies."""

    name: str
    kind: str
    labels: tuple[str, ...]
    sentence: str


def metrics_in(source: str) -> list[Metric]:
    """Metrics that ``source`` defines, in the order of its lines."""
    if PREFIX not in source:  # most files; the others take a while to read
        return []
    tree = ast.parse(source)
    nodes = sorted((node for node in ast.walk(tree) if isinstance(node, ast.expr)), key=lambda node: node.lineno)
    return [metric for node in nodes for metric in _metric(node, tree)]


def _metric(node: ast.expr, tree: ast.AST) -> Iterator[Metric]:
    match node:
        case ast.Call(func=func, args=[first, second, *rest]):
            kind = next((kind for kind in KINDS if kind in ast.unparse(func).lower()), "")
        case ast.Tuple(elts=[first, second, *rest]):
            kind = "counter" if _text(first).endswith("_total") else "gauge"
        case _:
            return
    name = _text(first)
    if kind and NAME.fullmatch(name) and not NAME.fullmatch(_text(second)):
        shown = name if kind != "counter" or name.endswith("_total") else f"{name}_total"
        yield Metric(shown, kind, tuple(_labels(rest, tree)), _text(second))


def _text(node: ast.expr) -> str:
    """A string literal; the varying parts of an f-string in capitals; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or ast.unparse(part).upper() for part in _parts(node))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _parts(node: ast.JoinedStr) -> Iterator[ast.expr]:
    yield from (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)


def _labels(rest: list[ast.expr], tree: ast.AST) -> Iterator[str]:
    """Label names: plain strings, lists of them, or the keys of a dictionary, given by name or on the spot."""
    for node in rest:
        if isinstance(node, ast.List | ast.Tuple):
            yield from _labels(node.elts, tree)
        elif isinstance(node, ast.Dict):
            yield from (_text(key) or ast.unparse(key).upper() for key in node.keys if key is not None)
        elif isinstance(node, ast.Name):
            yield from _labels(_assigned(node, tree), tree)
        elif _text(node):
            yield _text(node)


def _assigned(name: ast.Name, tree: ast.AST) -> list[ast.expr]:
    """The dictionary that was last given to ``name`` above its use."""
    given = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.lineno < name.lineno
        if ast.unparse(node.targets[0]) == name.id
    ]
    return [max(given, key=lambda node: node.lineno).value] if given else []


def counts_in(source: str) -> set[str]:
    """Names of the counts that ``source`` keeps or reports: see the cases of ``_count_names``."""
    return {name for node in ast.walk(ast.parse(source)) for name in _count_names(node) if COUNT.fullmatch(name)}


def _count_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(attr="add", value=owner), args=[name, *_]) if "counts" in ast.unparse(owner):
            yield _text(name)
        case ast.Call(func=ast.Attribute(attr="report" | "_report"), args=[ast.Dict() as counts]):
            yield from _keys(counts)
        case ast.Call(func=ast.Attribute(attr="give_up_from" | "_nothing"), args=[_, reason]):
            yield _text(reason)
        case ast.Call(func=ast.Name(id="LoadResult"), args=[*_, ast.Dict() as counts]):
            yield from _keys(counts)
        case ast.FunctionDef(name="gauges" | "describe" | "_links"):
            yield from (key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in _keys(each))


def _keys(counts: ast.Dict) -> Iterator[str]:
    yield from (_text(key) for key in counts.keys if key is not None)
