"""The board and the alerts of docs/operate in a real Prometheus: ``python -m nox -s board``.

``prometheus`` fetches and runs the server, ``stage`` is a stack whose tiers fail and heal, and ``test_board_run``
watches each alert fire and clear. Rules and queries are those of the repository, with a second for each minute.
"""
