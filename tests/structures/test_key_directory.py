"""Tables of keys that share a directory: one lookup finds a key in all of them."""

from __future__ import annotations

import random

from tierkv.structures.key_table import TABLE_BITS, TABLE_MASK, KeyDirectory, KeyTable
from tierkv.types.keys import Key, make_key

KEYS = [make_key(b"chunk %d" % i, 0) for i in range(60)]


def places_of(directory: KeyDirectory, key: Key) -> dict[int, int]:
    """Number of a key by table, as the chain of its places says."""
    (place,) = directory.places((key,))
    found: dict[int, int] = {}
    while place:
        assert place & TABLE_MASK not in found, "a chain visits a table twice"
        found[place & TABLE_MASK] = place >> TABLE_BITS
        place = directory.place_after(place)
    return found


def test_every_table_as_if_it_were_alone() -> None:
    """Keys are added to and discarded from several tables in any order. Each table must answer as one with a directory
    of its own, because rows of all tiers depend on it."""
    rng = random.Random(3)
    directory = KeyDirectory()
    tables = [KeyTable(directory) for _ in range(4)]
    models: list[dict[Key, int]] = [{} for _ in tables]
    for _ in range(4000):
        pick = rng.randrange(len(tables))
        table, model = tables[pick], models[pick]
        some = rng.choices(KEYS, k=rng.randrange(1, 6))
        action = rng.randrange(3)
        if action == 0 and some[0] not in model:
            model[some[0]] = table.add(some[0])
        elif action == 1:
            for key, number in zip(some, table.numbers(some), strict=True):
                assert model.setdefault(key, number) == number
        elif model:
            key = rng.choice(list(model))
            table.discard(model.pop(key))
        assert len(set(model.values())) == len(model) == len(table)
        for other, known in zip(tables, models, strict=True):
            assert other.find_all(some) == [known.get(key) for key in some]
            assert [other.find(key) for key in some] == [known.get(key) for key in some]
    for table, model in zip(tables, models, strict=True):
        assert dict(table.items()) == model
    for key in KEYS:
        here = {table.index: model[key] for table, model in zip(tables, models, strict=True) if key in model}
        assert places_of(directory, key) == here


def test_columns_follow_the_growth_of_a_table() -> None:
    """A table grows after one of its keys got into a second table; the way to the other table must not get lost."""
    directory = KeyDirectory()
    first, second = KeyTable(directory), KeyTable(directory)
    keys = [make_key(b"many %d" % i, 0) for i in range(20_000)]
    first.numbers(keys)
    second.numbers(keys[:10])
    second.numbers(keys)
    assert first.known(keys) == list(range(len(keys)))
    assert second.known(keys) == list(range(len(keys)))


def test_the_number_of_a_table_is_given_again() -> None:
    """Tiers come and go while a stack runs, and places have room for a bounded number of tables."""
    directory = KeyDirectory()
    first, second = KeyTable(directory), KeyTable(directory)
    second.numbers(KEYS[:3])
    first.numbers(KEYS[:3])
    for number in range(3):
        first.discard(number)
    directory.leave(first)
    assert second.known(KEYS) == [0, 1, 2]
    third = KeyTable(directory)
    assert third.index == first.index
    third.add(KEYS[0])
    assert places_of(directory, KEYS[0]) == {second.index: 0, third.index: 0}


def test_a_key_in_two_tables_is_one_entry() -> None:
    """The second tier that has a chunk must not cost a second entry: most stacks keep most chunks in two tiers."""
    directory = KeyDirectory()
    for _ in range(3):
        KeyTable(directory).numbers(KEYS)
    assert sum(map(len, directory.shards)) == len(KEYS)
