"""The body of docs/reference/logs.md: every log event with its fields and what to do."""

from __future__ import annotations

import logging

from tierkv.logs.definitions import EVENTS, LogEvent, Rate
from tierkv.logs.stack_log import CHANGES_AT_ONCE, INTERVAL_MAX_S, LOGGER

LEAD = f"""\
A stack writes one line per event to the logger `{LOGGER}`. The line is a sentence for a reader, then the fields as
`name=value`; a value with spaces or quotes is written as a JSON string. The same fields are attributes of
the record (`record.event`, `record.tier`), for programs that write records as JSON. Every line also has:

| field | meaning |
|---|---|
| `event` | Name of the event, from the tables below. Names and fields are an interface. |
| `seconds_ago` | Time since the event, in a line that was held back for a while; it has the latest of several events. |
| `suppressed` | Number of such events since the previous line, which were counted only. |

The first event of each kind is written at once. A kind is an event with its tier and, for failures, its verb. Further
ones are counted for `log.interval_s`; then one line has their number and the fields of the latest. While a failure goes
on, its lines become rarer: each interval is twice the previous one, up to {INTERVAL_MAX_S:g} seconds. Of
changes of a state, such as of service, the first {CHANGES_AT_ONCE} are written as they happen. A later one is written
when it has lasted for `log.interval_s`, so the last line is the present state; only where a state changes all the time,
lines become rarer. A stack that closes writes what is still counted.

Python shows warnings of a logger that is not configured, and hides information. To see start and stop as well:

```python
import logging

logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
logging.getLogger("tierkv").setLevel(logging.INFO)
```

Plugins log under the names of their own packages (`tierkv_disk`, `tierkv_lmdb`, `tierkv_fsspec`): what they
found at start, and what they dropped. These lines have the event `plugin_note` and the field `tier`. Lines of one tier
and one format are a kind. Lines of a plugin's own threads have neither a tier nor a limit. An engine's adapter logs as
`tierkv.integrations`.
"""

HEADS = {
    logging.ERROR: "## Errors\n\nA part of the stack does not serve.\n",
    logging.WARNING: "## Warnings\n\nThe engine goes on; hits or bytes are lost, or a tier has changed its state.\n",
    logging.INFO: "## Information\n",
}
RATES = {Rate.GROWING: "rarer", Rate.STATE: "state", Rate.ONCE: "once"}


def _row(event: LogEvent) -> str:
    fields = ", ".join(f"`{name}`" for name in event.fields)
    return f"| `{event.name}` | {event.text} | {fields} | {RATES[event.rate]} | {event.advice} |"


def body() -> str:
    """The page without its title."""
    parts = [LEAD]
    for level, head in HEADS.items():
        rows = [_row(event) for event in EVENTS if event.level == level]
        parts += [head, "| event | text | fields | repeated | what to do |\n|---|---|---|---|---|", *rows, ""]
    return "\n".join(parts)
