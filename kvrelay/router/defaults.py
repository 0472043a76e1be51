"""What a model's own ``generation_config.json`` adds to requests that do not say otherwise: its workers obey it, so the
rest of an answer has to as well. It must never be taken for what a client asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.errors import Misconfigured
from kvrelay.types import Value


class Defaults(Value, frozen=True, kw_only=True):
    """Fields that vLLM reads from the file; others of it mean nothing here."""

    max_new_tokens: int | None = None
    """Most tokens of a chat's answer without a limit of its own."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def fields(self) -> dict[str, object]:
        """The defaults that are fields of a request, too."""
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        return {key: value for key, value in penalties.items() if value is not None}


def read_defaults(model_path: Path) -> Defaults:
    """The defaults in a model folder; a model need not have any. Raises ``Misconfigured``."""
    file = model_path / "generation_config.json"
    if not file.is_file():
        return Defaults()
    try:
        return msgspec.json.decode(file.read_bytes(), type=Defaults, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise Misconfigured(f"{file} cannot be read: {error}") from error
