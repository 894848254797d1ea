"""``python -m tierkv``: the ``tierkv`` program, where its folder is not on the path."""

from tierkv.cli.main import main

if __name__ == "__main__":
    main()
