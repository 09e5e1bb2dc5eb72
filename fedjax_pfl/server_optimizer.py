"""The server's optimizer: a step along the mean change of the clients of a round.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated
Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295 (Algorithm 2: FedAdagrad,
FedYogi, FedAdam), and for momentum Hsu, Qi, Brown: "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification",
https://arxiv.org/abs/1909.06335 (FedAvgM).

With x the server's model, x_i those that its clients trained, and Delta the mean of
x_i - x over the clients of the round:

* FedAvgM (`sgd`): v = beta v + Delta; x += eta v.
* The adaptive ones: m = beta_1 m + (1 - beta_1) Delta; x += eta m / (sqrt(v) + tau),
  where v is v + Delta^2 (`adagrad`), v - (1 - beta_2) Delta^2 sign(v - Delta^2)
  (`yogi`), or beta_2 v + (1 - beta_2) Delta^2 (`adam`), and begins at tau^2.

| paper | here |
|---|---|
| eta, beta_1 (beta of FedAvgM) | `--server_lr`, `--server_momentum` |
| beta_2, tau | 0.99, 1e-3, as in the paper's experiments |

As in Algorithm 2, m and v have no bias correction, which optax's Adam and Yogi have.
Running statistics are not parameters: the server takes their mean. In Python
`server_optimizer` may be any optax transformation, of the gradient -Delta: a schedule
in it is one over rounds, as its state goes on from round to round.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import optimizer, options, types

BETA_2, TAU = 0.99, 1e-3
ADAPTIVE = ("adam", "adagrad", "yogi")
KINDS = ("sgd", *ADAPTIVE)


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """Options of a server that averages its clients' models."""

    server_optimizer: str = options.option(
        "none",
        "the server's step along the mean change of its clients; none = their mean",
        choices=("none", *KINDS),
    )
    server_lr: float = options.option(
        1.0,
        "step size of the server's optimizer [eta]",
        minimum=0,
        needs={"server_optimizer": KINDS},
    )
    server_momentum: float = options.option(
        0.0,
        "momentum of the server's optimizer, beta_1 of the adaptive ones",
        minimum=0,
        maximum=1,
        needs={"server_optimizer": KINDS},
        zero_is_off=True,
    )


class Moments(NamedTuple):
    """The first and the second moment m and v, in the shapes of the parameters."""

    first: Any
    second: Any


def make(hparams: ServerOptimizer) -> optax.GradientTransformation | None:
    """The server's optimizer of x - mean, or None where the mean is the new model.

    Raises ValueError if the momentum leaves the model as it is.
    """
    kind = hparams.server_optimizer
    if kind == "none":
        return None
    rate, momentum = hparams.server_lr, hparams.server_momentum
    if isinstance(kind, optimizer.Custom):
        return kind.make(rate)
    if kind != "sgd" and not isinstance(momentum, jax.Array) and momentum == 1:
        raise ValueError(
            f"--server_momentum=1: with --server_optimizer={kind} the model would "
            "never move; expected less than 1"
        )
    if kind == "sgd":
        return optax.sgd(rate, None if options.is_off(momentum) else momentum)
    scaled = scale_by_moments(kind, momentum)
    return optax.chain(scaled, optax.scale_by_learning_rate(rate))


def scale_by_moments(kind: str, momentum: Any) -> optax.GradientTransformation:
    """g -> m / (sqrt(v) + tau) of Algorithm 2; `momentum` is beta_1, maybe a tracer.

    Examples:
        >>> tx = scale_by_moments("adagrad", 0.0)
        >>> update, _ = tx.update(jnp.array(3e-3), tx.init(jnp.zeros(())))
        >>> round(float(update), 4)  # 3 / (sqrt(1 + 9) + 1)
        0.7208
    """

    def init(params: Any) -> Moments:
        second = jax.tree.map(lambda leaf: jnp.full_like(leaf, TAU**2), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), second)

    def second(v: jax.Array, g: jax.Array) -> jax.Array:
        square = g**2
        if kind == "adagrad":
            return v + square
        if kind == "yogi":
            return v - (1 - BETA_2) * square * jnp.sign(v - square)
        return BETA_2 * v + (1 - BETA_2) * square

    def update(grads: Any, state: Moments, params: Any = None) -> tuple[Any, Moments]:
        m = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g, state.first, grads
        )
        v = jax.tree.map(second, state.second, grads)
        out = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + TAU), m, v)
        return out, Moments(m, v)

    return optax.GradientTransformation(init, update)


def step(
    tx: optax.GradientTransformation,
    state: Any,
    old: types.Variables,
    mean: types.Variables,
) -> tuple[types.Variables, Any]:
    """(the server's next model, its optimizer state) after the clients' mean."""
    grads = jax.tree.map(jnp.subtract, old.params, mean.params)
    update, state = tx.update(grads, state, old.params)
    params = optax.apply_updates(old.params, update)
    return types.Variables(params, mean.stats), state
