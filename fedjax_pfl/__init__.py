"""The engine: a round is one pure function, a client is a row, differences are masks."""

__version__ = "0.1.0"
