"""Reports: self-contained HTML pages with tables and plots, and plots as SVG files.

Four nouns. A *chart* (:mod:`~tierkv.reports.line_chart`, :mod:`~tierkv.reports.bar_chart`) is a value that renders
itself as SVG. An *axis* chooses round ticks. A *section* of a :mod:`~tierkv.reports.page` is a paragraph, a table or a
chart. The *style* has the colours, light and dark, which both kinds of output share.

The code is our own and small: two kinds of charts. A plotting library would add tens of megabytes to every
installation, and writes a plot for light or dark pages, but not one file for both.

Invariants:

- A page or a plot needs no network, no script and no font of its own. It follows the reader's light or dark setting.
- Every text is escaped: names in a report may be anything.
- Equal values give equal bytes, so a plot in a repository changes only with its figures.
"""
