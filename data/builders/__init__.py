"""tfds builders for data sets that tfds does not have."""
