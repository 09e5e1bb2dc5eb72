"""Files of models that other programs read: `.safetensors` and `.stablehlo`."""

import json
import subprocess
import sys

import numpy as np
import pytest
from flax import linen as nn

from launch import build
from launch.assemble import model_files
from tests import synthetic

NAMES = np.array(["owl", "cat", 'a "b" \\ ü\n', "dog"])
SMALL = {"num_clients": 4, "partition": "iid", "batch_size": 16, "devices": 1}
SMALL["summary"] = "last"


class Whole(nn.Module):
    """A body with statistics and an affine layer."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        return nn.Dense(4)(x)


@pytest.fixture(scope="module")
def arrays():
    """240 small images of 4 classes with names that JSON must escape."""
    source = synthetic.blobs(240, (8, 8, 1), 4)
    return source.image, NAMES[source.label]


@pytest.fixture(scope="module")
def trained(arrays):
    """A round on two devices, where models are placed on both."""
    given = {"algo": "fedavg", "model": [("later", Whole())], "devices": 2}
    made = build.experiment(dataset=arrays, rounds=1, **SMALL | given)
    made.run(progress=False)
    return made


def elsewhere(folder, code):
    """Runs code in a process that imports nothing of ours; what it saved as out.npy."""
    ours = "fedjax_pfl algorithms models data launch".split()
    after = f"\nimport sys; assert not [n for n in {ours} if n in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", code + after], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return np.load(folder / "out.npy")


def softmax(logits):
    """Probabilities of logits [N, Y]."""
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


TENSORS = """
import json
import numpy as np
import safetensors
from safetensors.numpy import load_file

saved = load_file("one.safetensors")
with safetensors.safe_open("one.safetensors", "numpy") as file:
    about = file.metadata()
p, s = "stages/later/params/", "stages/later/stats/batch_stats/BatchNorm_0/"
x = (np.load("x.npy") - saved["input/mean"]) * saved["input/scale"]
h = x.reshape(len(x), -1) @ saved[p + "Dense_0/kernel"] + saved[p + "Dense_0/bias"]
h = (h - saved[s + "mean"]) / np.sqrt(saved[s + "var"] + 1e-5)
h = h * saved[p + "BatchNorm_0/scale"] + saved[p + "BatchNorm_0/bias"]
h = np.maximum(h, 0) @ saved[p + "Dense_1/kernel"] + saved[p + "Dense_1/bias"]
np.save("out.npy", h)
json.dump(json.loads(about["classes"]), open("classes.json", "w"))
"""
PROGRAM = """
import json
import jax
import numpy as np
from jax import export

program = export.deserialize(bytearray(open("one.stablehlo", "rb").read()))
assert program.platforms == ("cpu", "tpu", "cuda")
x = np.load("x.npy")
parts = [jax.jit(program.call)(part) for part in (x[:1], x[1:])]
np.save("out.npy", np.concatenate(parts))
json.dump(json.loads(program.fun_name)["classes"], open("classes.json", "w"))
"""


@pytest.mark.parametrize(
    "suffix, code", [(".safetensors", TENSORS), (".stablehlo", PROGRAM)]
)
def test_read_without_this_package(trained, arrays, tmp_path, suffix, code):
    """The logits of raw images of any number, and the names of the classes."""
    trained.save_model(tmp_path / f"one{suffix}")
    np.save(tmp_path / "x.npy", arrays[0][:9])
    found = softmax(elsewhere(tmp_path, code))
    np.testing.assert_allclose(found, trained.predict(None, arrays[0][:9]), atol=1e-6)
    classes = json.loads((tmp_path / "classes.json").read_text())
    assert classes == list(trained.classes) and set(classes) == set(NAMES)


def test_safetensors_hold_what_others_hold(trained, tmp_path):
    """Arrays, order of the stages, facts and names are those of a msgpack."""
    paths = [tmp_path / f"one.{end}" for end in ("safetensors", "msgpack")]
    one, other = (model_files.read(trained.save_model(path)) for path in paths)
    assert one.keys() == other.keys()
    for key in one.keys() - {"stages", "input", "rows"}:
        assert one[key] == other[key]
    np.testing.assert_array_equal(one["rows"].trained, other["rows"].trained)
    np.testing.assert_array_equal(one["input"]["scale"], other["input"]["scale"])
    content = bytearray(paths[0].read_bytes())
    content[-5] ^= 1
    paths[0].write_bytes(content)
    with pytest.raises(ValueError, match="do not match its checksum"):
        model_files.read(paths[0])


@pytest.mark.parametrize("model", ["mlp", "cnn_same"])
def test_a_run_starts_from_safetensors(arrays, tmp_path, model):
    """Its server has the file's values; a program is refused in one line."""
    given = SMALL | {"dataset": arrays, "model": model, "algo": "fedavg"}
    made = build.experiment(seed=3, **given)
    path = made.save_model(tmp_path / "one.safetensors")
    assert list(model_files.read(path)["stages"]) == list(
        made.client_model().model.stage_names
    )
    begun = build.experiment(init_from=str(path), **given)
    np.testing.assert_array_equal(
        begun.predict(None, arrays[0][:3]), made.predict(None, arrays[0][:3])
    )
    program = made.save_model(tmp_path / "one.stablehlo")
    with pytest.raises(ValueError, match=r"one.stablehlo is .* \(a program") as error:
        build.experiment(init_from=str(program), **given)
    assert "\n" not in str(error.value)


def test_a_program_of_several_models(arrays, tmp_path):
    """A client that an ensemble serves has no single model, but a program."""
    given = SMALL | {"dataset": arrays, "model": "mlp", "algo": "splitmix"}
    made = build.experiment(level_mix="1:1", num_bases=2, **given)
    with pytest.raises(ValueError, match="write .stablehlo"):
        made.save_model(tmp_path / "one.safetensors", client_id=0)
    made.save_model(tmp_path / "one.stablehlo", client_id=0)
    np.save(tmp_path / "x.npy", arrays[0][:5])
    found = softmax(elsewhere(tmp_path, PROGRAM))
    np.testing.assert_allclose(found, made.predict(0, arrays[0][:5]), atol=1e-6)


@pytest.mark.parametrize(
    "suffix, package", [(".safetensors", "safetensors"), (".stablehlo", "flatbuffers")]
)
def test_a_missing_package(trained, tmp_path, monkeypatch, suffix, package):
    """One line with the cure, and no file."""
    for name in (package, f"{package}.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'fedjax_pfl\[export\]'"):
        trained.save_model(tmp_path / f"one{suffix}")
    assert not list(tmp_path.iterdir())
