"""How Python processes of ours are started. What lies in the current folder must never be taken for a package."""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module``.

    ``python -m`` alone looks in the current folder first: a clone that is called kvrelay would be imported in place of
    the package. PYTHONPATH counts all the same.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
