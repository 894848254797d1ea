"""Texts of several kinds, for measurements on a real model.

Prose, code and a table are files of this project, so their figures may change a little from commit to commit.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_NOTICE = (
    "Dear {name},\n\nThank you for your message. Your request has the number {number}. Our team works through requests "
    "in the order in which they arrive, and will answer yours within two working days. Please do not reply to this "
    "message: this mailbox is never read. If your request has become obsolete, you need not do anything.\n\n"
    "This message and its attachments may contain confidential information that is intended only for its addressee. "
    "If you have received it in error, please tell the sender, delete it, and do not pass it on.\n\n"
    "Yours sincerely,\nThe service team\n\n"
)
_NAMES = ("Ms Abara", "Mr Brandt", "Ms Cho", "Mr Duarte", "Ms Eriksen", "Mr Farah", "Ms Gupta", "Mr Horvat")


def texts() -> dict[str, str]:
    """Kind of text -> a text of at least 1,200 tokens."""
    return {
        "English prose": _file("docs/explanation/workers.md"),
        "Python code": _file("tierkv/scheduler/scheduler.py"),
        "JSON": _file("docs/_generate/conformance.json"),
        "German prose": _file("benchmarks/texts/german.txt"),
        "repeated letter": "".join(
            _NOTICE.format(name=_NAMES[i % len(_NAMES)], number=48_117 + 211 * i) for i in range(2 * len(_NAMES))
        ),
    }


def _file(path: str) -> str:
    return (_ROOT / path).read_text(encoding="utf-8")
