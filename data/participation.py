"""Who takes part in a round, for how many of its steps, and how long that takes.

All draws are named by seed, round and client. Times are those of simulated devices,
whatever computes the round.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl import json_text, rng, traffic, types

MACS_PER_SECOND = 1e9  # of a simulated device of speed 1
# A backward pass costs two forward passes.
PASSES = 3
PREFIX = "file:"


class Chances(NamedTuple):
    """The chance of each client to be available, in rounds that repeat.

    Client k has `chance` f64[N] from `first[k]` on, one for each of `count[k]` rounds.
    """

    chance: np.ndarray
    first: np.ndarray
    count: np.ndarray

    def drawn(self, seed: int, round: int, client: np.ndarray) -> np.ndarray:
        """bool[M]: whether clients int[M] are available in a round."""
        place = self.first[client] + round % self.count[client]
        drawn = _uniform(rng.hashed(seed, "engine.available", round, client))
        return drawn < self.chance[place]


class Clock(NamedTuple):
    """What decides how long a client takes.

    Attributes:
        speed: f64[seeds, K], 1 = `MACS_PER_SECOND`.
        macs: f64[K, levels], of a forward pass of an example at each level.
        round_seconds: The deadline of a round, inf = none.
        num_bytes: f64[seeds, K, levels], the bytes that the deadline expects of a
            client, in both directions. Without a deadline they are not used.
    """

    speed: np.ndarray
    macs: np.ndarray
    round_seconds: float
    num_bytes: np.ndarray

    def per_example(
        self, seed_index: int, client: np.ndarray, level: np.ndarray
    ) -> np.ndarray:
        """f64[...]: seconds of training on one example, of clients and their levels."""
        macs = PASSES * self.macs[client, level - 1]
        return macs / (MACS_PER_SECOND * self.speed[seed_index, client])

    def sending(
        self, seed_index: int, client: np.ndarray, level: np.ndarray
    ) -> np.ndarray:
        """f64[...]: the seconds of messages that the deadline expects."""
        return self.num_bytes[seed_index, client, level - 1] / traffic.BYTES_PER_SECOND


class Participation(NamedTuple):
    """The clients that a round can have, and what they manage in it.

    Attributes:
        availability: None = all clients are available.
        interrupted: The chance that a client stops before its last step.
        clock: None = nothing is timed.
    """

    availability: Chances | None = None
    interrupted: float = 0.0
    clock: Clock | None = None

    @property
    def has_deadline(self) -> bool:
        return self.clock is not None and np.isfinite(self.clock.round_seconds)

    @property
    def cuts(self) -> bool:
        """Whether clients may take fewer steps than their plans have."""
        return self.interrupted > 0 or self.has_deadline

    def uninterrupted(
        self, seed: int, round: Any, client: np.ndarray, num_steps: np.ndarray
    ) -> np.ndarray:
        """Steps int[...] of `num_steps` int[...] that are taken where clients stop.

        A client that stops takes 1 to n - 1 of n steps, of each plan the same share.
        """
        if not self.interrupted:
            return num_steps
        draw = [
            _uniform(rng.hashed(seed, "engine.interrupted", round, client, purpose))
            for purpose in (0, 1)
        ]
        fewer = 1 + (draw[1] * (num_steps - 1)).astype(np.int64)
        stops = (draw[0] < self.interrupted) & (num_steps > 1)
        return np.where(stops, fewer, num_steps)

    def in_time(
        self,
        seed_index: int,
        client: np.ndarray,
        level: np.ndarray,
        owned: np.ndarray,
        specs: Sequence[types.PlanSpec],
    ) -> list[np.ndarray]:
        """The steps int[...] of each plan that clients with int[...] rows manage.

        Where these are not all, each plan gets its share of the time.
        """
        steps = [spec.steps(owned) for spec in specs]
        if not self.has_deadline:
            return steps
        of_plan = [spec.epochs * spec.rows(owned) for spec in specs]
        total, place = np.maximum(sum(of_plan), 1), (seed_index, client, level)
        left = self.clock.round_seconds - self.clock.sending(*place)
        left = np.clip(left / self.clock.per_example(*place), 0, total)
        within = [np.floor(left * (one / total) + 1e-9) for one in of_plan]
        return [
            np.minimum(spec.steps_within(owned, one.astype(np.int64)), most)
            for spec, one, most in zip(specs, within, steps, strict=True)
        ]


def _uniform(words: np.ndarray) -> np.ndarray:
    """f64[...] in [0, 1) of uint64 words."""
    return (words >> np.uint64(11)) * 2.0**-53


def availability(given: str, num_clients: int) -> Chances | None:
    """Parses `--availability`; ValueError in one line if it is neither form."""
    if not given:
        return None
    if given.startswith(PREFIX):
        rows = _listed("availability", given, num_clients)
        rows = [row if isinstance(row, list) else [row] for row in rows]
    else:
        rows = [[_number("availability", given, "a chance above 0 and at most 1")]]
        rows *= num_clients
        if not 0 < rows[0][0] <= 1:
            _refuse("availability", given, "a chance above 0 and at most 1")
    for client, row in enumerate(rows):
        if not row or not all(_is_number(one) and 0 <= one <= 1 for one in row):
            odd = f"client {client} is not a chance from 0 to 1, or a list of these"
            raise ValueError(f"--availability={given}: the entry of {odd}")
    count = np.array([len(row) for row in rows])
    return Chances(np.concatenate(rows).astype(float), np.cumsum(count) - count, count)


def speeds(given: str, num_clients: int, seeds: Sequence[int]) -> np.ndarray:
    """f64[seeds, K] of `--client_speed`; ValueError in one line for another text."""
    if given.startswith(PREFIX):
        found = _listed("client_speed", given, num_clients)
        for client, one in enumerate(found):
            if not _is_number(one) or not 0 < one < np.inf:
                odd = f"client {client} is not a number above 0"
                raise ValueError(f"--client_speed={given}: the entry of {odd}")
        return np.tile(np.array(found, float), (len(seeds), 1))
    if not given:
        return np.ones((len(seeds), num_clients))
    kind, _, text = given.partition(":")
    spread = _number("client_speed", given, "lognormal:S with S from 0 to 10", text)
    if kind != "lognormal" or not 0 <= spread <= 10:
        _refuse("client_speed", given, "lognormal:S with S from 0 to 10")
    draws = [
        rng.generator(seed, "data.speed").normal(size=num_clients) for seed in seeds
    ]
    return np.exp(spread * np.stack(draws))


def file_bytes(given: str) -> bytes:
    """The contents of `file:PATH`, nothing for another text; or raises OSError."""
    if not given.startswith(PREFIX):
        return b""
    return pathlib.Path(given.removeprefix(PREFIX)).expanduser().read_bytes()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(flag: str, given: str, wanted: str, text: str | None = None) -> float:
    try:
        return float(given if text is None else text)
    except ValueError:
        return _refuse(flag, given, wanted)


def _refuse(flag: str, given: str, wanted: str) -> Any:
    line = f"--{flag}={given}: expected {wanted}, or {PREFIX}PATH of a JSON list"
    raise ValueError(line) from None


def _listed(flag: str, given: str, num_clients: int) -> list[Any]:
    """The entries of a JSON list, one for each client."""
    where = f"--{flag}={given}"
    try:
        found = json_text.read(file_bytes(given), [object])
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}; expected a list of clients") from error
    if len(found) != num_clients:
        raise ValueError(
            f"{where} has {len(found)} entries, --num_clients={num_clients}; expected "
            "one for each client"
        )
    return found
