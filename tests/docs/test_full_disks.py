"""Backends that authors copy, on a disk that fills up: the one of the page, the generated one and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.cli.new_plugin import rendered

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/write-a-backend.md"
DISK_MIB = 2

FILL = """
import sys
from tierkv.abc import BackendContext, WriteRequest
from tierkv.errors import OutOfSpaceError
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.namespace import Namespace

groups = ((16, (4096,), "full_attention", None),)
namespace = Namespace("m", "", "bfloat16", "page", groups, 4, 16)
backend = PLUGIN.open(BackendContext("full", namespace, 64 << 10, None), PLUGIN.options(path=sys.argv[1] + "/tier"))
for number in range(200):
    key = make_key(number)
    (result,) = backend.write([WriteRequest(key, memoryview(make_frame(key, 0, 64 << 10)))])
    if result is not None:
        break
assert type(result) is OutOfSpaceError, repr(result)
backend.close()
"""


def code_of_page() -> str:
    """First two blocks of the page: the backend, and its record."""
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2])


def write_generated(folder: Path) -> str:
    """Write a generated package into a folder. Returns the code that imports it."""
    for path, text in rendered("my-store", "local").items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return f"import sys; sys.path.insert(0, {str(folder / 'src')!r})\nfrom tierkv_my_store import PLUGIN\n"


@pytest.mark.parametrize("what", ["page", "generated", "example"])
def test_a_full_disk_is_called_full(tmp_path: Path, what: str) -> None:
    """After any other error the framework evicts nothing: a full tier would keep its old chunks for good."""
    code = {
        "page": code_of_page,
        "generated": lambda: write_generated(tmp_path),
        "example": lambda: "from tierkv_example import PLUGIN\n",
    }[what]()
    program, place = tmp_path / "program.py", tmp_path / "place"
    place.mkdir()
    program.write_text(code.replace("from __future__ import annotations\n", "") + FILL, encoding="utf-8")
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f'mount -t tmpfs -o mode=700,size={DISK_MIB}m tmpfs "$0"'
    allowed = subprocess.run([*alone, mount, str(place)], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"may not mount here: {allowed.stderr.decode()}")
    command = [*alone, f'{mount} && exec "$@"', str(place), sys.executable, "-B", str(program), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
