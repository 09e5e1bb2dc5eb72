"""What an algorithm's rounds are compared with, by its name."""

from __future__ import annotations

from launch.bench import fedd2s

# `experiment -> (round -> seconds of the plain loop)`, or None where it does not fit.
PLAIN_LOOPS = {"fedd2s": fedd2s.reference}

# Its steps are one forward and one backward pass: GFLOP/s can be told.
PLAIN_STEPS = ("fedavg",)
