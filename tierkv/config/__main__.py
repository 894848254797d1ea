"""``python -m tierkv.config > docs/reference/configuration.md`` writes the reference page."""

from __future__ import annotations

import sys

from tierkv.config.reference import render_reference

if __name__ == "__main__":
    sys.stdout.write(render_reference())
