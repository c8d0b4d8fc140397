"""Text for warming up: no task uses it, so that what is measured has not been seen before."""

from __future__ import annotations

from .base import Tokenizer
from .lengths import head

PROSE = """\
The night bus leaves the harbour at ten past eleven. On most evenings it carries three or four people: a baker on the
way to the first shift, a nurse coming off the last one, and whoever has missed the tram. The driver knows the stops
by their lamps, and slows down before the bridge because the joints in the road are loud.

To mend a wooden drawer that sticks, take it out and look for the shiny places along its runners. Those are where the
wood rubs. Sand them a little, rub a candle over them, and try again before you sand more. If the whole front has
swollen, wait for a dry week; what is planed off in the rain is missing in July.

A village on the upper river used to count its years by floods. There was the year of the two bridges, the year when
the school stood in water up to the third stair, and a long quiet stretch for which nobody could agree on a name. Old
letters have to be dated by what they say about the cellar.

Three cyclists share the work of riding into the wind. Each leads for four minutes, then swings aside and drops to the
end of the line. The one in the middle rests most. When one of them tires, the others shorten that turn rather than
the ride, and nobody says a word about it until they stop for coffee.

The recipe asks for the onions to be cooked slowly, and slowly means forty minutes. In the first ten they go soft and
clear; in the next twenty they sink and turn the colour of straw; only then does the bottom of the pan begin to brown,
and a spoonful of water at the right moment lifts it all back into the sauce.

An inventory of the station's lost property for one week: nineteen umbrellas, seven single gloves, two crutches, a
cello bow without its cello, a birthday cake in good condition, and a suitcase full of maps. The cake was claimed
within the hour. Nobody has asked for the maps.
"""


def text(tokens: int, tokenizer: Tokenizer) -> str:
    """Prose of at most, and nearly, `tokens` tokens (at least one); paragraphs come again where that is long."""
    if tokens < 1:
        raise ValueError(f"tokens must be 1 or more, not {tokens}")
    long = "\n\n".join(" ".join(paragraph.split()) for paragraph in PROSE.split("\n\n"))
    while len(tokenizer.encode(long)) < tokens:
        long = f"{long}\n\n{long}"
    return head(long, tokens, tokenizer)
