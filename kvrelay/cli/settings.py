"""The configuration of a command: the file, then the flags over it. Flags that were not given change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvrelay.config import Config
from kvrelay.config_text import checked, explain, parse
from kvrelay.errors import Misconfigured

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML configuration file; flags win over it.", show_default=False)
]
Model = Annotated[
    str, typer.Option("--model", help="Hugging Face folder, or the name of a fetched model.", show_default=False)
]
KeyFile = Annotated[Path, typer.Option("--key-file", help="File with the cluster's shared key.", show_default=False)]
_NAME_BYTES = 128
"""Longest name of a store or a worker: it is part of every greeting, and a label of many metrics."""
_FLAGS = {"model.path": "--model"}
"""Flags that are not called like their key."""


def load(path: Path | None, **sections: dict[str, Any]) -> Config:
    """The configuration in ``path`` with ``sections`` over it; None values are left out. Raises ``Misconfigured``."""
    config = _parsed(path) if path is not None else Config()
    tree = msgspec.to_builtins(config)
    for section, values in sections.items():
        tree[section] |= {key: value for key, value in values.items() if value not in (None, "")}
    try:
        return checked(msgspec.convert(tree, Config))
    except msgspec.ValidationError as error:
        raise Misconfigured(_name_flag(explain(str(error)), sections)) from error


def _name_flag(problem: str, sections: dict[str, dict[str, Any]]) -> str:
    """``problem``, which begins with a key, with the flag that set it in front."""
    key, _, what = problem.partition(": ")
    section, _, name = key.partition(".")
    if sections.get(section, {}).get(name) in (None, ""):
        return problem
    return f"{_FLAGS.get(key, '--' + name.replace('_', '-'))} ({key}): {what}"


def _parsed(path: Path) -> Config:
    text = _read(path)
    try:
        return parse(text)
    except Misconfigured as error:
        raise Misconfigured(f"{path}: {error}") from error


def check_name(flag: str, name: str) -> str:
    """``name`` as given with ``flag``, or taken from a file's. Raises ``Misconfigured`` unless others can show it."""
    if not name.isprintable() or not name or len(name.encode()) > _NAME_BYTES:
        shown = ascii(name if len(name) <= _NAME_BYTES else f"{name[:_NAME_BYTES]}...")
        raise Misconfigured(
            f"{flag} {shown} is no name for a member; choose one of up to {_NAME_BYTES} bytes of printable UTF-8"
        )
    return name


def check_addresses(flag: str, addresses: list[str] | None) -> tuple[str, ...]:
    """``addresses`` as given with ``flag``. Raises ``Misconfigured`` unless each is HOST:PORT."""
    for address in addresses or ():
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16) or "/" in host:
            raise Misconfigured(f"{flag} {address} is not HOST:PORT; it looks like 127.0.0.1:7080")
    return tuple(addresses or ())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Misconfigured(f"cannot read the configuration file {path}: {reason}") from error
