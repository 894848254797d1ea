"""Tables of the site on a phone: the columns of all rows stand below each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CHROMIUM, look_at

STYLE = Path(__file__).resolve().parents[2] / "docs/_static/site.css"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")
def test_words_of_code_in_a_cell_move_no_column(tmp_path: Path) -> None:
    """Sphinx makes an element of each word of code; those of a cell are no columns of its row."""
    words = "".join(f"<span>word{i} </span>" for i in range(6))
    # The helper tells the width of each plot: one that fills a row's first cell tells the width of that cell.
    first = '<td><svg class="tk" style="display:block;width:100%;height:9px"></svg><code>a</code></td>'
    rows = [f"<tr>{first}<td>b</td><td>c</td><td><code>{code}</code></td></tr>" for code in ("d", words)]
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in 'abcd')}</tr>"
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    page = tmp_path / "table.html"
    page.write_text(
        f"<style>{STYLE.read_text(encoding='utf-8')}</style><body><article>{table}</article></body>", encoding="utf-8"
    )
    one, other = look_at(page, tmp_path, width=390).facts["plot_widths"]
    assert one == other < 200
