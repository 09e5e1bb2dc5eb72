"""Data: loaders, partitions (labels to rows per client) and plans (round to cohort)."""
