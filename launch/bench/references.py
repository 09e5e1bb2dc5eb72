"""References with which the rounds of some algorithms are compared."""

from launch.bench import fedd2s

# `experiment -> (round -> seconds of the plain loop)`, or None if it does not apply
PLAIN_LOOPS = {"fedd2s": fedd2s.reference}

# Their steps are one forward and one backward pass, of which GFLOP/s can be computed.
PLAIN_STEPS = ("fedavg",)
