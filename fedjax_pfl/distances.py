"""Distances between batches of outputs."""

import jax
import jax.numpy as jnp

from fedjax_pfl import losses, options

DISTANCES = ("kl", "norm", "js")
JS_FORMS = ("true", "reversed")


def kl(log_target: jax.Array, log_student: jax.Array) -> jax.Array:
    """sum_c q (log q - log p) per row of log-probabilities [..., Y]; 0 log 0 = 0."""
    target = jnp.exp(log_target)
    finite = target > 0
    gap = jnp.where(finite, log_target, 0) - jnp.where(finite, log_student, 0)
    return jnp.where(finite, target * gap, 0).sum(-1)


def safe_sqrt(square: jax.Array) -> jax.Array:
    """The square root with gradient 0 at 0 (PyTorch's subgradient), never nan."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def distance(
    kind: str,
    student: jax.Array,
    target: jax.Array,
    mask: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    js_form: str = "true",
) -> jax.Array:
    """The distance f32[] of two batches of outputs. No gradient flows to the target.

    * `kl`: T^2 times the mean over real rows of KL(softmax(target / T) ||
      softmax(student / T)), where T is the temperature [tau].
    * `norm`: the Frobenius norm of the whole batch's difference, on raw outputs.
    * `js`: mean over real rows of 1/2 KL(p||m) + 1/2 KL(q||m), m the midpoint, at
      temperature 1; the `js_form` `reversed` swaps the arguments of both terms.

    `student` and `target` are f32[B, W], where W is Y for logits and D for embeddings.
    `mask` bool[B] has the real rows. Raises ValueError for another kind or form.
    """
    options.check_one_of("distance", kind, DISTANCES)
    options.check_one_of("js_form", js_form, JS_FORMS)
    target = jax.lax.stop_gradient(target)
    column = mask[:, None]
    # Padding rows are arbitrary. Equal finite rows have distance 0.
    student = jnp.where(column, student, 0)
    target = jnp.where(column, target, 0)
    if kind == "kl":
        gaps = kl(
            jax.nn.log_softmax(target / temperature),
            jax.nn.log_softmax(student / temperature),
        )
        return temperature**2 * losses.masked_mean(gaps, mask)
    if kind == "norm":
        return safe_sqrt(((student - target) ** 2).sum())
    log_p, log_q = jax.nn.log_softmax(student), jax.nn.log_softmax(target)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    if js_form == "true":
        gaps = kl(log_p, log_m) + kl(log_q, log_m)
    else:
        gaps = kl(log_m, log_p) + kl(log_m, log_q)
    return 0.5 * losses.masked_mean(gaps, mask)


def js(p: jax.Array, q: jax.Array) -> jax.Array:
    """Jensen-Shannon divergence of logits f32[..., Y], over the last axis."""
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    # Rounding may give slightly less than 0 between equals.
    return jnp.maximum(0.5 * (kl(log_p, log_m) + kl(log_q, log_m)), 0)


def symkl(p: jax.Array, q: jax.Array) -> jax.Array:
    """1/2 KL(p||q) + 1/2 KL(q||p) of logits f32[..., Y], over the last axis."""
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return jnp.maximum(0.5 * (kl(log_p, log_q) + kl(log_q, log_p)), 0)
