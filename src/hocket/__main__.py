"""`python -m hocket`."""

from hocket.app.cli import main

main()
