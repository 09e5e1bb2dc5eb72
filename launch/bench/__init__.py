"""Speed of one round: `python -m launch.bench --work=w1 [--algo=fedavg] [--json]`.

Times one round per call after a warm-up, evaluation excluded, and prints one JSON
object last. The works are in `works.py`. Some algorithms are timed beside a plain loop
of their optimizer steps, or compared with the machine's matrix products
(`references.py`); every other one is timed alone.
"""
