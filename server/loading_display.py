"""What a terminal shows while the model loads: progress bars where stderr is a terminal, plain lines else.

Called on the engine thread, which does the loading; draws when something changed and starts no thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from server.worker import Phase, Progress

logger = logging.getLogger(__name__)

WORDS: dict[Phase, str] = {
    "files": "finding the checkpoint",
    "weights": "loading weights",
    "compile": "compiling programs",
    "warmup": "warming up",
}
# A plain line for each quarter of a phase: enough to see it move, few enough for a log file.
QUARTERS = 4


class LoadingDisplay:
    """Follows `Progress` from the first phase to ready or failed."""

    def __init__(self, console: Console) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[Phase, TaskID] = {}
        self._lines: set[tuple[Phase, int]] = set()
        if console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                auto_refresh=False,
            )

    def __call__(self, progress: Progress) -> None:
        """Show where loading is."""
        if progress.phase not in WORDS:
            self.close()
        elif self._bars is None:
            self._line(progress)
        # The download draws bars of its own.
        elif progress.phase != "files":
            self._bar(self._bars, progress)

    def close(self) -> None:
        """Leave the bars as they are and let others write below."""
        if self._bars is not None and self._tasks:
            for task in self._bars.tasks:
                self._bars.update(task.id, total=task.total or 1, completed=task.total or 1)
            self._bars.stop()
            self._tasks.clear()

    def _bar(self, bars: Bars, progress: Progress) -> None:
        if progress.phase not in self._tasks:
            bars.start()
            self._tasks[progress.phase] = bars.add_task(WORDS[progress.phase], total=None)
        bars.update(
            self._tasks[progress.phase], completed=progress.done, total=progress.total or None
        )
        bars.refresh()

    def _line(self, progress: Progress) -> None:
        quarter = int(progress.fraction * QUARTERS)
        if (progress.phase, quarter) in self._lines:
            return
        self._lines.add((progress.phase, quarter))
        share = f" {quarter * 100 // QUARTERS}%" if progress.total else ""
        logger.info("%s%s", WORDS[progress.phase], share)
