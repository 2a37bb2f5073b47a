"""`python -m regard`, and `accelerate launch -m regard`: the command line."""

from .cli import main

main()
