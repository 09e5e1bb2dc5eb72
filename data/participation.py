"""Who takes part in a round, for how many of its steps, and how long that takes.

Draws are named by seed, round and client. Seconds are those of simulated devices.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl import json_text, rng, traffic, types

MACS_PER_SECOND = 1e9  # of a simulated device of speed 1
PASSES = 3  # forward and backward, in forward passes
PREFIX = "file:"


class Participation(NamedTuple):
    """Clients that a round can have, and what they manage in it.

    Attributes:
        chance: f64[K, R], to be available in rounds that repeat.
        interrupted: The chance that a client stops before its last step.
        speed: f64[seeds, K], 1 = `MACS_PER_SECOND`, None = there is no clock.
        macs: f64[K, levels], of a forward pass of an example at each level.
        round_seconds: The deadline of a round, inf = none.
        num_bytes: f64[levels], the messages that the deadline expects of a client.
    """

    chance: np.ndarray
    interrupted: float = 0.0
    speed: np.ndarray | None = None
    macs: np.ndarray | None = None
    round_seconds: float = np.inf
    num_bytes: np.ndarray | None = None

    def available(self, seed: int, round: int, client: np.ndarray) -> np.ndarray:
        """The clients of int[M] that are available in a round."""
        chance = self.chance[client, round % self.chance.shape[1]]
        return client[rng.uniform(seed, "engine.available", round, client) < chance]

    def taken(
        self, seed: int, round: Any, client: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        """Steps int[...] where some clients stop after 1 to n - 1 of n `steps`.

        A client that stops does so after the same share of each of its plans.
        """
        name = seed, "engine.interrupted", round, client
        stops, share = rng.uniform(*name, 0) < self.interrupted, rng.uniform(*name, 1)
        fewer = 1 + (share * (steps - 1)).astype(int)
        return np.where(stops & (steps > 1), fewer, steps)

    def per_example(self, seed_index: int, client: Any, level: Any) -> np.ndarray:
        """f64[...]: seconds of training on an example, of clients and their levels."""
        speed = MACS_PER_SECOND * self.speed[seed_index, client]
        return PASSES * self.macs[client, level - 1] / speed

    def seconds_to_train(self, level: np.ndarray) -> np.ndarray:
        """f64[...]: what the deadline leaves beside the messages that it expects."""
        if self.round_seconds == np.inf:
            return np.full(np.shape(level), np.inf)
        sent = self.num_bytes[level - 1] / traffic.BYTES_PER_SECOND
        return np.maximum(self.round_seconds - sent, 0)

    def in_time(
        self, specs: Sequence[types.PlanSpec], owned: np.ndarray, *where: Any
    ) -> list[np.ndarray]:
        """The steps int[...] of each plan before the deadline, for int[...] rows.

        A client's plans share the time that messages leave in proportion to their
        examples, and those of the server take none. `where` is (index of the seed,
        clients int[...], levels int[...]).
        """
        steps = [spec.steps(owned) for spec in specs]
        if self.round_seconds == np.inf:
            return steps
        pairs = zip(specs, steps, strict=True)
        every = [spec.clients_examples(owned, n) for spec, n in pairs]
        within = self.seconds_to_train(where[-1]) / self.per_example(*where)
        share = np.clip(within / np.maximum(sum(every), 1), 0, 1)
        return [
            spec.steps_within(owned, (share * one + 1e-9).astype(int))
            for spec, one in zip(specs, every, strict=True)
        ]


def chances(given: str, num_clients: int) -> np.ndarray:
    """f64[K, R] of `--availability`; ValueError for another text."""
    wanted = f"a chance above 0 and at most 1, or a list or {PREFIX}PATH of each's"
    table = _table("availability", given, given or "1", num_clients, wanted)
    if not 0 <= table.min() <= table.max() <= 1 or not table.any():
        raise ValueError(f"--availability={_short(given)}: expected {wanted}")
    return table


def speeds(given: str, num_clients: int, seeds: Sequence[int]) -> np.ndarray:
    """f64[seeds, K] of `--client_speed`; ValueError for another text."""
    wanted = (
        f"lognormal:S with S from 0 to 10, or a list or {PREFIX}PATH of numbers above 0"
    )
    name, _, text = (given or "lognormal:0").partition(":")
    is_drawn = name == "lognormal"
    num_rows = 1 if is_drawn else num_clients
    table = _table("client_speed", given, text if is_drawn else given, num_rows, wanted)
    speed = np.tile(table[:, 0], (len(seeds), 1))
    if is_drawn:
        gens = [rng.generator(seed, "data.speed") for seed in seeds]
        draws = np.stack([gen.normal(size=num_clients) for gen in gens])
        speed = np.exp(speed * draws) * (0 <= table[0, 0] <= 10)
    if not (speed > 0).all() or table.shape[1] > 1:
        raise ValueError(f"--client_speed={_short(given)}: expected {wanted}")
    return speed


def file_bytes(given: str) -> bytes:
    """The contents of `file:PATH`, nothing for another text; or raises OSError."""
    path = pathlib.Path(given.removeprefix(PREFIX)).expanduser()
    return path.read_bytes() if given.startswith(PREFIX) else b""


def _short(given: str) -> str:
    """A value as errors show it, of a long list its beginning."""
    is_long = given.startswith("[") and len(given) > 60
    return f"{given[:57]}..." if is_long else given


def _table(flag: str, given: str, text: str, num_rows: int, wanted: str) -> np.ndarray:
    """f64[rows, R], finite: the number `text` in all rows, or a JSON list of rows.

    The list is in a file, or the text itself.
    """
    is_list = given.startswith((PREFIX, "["))
    kind = [object] if is_list else json_text.NUMBER
    text = re.sub(r"^\.", "0.", text)  # JSON has no number .5
    try:
        found = json_text.read(file_bytes(given) or text, kind)
        rows = found if is_list else [found]
        rows = [one if isinstance(one, list) else [one] for one in rows]
        if is_list and len(rows) != num_rows or len({len(one) for one in rows}) > 1:
            found = f"{len(rows)} entries for {num_rows} clients"
            raise ValueError(f"{found}, or lists of unequal length")
        table = np.array(rows)
        is_table = table.ndim == 2 and table.size and table.dtype.kind in "bif"
        if not (is_table and np.isfinite(table).all()):
            raise ValueError("it has other values")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        line = f"--{flag}={_short(given)}: expected {wanted} ({reason})"
        raise ValueError(line) from error
    table = table.astype(float)
    return table if is_list else np.repeat(table, num_rows, 0)
