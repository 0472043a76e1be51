"""Holds the floors: a file imports only from lower floors or its own folder, and pickle is nowhere."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Room(NamedTuple):
    """Files that may import one another, and the floor they stand on."""

    floor: int
    name: str
    modules: tuple[str, ...]


FLOORS = (
    Room(0, "words", ("__init__", "types", "protocol", "identity", "errors", "config", "config_text")),
    Room(1, "policy", ("policy",)),
    Room(2, "fleet", ("fleet",)),
    Room(3, "links", ("link", "channel", "feed", "race")),
    Room(4, "router", ("router",)),
    Room(4, "connector", ("connector",)),
    Room(4, "store", ("store",)),
    Room(4, "sim", ("sim",)),
    Room(5, "deploy", ("deploy",)),
    Room(6, "cli", ("cli", "__main__")),
)
"""The one table; docs/decisions/0001 and CONTRIBUTING.md describe it."""

DOORS = {"connector": ("store.client", "store.arena")}
"""The only imports between rooms of one floor: shared memory has one layout, and a store has one client."""

PURE_FLOORS = (0, 1, 2)
IMPURE = frozenset({"asyncio", "socket", "torch", "vllm", "time", "random"})
"""What the pure floors never import: time and events come in as arguments, commands go out."""

PICKLES = frozenset({"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
PICKLING_CALLS = frozenset({("torch", "load"), ("np", "load"), ("numpy", "load")})


class Import(NamedTuple):
    """One import statement's target, as a dotted name."""

    target: str
    line: int


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def room_of(module: str) -> Room | None:
    """The room of ``store.arena``, given without the package's name."""
    head = module.split(".")[0] or "__init__"
    return next((room for room in FLOORS if head in room.modules), None)


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """Every import in ``tree``, those inside functions included; ``package`` resolves relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _base(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")
    kept = parents[: len(parents) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def allowed(room: Room, target: str) -> bool:
    """May a file of ``room`` import ``target`` (inside the package, without its name)?"""
    other = room_of(target)
    if other is None:
        return "." not in target  # ``from kvrelay import __version__``; a file without a room is a breach of its own
    if any(target == door or target.startswith(f"{door}.") for door in DOORS.get(room.name, ())):
        return True
    return other is room or other.floor < room.floor


def breaches(package: Path) -> list[str]:
    """Every import that the floors forbid in the files below ``package``, as ``file:line: what``."""
    return [
        f"{path.relative_to(package)}:{text}" for path in sorted(package.rglob("*.py")) for text in _file(path, package)
    ]


def _file(path: Path, package: Path) -> Iterator[str]:
    module = ".".join(path.relative_to(package).with_suffix("").parts)
    room = room_of(module)
    if room is None:
        yield "1: stands on no floor; give it a room in FLOORS"
        return
    parent = f"{package.name}.{module}".rpartition(".")[0]
    for target, line in imports_of(parsed(path.read_text()), parent):
        top, _, rest = target.partition(".")
        if top == package.name and not allowed(room, rest or "__init__"):
            yield f"{line}: {room.name} on floor {room.floor} imports {target}"
        elif room.floor in PURE_FLOORS and top in IMPURE:
            yield f"{line}: {room.name} on floor {room.floor} imports {top}"


def pickles(folder: Path) -> list[str]:
    """Every use of pickle in the Python files below ``folder``: such bytes run code when they are read."""
    paths = (path for path in sorted(folder.rglob("*.py")) if not path.relative_to(folder).parts[0].startswith("."))
    texts = ((path, path.read_text()) for path in paths)
    suspects = ((path, text) for path, text in texts if any(word in text for word in (*PICKLES, ".load")))
    return [f"{path.relative_to(folder)}:{found}" for path, text in suspects for found in _pickles(parsed(text))]


def _pickles(tree: ast.AST) -> Iterator[str]:
    for target, line in imports_of(tree, ""):
        if PICKLES & set(target.split(".")):
            yield f"{line}: imports {target}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _loads_pickle(node):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _loads_pickle(call: ast.Call) -> bool:
    """``np.load`` never pickles unless told; ``torch.load`` may, so it is not used at all."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    name = (call.func.value.id, call.func.attr)
    told = any(keyword.arg == "allow_pickle" for keyword in call.keywords)
    return name in PICKLING_CALLS and (told or name[0] == "torch")


# ---------------------------------------------------------------- the repository


def test_every_file_imports_only_from_lower_floors_or_its_own_room() -> None:
    assert breaches(ROOT / "kvrelay") == []


@pytest.mark.parametrize("folder", ["kvrelay", "tests", "benchmarks", "docs", "examples", "requirements"])
def test_pickle_is_nowhere(folder: str) -> None:
    assert pickles(ROOT / folder) == []


# ---------------------------------------------------------------- the checker


def plant(package: Path, name: str, text: str) -> None:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small tree that keeps every rule."""
    package = tmp_path / "kvrelay"
    plant(package, "__init__.py", "__version__ = '0'\n")
    plant(package, "types.py", "")
    plant(package, "channel.py", "import asyncio\nfrom kvrelay import types\n")
    plant(package, "policy/cost.py", "from kvrelay.types import X\n")
    plant(package, "store/arena.py", "")
    plant(package, "store/client.py", "from kvrelay.store.arena import A\nfrom kvrelay.channel import C\n")
    plant(package, "store/daemon.py", "from .client import C\nfrom kvrelay import __version__\n")
    plant(package, "connector/worker.py", "from kvrelay.store.client import C\nfrom kvrelay.store import arena\n")
    plant(package, "deploy/local.py", "from kvrelay.router import app\nfrom kvrelay.store import daemon\n")
    return package


def test_a_tree_that_keeps_the_rules_has_no_breach(package: Path) -> None:
    assert breaches(package) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("types.py", "from kvrelay.policy import cost"),
        ("types.py", "from kvrelay import channel"),
        ("types.py", "import time"),
        ("policy/cost.py", "from random import choice"),
        ("policy/cost.py", "import kvrelay.fleet.brain"),
        ("policy/cost.py", "from ..channel import C"),
        ("fleet/brain.py", "def now():\n    import asyncio.tasks"),
        ("fleet/brain.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvrelay.router import app"),
        ("channel.py", "from kvrelay.store import client"),
        ("store/arena.py", "from kvrelay.connector import worker"),
        ("router/app.py", "from kvrelay.store.client import C"),
        ("connector/worker.py", "from kvrelay.store import daemon"),
        ("connector/worker.py", "from kvrelay.store.daemon import run"),
        ("connector/worker.py", "from kvrelay.deploy import local"),
        ("deploy/local.py", "import kvrelay.cli"),
        ("utils.py", ""),
    ],
)
def test_a_planted_breach_is_found(package: Path, name: str, text: str) -> None:
    plant(package, name, text)
    found = breaches(package)
    assert len(found) == 1
    assert found[0].startswith(f"{name}:")


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing.reduction import pickle",
        "def read(path):\n    import cloudpickle as safe",
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_a_planted_pickle_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "reader.py", text)
    assert len(pickles(tmp_path)) == 1


def test_plain_numpy_files_are_no_pickle(tmp_path: Path) -> None:
    plant(tmp_path, "reader.py", "import numpy as np\nnp.load('x')")
    assert pickles(tmp_path) == []
