"""Random changes of a train batch's images, drawn for each image by itself."""

import jax
import jax.numpy as jnp

KINDS = ("none", "crop_flip")


def crop_flip(image: jax.Array, key: jax.Array) -> jax.Array:
    """A random crop of the image within a black margin, mirrored half of the time.

    Args:
        image: [H, W, C], of any dtype. The margin is an eighth of each side.
        key: A key of this image alone.
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
