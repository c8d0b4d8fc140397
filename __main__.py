"""`python -m specbench`."""

from .cli import app

app()
