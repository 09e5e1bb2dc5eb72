"""A study: a table of cells as data, each measured in a process of its own."""
