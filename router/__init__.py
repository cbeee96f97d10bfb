"""router: an OpenAI-compatible proxy that gives chat and batch on one model a pool each."""

__version__ = "0.1.0"
