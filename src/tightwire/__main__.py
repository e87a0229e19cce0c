"""`python -m tightwire`: the command line of the environment that Python is of."""

from .cli import main

main()
