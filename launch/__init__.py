"""All that a person starts: main, bench, reproduce and list."""
