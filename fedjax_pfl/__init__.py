"""The engine: a round is a pure function, a client a row, and what differs a mask."""

__version__ = "0.1.0"
