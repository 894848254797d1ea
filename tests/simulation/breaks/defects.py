"""Defects that load has shown in earlier versions: how each is put back, and which test finds it without a simulation.

``python -m simulation.breaks.defects``, in ``tests``, writes the table in docs/explanation/simulation.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simulation.breaks import core_breaks, feature_breaks, load_breaks, lossy_breaks
from simulation.breaks.registry import BREAKS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "simulation.md"
BEGIN, END = "<!-- defects: written by tests/simulation/breaks/defects.py -->\n", "<!-- end of defects -->\n"

DEADLINES = "scheduler/lookup/test_deadlines.py"

MODULES = (core_breaks, feature_breaks, load_breaks, lossy_breaks)
"""Modules of breaks; their import fills the registry."""


@dataclass(frozen=True, slots=True)
class Defect:
    """Defect of an earlier version. breaks: names of breaks that put it back. tests: paths and names in ``tests``."""

    what: str
    breaks: tuple[str, ...]
    tests: tuple[str, ...]


DEFECTS = (
    Defect(
        "a lookup's deadline runs while the engine is silent or full",
        ("a_deadline_counts_silence", "a_lapse_keeps_the_time"),
        (f"{DEADLINES}::test_a_tier_that_has_answered_is_not_late_however_long_the_engine_is_silent",),
    ),
    Defect(
        "a lookup's deadline runs while others are served",
        ("a_deadline_counts_a_queue_that_moves",),
        (f"{DEADLINES}::test_the_time_of_a_turn_begins_with_it",),
    ),
    Defect(
        "the wait for another's load of the same chunks ends although the engine was silent",
        ("the_wait_for_a_load_counts_silence",),
        (f"{DEADLINES}::test_s49_the_wait_for_a_load_ends_with_the_deadline",),
    ),
    Defect(
        "time in the queue counts as time of a tier",
        ("the_queue_counts_as_time_of_a_tier",),
        ("scheduler/requests/test_accounting.py::test_local_tokens_stored_tokens_and_waiting",
         "scheduler/requests/test_accounting.py::test_an_answer_to_another_request_is_not_waited_for"),
    ),
    Defect(
        "the first question grows with the prompt and the number of tiers",
        (),
        ("manager/test_present_prefix.py::test_one_lookup_per_key_however_many_tiers",
         "scheduler/lookup/test_lookups.py::test_the_budget_of_a_step_pays_for_the_keys_of_a_question"),
    ),
    Defect(
        "a step takes in completions of any number of keys",
        (),
        ("dispatch/test_dispatcher.py::test_drain_counts_keys",
         "manager/test_step_budget.py::test_all_parts_together_never_take_more_than_the_budget"),
    ),
    Defect(
        "each waiting request looks through all older ones",
        (),
        ("scheduler/lookup/test_lookups.py::test_a_waiting_request_costs_little_while_nothing_changes",
         "scheduler/lookup/test_lookups.py::test_a_waiting_request_is_not_searched_anew_when_others_store_and_load"),
    ),
    Defect(
        "a reset takes longer with many offers, open lookups or described chunks",
        (),
        ("manager/passages/test_passages.py::test_a_reset_ends_many_passages_as_fast_as_few",
         "scheduler/test_reset.py::test_a_reset_costs_the_same_with_many_requests",
         "scheduler/events/test_block_events.py::test_a_reset_of_many_chunks_is_described_as_fast_as_one_of_few"),
    ),
    Defect(
        "a large frame evicts thousands of small ones in one call",
        (),
        ("manager/moves/test_work_per_step.py::test_a_large_frame_waits_until_small_victims_are_chosen",),
    ),
    Defect(
        "a shared tier gets one probe for all requests, whose deadline discards all answers",
        ("all_that_waits_is_one_probe",),
        ("stack/test_slow_shared_tier.py::test_requests_together_get_all_their_chunks",
         "dispatch/test_dispatcher.py::test_answers_before_the_deadline_are_reported"),
    ),
    Defect(
        "a shared tier is not asked as many questions at once as it can take",
        (),
        ("manager/lower/test_probe_queue.py::test_what_waits_is_divided_among_the_probes_at_once",),
    ),
    Defect(
        "a prompt longer than a tier's free room loses its head",
        ("chunks_enter_policies_as_they_come",),
        ("stack/test_prompt_heads.py::test_the_next_process_finds_the_head",
         "stack/test_heads_after_restart.py::test_an_old_prompt_gives_up_its_tail"),
    ),
    Defect(
        "chunks are written again to a shared tier that has them, and counted as written",
        ("a_shared_tier_is_not_asked_before_a_write", "skipped_writes_count_as_written"),
        ("manager/moves/test_fill_in.py::test_a_shared_tier_is_asked_before_a_promoted_chunk_is_written",),
    ),
    Defect(
        "the same hash twice breaks an invariant",
        ("repeated_hashes_are_accepted",),
        ("scheduler/requests/test_rules.py::test_bad_hashes",),
    ),
    Defect(
        "a long load passes the share of slots that requests may have",
        ("what_is_copied_is_not_on_the_account",),
        ("manager/passages/test_slot_account.py::test_the_cap_holds_for_everything_together",
         "manager/passages/test_slot_account.py::test_a_load_counts_until_it_is_copied"),
    ),
    Defect(
        "a hit is cut in whole chunks of the largest size although it fits",
        ("a_hit_is_cut_in_whole_chunks_of_the_largest_size",),
        ("scheduler/lookup/test_search.py::test_a_hit_is_not_cut_where_it_fits",
         "scheduler/lookup/test_search_oracle.py::test_the_cap_of_slots_is_kept_and_used"),
    ),
    Defect(
        "a decode step of a running request that completes no chunk does all the work of a busy one",
        (),
        ("scheduler/jobs/test_quiet_steps.py::test_most_steps_only_count",),
    ),
    Defect(
        "the adaptive policy refuses newcomers where chunks stay longer than 85 minutes",
        (),
        ("policies/test_adaptive_slow.py::test_a_week_of_chat_with_pauses_of_hours",
         "policies/test_adaptive_slow.py::test_values_of_very_old_chunks_decline"),
    ),
    Defect(
        "time in a queue that moves, or in a long forward pass, counts against the deadline of an operation",
        ("a_deadline_counts_the_queue",),
        ("dispatch/test_queue_time.py::test_a_long_queue_is_read_to_its_end",
         "stack/test_slow_shared_tier.py::test_a_long_forward_pass_makes_no_probe_late"),
    ),
    Defect(
        "reads for which the queue of a tier has no room are refused, and their chunks are misses",
        ("a_full_queue_refuses_reads",),
        ("manager/moves/test_tier_reads.py::test_no_more_reads_than_the_queue_takes",
         "stack/test_long_queues.py::test_a_burst_longer_than_the_deadline_of_a_read_arrives"),
    ),
)  # fmt: skip


def table() -> str:
    """Table of the defects in Markdown, with the days on which each break is found, and the invariant that finds it."""
    known = {one.name: one for one in BREAKS}
    rows = [
        "| defect | put back as | found on days | by the invariant | test without a simulation |",
        "|---|---|---|---|---|",
    ]
    for defect in DEFECTS:
        found = [known[name] for name in defect.breaks]
        names = _listed(f"`{one.name}`" for one in found)
        days, invariants = _listed(f"`{one.scenario}`" for one in found), _listed(one.finds for one in found)
        tests = _listed(f"`{one.split('::')[1]}`" for one in defect.tests)
        rows.append(f"| {defect.what} | {names} | {days} | {invariants} | {tests} |")
    return "\n".join(rows) + "\n"


def _listed(items: Iterable[str]) -> str:
    return "<br>".join(dict.fromkeys(items)) or "none"


def page(text: str) -> str:
    """Text of the page with the present table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
