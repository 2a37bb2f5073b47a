"""`python -m regard`, and `accelerate launch -m regard`: the command line."""

from .commands.app import main

main()
