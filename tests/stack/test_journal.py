"""Journals of a stack: what is called where nothing is kept, and that each has every method."""

from __future__ import annotations

from inspect import Parameter, signature
from pathlib import Path
from unittest.mock import Mock

import pytest
from stack_bed import opened, prompts_of, serve, stack_config

from tierkv.recording.recorder import Recorder
from tierkv.stack import opening
from tierkv.stack.journal import Journals, StepJournal

METHODS = sorted(name for name in vars(StepJournal) if not name.startswith("_"))


class CountingJournal(Journals):
    """Journals that keep nothing but the names of its calls."""

    calls: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __getattribute__(self, name: str) -> object:
        if name in METHODS and name != "is_kept":
            self.calls.append(name)
        return super().__getattribute__(name)


@pytest.mark.needs_torch
def test_a_stack_without_a_record_does_not_call_its_journal_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call per step, chunk or lookup is a cost that every stack without a record would pay."""
    journal = CountingJournal()
    monkeypatch.setattr(opening, "Journals", lambda: journal)
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts_of(31, 2))
        assert stack.flush()
        assert journal.calls == []
        stack.reset_cache()
    assert journal.calls == ["reset_began", "close"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("journal", [Journals, Recorder])
def test_each_journal_has_every_method(journal: type, name: str) -> None:
    """A method that one of them lacks would fail in the stack that uses it, and only there."""
    assert hasattr(journal, name)


@pytest.mark.parametrize("name", METHODS)
def test_journals_pass_every_call_on_to_each(name: str) -> None:
    """One call that is not passed on is missing from every record beside which spans are exported, and from no test."""
    if name == "is_kept":
        assert [Journals().is_kept, Journals(Mock()).is_kept] == [False, True]
        return
    first, second = Mock(spec=Journals), Mock(spec=Journals)
    parameters = list(signature(getattr(StepJournal, name)).parameters.values())[1:]
    plain = [object() for each in parameters if each.kind is not Parameter.KEYWORD_ONLY]
    named = {each.name: object() for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
    if name == "close":
        plain = [5.0]
    getattr(Journals(first, second), name)(*plain, **named)
    for journal in (first, second):
        getattr(journal, name).assert_called_once_with(*plain, **named)
