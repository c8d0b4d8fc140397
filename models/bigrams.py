"""Which token mostly follows which: a table for the statistical level of a cascade, from text that is not measured.

As Cascade Speculative Drafting (arXiv 2312.11462) uses one where no earlier match is found. A pair is kept if it was
seen often enough and its second token followed the first often enough to be worth a place in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

MIN_COUNT, MIN_SHARE = 2, 0.3


def learn(texts: Iterable[Sequence[int]], min_count: int = MIN_COUNT, min_share: float = MIN_SHARE) -> dict[int, int]:
    """The most frequent follower of each token, the lower id where two are equally frequent.

    Args:
        texts: token ids of each text; no pair spans two texts.
        min_count: times that the pair was seen, at least.
        min_share: of the first token's followers that were this one, at least.
    """
    found = [np.asarray(text, dtype=np.int64) for text in texts if len(text) > 1]
    if not found:
        return {}
    pairs = np.concatenate([np.column_stack((ids[:-1], ids[1:])) for ids in found])
    kinds, counts = np.unique(pairs, axis=0, return_counts=True)
    first = kinds[:, 0]
    followers = np.bincount(first, weights=counts)[first]
    order = np.lexsort((kinds[:, 1], -counts, first))
    best = order[np.unique(first[order], return_index=True)[1]]
    kept = best[(counts[best] >= min_count) & (counts[best] >= min_share * followers[best])]
    return {int(token): int(follows) for token, follows in kinds[kept]}
