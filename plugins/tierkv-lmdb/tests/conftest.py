"""Make ``lmdb_support`` importable: pytest's importlib mode does not see siblings."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
