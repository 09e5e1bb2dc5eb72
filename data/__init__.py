"""Data: loaders, partitions (rows of each client) and plans (cohort of each round)."""
