"""Measures the speed of rounds: `python -m launch.bench --work=w1 [--algo=fedavg]`.

One round per call is timed after a warm-up, without evaluation, and one JSON object is
printed last. The works are in `works.json`. FedAvg is also compared with matrix
products.
"""
