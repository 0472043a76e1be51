"""Shows how far each starting process is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvrelay.deploy.progress import Progress

_BAR_CELLS = 20


class StartupView:
    """``update`` is the cluster's ``on_progress``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Progress] = {}
        self._finished_s: dict[str, float] = {}
        self._started = time.monotonic()
        self._closed = False
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=False)

    def __repr__(self) -> str:
        return f"<StartupView {len(self._finished_s)} of {len(self._rows)} ready>"

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> StartupView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the table, and its clocks, as they are; safe to call twice."""
        self._closed = True
        if self._live.is_started:
            self._live.stop()

    def update(self, name: str, progress: Progress) -> None:
        self._rows[name] = progress
        if progress.ready:
            self._finished_s[name] = self.elapsed_s
        if not self._console.is_terminal and not self._closed:
            self._console.print(f"{self.elapsed_s:6.1f} s  {name}: {progress.text}", markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, progress in self._rows.items():
            style = "green" if progress.ready else "default"
            table.add_row(
                f"[bold]{name}[/bold]",
                ProgressBar(total=1.0, completed=progress.fraction, width=_BAR_CELLS),
                f"{self._finished_s.get(name, self.elapsed_s):5.1f} s",
                f"[{style}]{progress.text}[/{style}]",
            )
        return table
