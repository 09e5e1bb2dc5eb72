"""An evaluation of one variant outside of a run: both programs, and what they give."""

import functools

import jax
import numpy as np

from fedjax_pfl import evaluate


def both(method, state, cohort, data, scoring, how, jit=True):
    """`evaluate.joined` of all clients, of which the state has the rows in order."""
    num_clients = data.partition.test.start.shape[0]
    ids = np.arange(num_clients, dtype=np.int32)
    fixed = {"scoring": scoring, "how": how}
    shared = functools.partial(evaluate.of_shared, method, **fixed)
    sample = ()
    if scoring.num_sampled:
        sample = evaluate.sampled_clients(state.key, num_clients, scoring.num_sampled)
    fixed_of_own = fixed | {"ids": ids, "sample": sample}
    own = functools.partial(evaluate.of_clients, method, **fixed_of_own)
    if jit:
        shared, own = jax.jit(shared), jax.jit(own)
    given = state, cohort, data
    found = jax.tree.map(np.asarray, (shared(*given), own(*given)))
    return evaluate.joined(found[0], [(ids, found[1])], num_clients)
