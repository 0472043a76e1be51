"""Says when a member is gone and when it serves again: who reads "died" waits for that word. It decides nothing."""

from __future__ import annotations

import logging
from pathlib import Path

_log = logging.getLogger(__name__)


class Absences:
    """Members that were found dead and do not serve yet again."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Absences {', '.join(self._since_s) or 'none'}>"

    def began(self, name: str, ending: str, now: float, *, pause_s: float, log: Path) -> None:
        """``ending``: how it ended; it is started again after ``pause_s``. Several in a row are one absence."""
        self._since_s.setdefault(name, now)
        when = f"in {pause_s:g} s" if pause_s else "now"
        _log.warning("%s %s and is started again %s; its log: %s", name, ending, when, log)

    def ended(self, name: str, now: float) -> None:
        """``name`` serves; nothing is new in that unless it was away."""
        since_s = self._since_s.pop(name, None)
        if since_s is not None:
            _log.warning("%s serves again, after %.0f s", name, now - since_s)
