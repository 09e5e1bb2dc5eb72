"""Random changes of examples, drawn separately for each example."""

import jax
import jax.numpy as jnp

KINDS = ("none", "crop_flip")
# The fraction of positions of a text that is chosen. Most of them become the mask, some
# become a random word, and the others stay.
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
# The positions that count in a text's loss: all, or those that the model must guess
POSITIONS = ("all", "chosen")


def crop_flip(image: jax.Array, key: jax.Array) -> jax.Array:
    """A random crop of an image within a black margin, mirrored half of the time.

    The image is [H, W, C] of any dtype, and the margin an eighth of each side.
    """
    height, width, channels = image.shape
    margins = height // 8, width // 8
    padded = jnp.pad(image, (*((m, m) for m in margins), (0, 0)))
    of_row, of_column, of_flip = jax.random.split(key, 3)
    at = [
        jax.random.randint(one, (), 0, 2 * margin + 1)
        for one, margin in zip((of_row, of_column), margins, strict=True)
    ]
    crop = jax.lax.dynamic_slice(padded, (*at, 0), (height, width, channels))
    return jnp.where(jax.random.bernoulli(of_flip), crop[:, ::-1], crop)


def mask_words(
    words: jax.Array, key: jax.Array, num_words: int
) -> tuple[jax.Array, jax.Array]:
    """Hides some words of a row of text int32[T] as for a masked language model.

    `words` are 0..V-1, and V = `num_words` is also the mask's number. Each row needs
    its own `key`. Returns (int32[T] of 0..V, the chosen positions bool[T]).
    """
    of_choice, of_kind, of_word = jax.random.split(key, 3)
    is_chosen = jax.random.bernoulli(of_choice, CHOSEN, words.shape)
    kind = jax.random.uniform(of_kind, words.shape)
    drawn = jax.random.randint(of_word, words.shape, 0, num_words)
    other = jnp.where(kind < MASKED + RANDOM, drawn, words)
    other = jnp.where(kind < MASKED, num_words, other)
    return jnp.where(is_chosen, other, words), is_chosen
