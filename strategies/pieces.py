"""What a server sends: text in place of token ids."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Step


@dataclass(frozen=True, slots=True)
class Piece(Step):
    """What has just come for one row from an engine that sends text (`Strategy.sends_text`); its `tokens` are empty.

    The receiver notes when it came. Once the clock has stopped it makes ids of the whole answer, and counts those: how
    many pieces there were says nothing, since one may hold several tokens, or none that can be read yet.

    Attributes:
        text: may be empty: a token that shows later, together with the next.
        finish: None while the answer goes on; `eos`, `stop` or `length` in the piece that the engine ended it with.
        error: why there is no answer; nothing else follows for this request.
        restarted: the request is sent once more, so its time begins here; nothing has come for it before.
    """

    text: str = ""
    finish: str | None = None
    error: str | None = None
    restarted: bool = False
