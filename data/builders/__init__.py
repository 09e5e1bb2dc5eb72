"""tfds builders of data sets that tfds itself does not have."""
