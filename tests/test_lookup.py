"""The suffix automaton and what is drafted from it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.strategies.base import Request, Row
from specbench.strategies.lookup import LookupDrafter, SuffixAutomaton


def longest_match(text: list[int]) -> tuple[int, int]:
    """The same by looking at everything: the longest suffix that ends earlier too, at its latest earlier end."""
    for length in range(len(text) - 1, 0, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends:
            return length, max(ends)
    return 0, len(text)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), max_size=40)))
def test_match_is_the_longest_suffix_at_its_latest_occurrence(text):
    index = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        index.extend([token])
        assert index.match() == longest_match(text[:end])


def test_growing_is_linear_on_the_worst_texts():
    """No text makes an append walk far: states stay below 2 n, and 20,000 equal tokens are no problem."""
    index = SuffixAutomaton()
    index.extend([7] * 20_000)
    assert index.match() == (19_999, 19_999)
    assert len(index._length) <= 2 * 20_000


def draft(text: list[int], limit: int, **how) -> list[int]:
    (found,) = LookupDrafter(**how).propose([Row(0, Request(0, text, 99))], [limit])
    return list(found.tokens)


def test_the_most_recent_occurrence_is_continued():
    assert draft([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 2) == [4, 9]


def test_nothing_is_proposed_without_a_match_that_is_long_enough():
    assert draft([1, 2, 3], 5) == []
    assert draft([1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert draft([1, 2, 1], 5, min_match=2) == []
    assert draft([1], 5) == []


def test_a_loop_goes_on_as_it_began():
    assert draft([8, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def test_the_draft_is_capped_by_the_limit_and_by_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert draft(text, 3) == [3, 4, 5]
    assert draft(text, 9, per_match=2) == [3, 4, 5, 6]
    assert draft(text, 0) == []


def test_the_index_follows_the_verified_tokens_row_by_row():
    drafter = LookupDrafter()
    rows = [Row(0, Request(0, [1, 2, 3], 9)), Row(1, Request(1, [4, 4], 9))]
    assert [list(d.tokens) for d in drafter.propose(rows, [2, 2])] == [[], [4, 4]]
    rows[0].tokens.extend([9, 1, 2])
    assert list(drafter.propose(rows[:1], [2])[0].tokens) == [3, 9]
    drafter.reset()
    assert list(drafter.propose([Row(0, Request(0, [5, 6, 5], 9))], [1])[0].tokens) == [6]
