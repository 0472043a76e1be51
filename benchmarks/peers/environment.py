"""Environments of the peers: what a peer needs beyond the product's own packages, installed once into the user's cache.

Nothing is ever installed into the product's environment, whose packages (vLLM among them) the peers share.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.progress import Say
from kvrelay.deploy.cache import cache_root

NIXL = ("nixl==1.5.2", "nixl-cu12==1.5.1")
"""``nixl`` chooses a build at run time; on a machine without CUDA it takes the one that is there."""
_DONE = "done"
"""Holds the requirements that the environment was made from; written last."""


def peer_python(name: str, requirements: tuple[str, ...], say: Say) -> Path:
    """The interpreter of the environment ``name``; makes it when it is missing or of other requirements.

    Raises ``subprocess.CalledProcessError`` when pip cannot install.
    """
    folder = cache_root() / "peers" / name
    python = folder / "bin" / "python"
    wanted = "\n".join((*requirements, sysconfig.get_path("purelib")))
    if (folder / _DONE).is_file() and (folder / _DONE).read_text() == wanted:
        return python
    say(f"installing {', '.join(requirements)} into {folder}, once")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements], check=True)
    _layer(folder)
    (folder / _DONE).write_text(wanted)
    return python


def _layer(folder: Path) -> None:
    """Let the environment see the packages of the running one behind its own: vLLM is not installed twice."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = folder / "lib" / version / "site-packages" / "shared.pth"
    shared.write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    print(peer_python("nixl", NIXL, lambda line: print(line, file=sys.stderr)))
