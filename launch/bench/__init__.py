"""Speed of one round: `python -m launch.bench --work=w1 [--algo=fedavg] [--json]`.

Times one round per call after a warm-up, evaluation excluded, and prints one JSON
object last. The works are in `works.py`. An algorithm in `references.py` is timed
beside a plain loop of its optimizer steps, or compared with the machine's matrix
products; every other one is timed alone.
"""
