"""Where clients' private rows live, and how they are read and written there."""
