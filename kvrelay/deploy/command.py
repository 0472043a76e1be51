"""How this user can type ``kvrelay``: it is often not on the PATH, since it was installed into a folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from kvrelay.deploy.interpreter import python_module

NAME = "kvrelay"


def program() -> str:
    """The word to begin a command with, in messages that say what to run."""
    return typed_as(sys.argv[0], Path.cwd(), os.environ.get("PATH", ""))


def program_anywhere() -> tuple[str, ...]:
    """The words to begin a command with in messages that somebody reads elsewhere, in whatever folder."""
    script = Path(sys.executable).with_name(NAME)
    return (str(script),) if script.is_file() else tuple(python_module(NAME))


def typed_as(started: str, folder: Path, path: str) -> str:
    """``started`` (an argv[0]) as a person in ``folder`` with the search path ``path`` would type it."""
    if Path(started).name != NAME:
        return NAME
    script = (folder / started).absolute()
    found = shutil.which(NAME, path=path)
    if found is not None and Path(found).resolve() == script.resolve():
        return NAME
    return str(script.relative_to(folder) if script.is_relative_to(folder) else script)
