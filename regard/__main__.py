"""Entry point of `python -m regard` and `accelerate launch -m regard`: runs the command line."""

from .commands.app import main

main()
