"""``python -m shipway.cli``: the same as the ``shipway`` script."""

from shipway.cli.main import main

main()
