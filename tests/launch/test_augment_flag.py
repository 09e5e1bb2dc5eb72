"""`--augment`: part of a run's identity, the same bits after a stop, or one line."""

import numpy as np
import pytest

from launch import build

OPTIONS = {
    "algo": "fedavg",
    "model": "mlp",
    "preset": "none",
    "num_clients": 3,
    "clients_per_round": 2,
    "local_epochs": 1,
    "batch_size": 8,
    "eval_every": 1,
    "partition": "iid",
    "devices": 1,
}


@pytest.fixture(scope="module")
def pictures():
    """Sixty images of 32 x 32 x 3."""
    gen = np.random.default_rng(0)
    return gen.integers(0, 256, (60, 32, 32, 3)).astype(np.uint8), np.arange(60) % 4


def test_resumed_in_other_chunks_to_the_same_run(pictures, tmp_path):
    given = OPTIONS | {"dataset": pictures, "augment": "crop_flip"}
    whole = build.experiment(**given, rounds=3).run(progress=False)
    plain = build.experiment(**OPTIONS, dataset=pictures, rounds=3)
    assert whole["parameters_sha256"] != plain.run(progress=False)["parameters_sha256"]
    folder = str(tmp_path / "run")
    build.experiment(**given, rounds=1, workdir=folder).run(progress=False)
    resumed = build.experiment(**given, rounds=3, workdir=folder, resume=True)
    assert (
        resumed.run(progress=False)["parameters_sha256"] == (whole["parameters_sha256"])
    )
    with pytest.raises(ValueError, match="augment"):
        other = given | {"augment": "none", "workdir": folder, "resume": True}
        build.experiment(**other, rounds=3).run(progress=False)


def test_refused(pictures):
    vectors = np.zeros((60, 5), np.float32), pictures[1]
    for more in ({"augment": "crop_flip"}, {"normalization": "cifar100"}):
        with pytest.raises(ValueError, match=rf"--{next(iter(more))}=.*\[5\]"):
            build.experiment(**OPTIONS | more, dataset=vectors)
