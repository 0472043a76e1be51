"""The configuration of a command: the file, then the flags over it. Flags that were not given change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvrelay.config import Config, parse
from kvrelay.errors import Misconfigured

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML configuration file; flags win over it.", show_default=False)
]
Model = Annotated[
    str, typer.Option("--model", help="Hugging Face folder, or the name of a fetched model.", show_default=False)
]
KeyFile = Annotated[Path, typer.Option("--key-file", help="File with the cluster's shared key.", show_default=False)]


def load(path: Path | None, **sections: dict[str, Any]) -> Config:
    """The configuration in ``path`` with ``sections`` over it; None values are left out. Raises ``Misconfigured``."""
    config = parse(_read(path)) if path is not None else Config()
    tree = msgspec.to_builtins(config)
    for section, values in sections.items():
        tree[section] |= {key: value for key, value in values.items() if value not in (None, "")}
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise Misconfigured(str(error)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"cannot read the configuration file {path}: {error}") from error
