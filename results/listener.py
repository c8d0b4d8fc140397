"""What a run tells whoever watches it. The command line shows progress with it; the default is silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .records import Sample


@dataclass(frozen=True)
class Working:
    """A worker and how far its cell is, in measured samples; `total` is 0 as long as it is not known."""

    worker: str
    cell: str
    samples: int
    total: int


@dataclass(frozen=True)
class Grid:
    """How far the cells of a grid on several workers are. Failed ones have ended, too."""

    cells: int
    ended: int
    failed: int
    working: Sequence[Working]


class Listener:
    def stage(self, text: str) -> None:
        """A new phase has begun: loading, warm-up, measuring."""

    def note(self, text: str) -> None:
        """Something worth a line on stderr that is not a warning."""

    def warn(self, text: str) -> None:
        """Something that weakens the numbers."""

    def begin(self, total: int, done: int) -> None:
        """Measuring starts: how many samples there are in all (a lower bound where prompts have several turns)."""

    def sample(self, samples: Sequence[Sample]) -> None:
        """The rows of one call were finished and are on the disk."""

    def grid(self, grid: Grid) -> None:
        """Something has changed in a grid that runs on several workers."""

    def end(self) -> None:
        """Measuring is over, or was interrupted."""
