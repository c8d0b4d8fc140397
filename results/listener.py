"""What a run tells whoever watches it. The command line shows progress with it; the default is silent."""

from __future__ import annotations

from collections.abc import Sequence

from .records import Sample


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

    def end(self) -> None:
        """Measuring is over, or was interrupted."""
