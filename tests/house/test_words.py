"""The glossary is complete: a public docstring or a page uses plain words and defined terms only."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import vocabulary

PLAIN = Path(__file__).resolve().parent / "plain_words.txt"
"""Ordinary words in use, one a line, as stems. A new word is either one of them or a term of the glossary."""


def plain_words() -> set[str]:
    """Stems of ordinary words."""
    return set(PLAIN.read_text(encoding="utf-8").split())


def test_every_term_is_in_the_glossary() -> None:
    """A reader who meets a word of the trade finds it in one place."""
    known = vocabulary.terms() | plain_words()
    unknown: defaultdict[str, set[str]] = defaultdict(set)
    for place, text in vocabulary.texts():
        for word in vocabulary.words_of(text):
            if vocabulary.stem(word) not in known:
                unknown[word.lower()].add(place)
    listed = "\n".join(f"{word}: {', '.join(sorted(places)[:3])}" for word, places in sorted(unknown.items()))
    assert not unknown, f"define these in docs/explanation/words.md, or add their stems to {PLAIN.name}:\n{listed}"


def test_no_plain_word_is_a_term() -> None:
    """A word with a definition is no ordinary word."""
    assert not plain_words() & vocabulary.terms()


def test_an_undefined_term_is_noticed() -> None:
    """The check can fail: a word of the trade without a definition is unknown."""
    (word,) = vocabulary.words_of("a `code` flumox of :class:`Stack`")
    assert vocabulary.stem(word) not in vocabulary.terms() | plain_words()
