"""specbench: run and benchmark decoding strategies for language models."""

__version__ = "0.1.0"
