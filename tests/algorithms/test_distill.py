"""Distillation: its targets against numpy, its teacher, and what is refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import distill
from fedjax_pfl import local_training, teacher, types
from launch import build
from launch.assemble import model_files
from tests.algorithms import conftest, plain
from tests.toys import model as toys
from tests.toys import taught

KINDS = ("kd", "ls", "pt", "sim", "pt_sim")


@pytest.fixture
def batch(problem):
    """Four real examples and a padding row of nan."""
    rows = problem.table.owned(0)[:5]
    image, _ = problem.data.gather(jnp.asarray(rows))
    return local_training.Batch(
        image=image.at[4].set(jnp.nan),
        label=jnp.array([0, 3, 1, 3, 2]),
        mask=jnp.arange(5) < 4,
        position=jnp.arange(5),
        step=0,
        epoch=0,
        key=jax.random.key(0),
    )


@pytest.fixture
def taught_by(problem):
    """(task, data) with a network of random numbers as the teacher."""

    def make(name="tiny"):
        network = conftest.NETWORKS[name]
        variables = conftest.random_params(network, 2)
        data = problem.data.replace(teacher=variables)
        return problem.task_of(teacher=network), data

    return make


def by_hand(kind, answer, label, kernel):
    """The distribution that one example is drawn to, class by class."""
    wanted = np.zeros(4)
    for c in range(4):
        is_label = c == label
        if kind == "kd":
            wanted[c] = answer[c]
        elif kind == "ls":
            wanted[c] = 0.3 / 4 + (0.7 if is_label else 0)
        elif kind == "pt":
            wanted[c] = answer[label] if is_label else (1 - answer[label]) / 3
        elif kind == "sim":
            one, other = kernel[:, label], kernel[:, c]
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            wanted[c] = np.exp(max(cosine, 0) ** 0.3 / 0.3)
    if kind == "pt_sim":
        both = [by_hand(one, answer, label, kernel) for one in ("pt", "sim")]
        return sum(both) / 2
    return wanted / wanted.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_targets_and_loss_by_hand(kind, taught_by, batch):
    """Cross-entropy + weight KL(target || model), over the real rows."""
    task, data = taught_by()
    image = np.asarray(batch.image[:4]).reshape(4, -1)
    layers = plain.layers(data.teacher.params)
    answer = plain.softmax(plain.logits(layers, image))
    kernel = layers[-1][0]
    label = np.asarray(batch.label)
    expected = [by_hand(kind, answer[i], label[i], kernel) for i in range(4)]
    hparams = distill.HParams(distill_target=kind, smoothing=0.3, distill_weight=0.7)
    found = distill.target(hparams, task, data, batch)[:4]
    np.testing.assert_allclose(found, expected, rtol=1e-5)

    student = conftest.random_params(conftest.NETWORKS["tiny"], 5)
    p = plain.softmax(plain.logits(plain.layers(student.params), image))
    hard = -np.log(p[np.arange(4), label[:4]]).mean()
    gap = (expected * (np.log(expected) - np.log(p))).sum(1).mean()
    loss, _ = distill.distillation(hparams, task, data)(*student, batch)
    np.testing.assert_allclose(loss, hard + 0.7 * gap, rtol=1e-5)
    for weight, expected in (0.7, 0.3 * hard + 0.7 * gap), (0.0, 0.3 * hard):
        mixed = dataclasses.replace(hparams, label_weight=0.3, distill_weight=weight)
        loss, _ = distill.distillation(mixed, task, data)(*student, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_last_exit_teaches(taught_by, batch):
    """Of a teacher with exits, also of its first stages alone."""
    task, data = taught_by("with_exits")
    image = batch.image[:4]
    outs, _ = task.teacher.forward(*data.teacher, image)
    np.testing.assert_array_equal(teacher.logits(task, data, image), outs[-1])
    part = conftest.NETWORKS["with_exits"]._replace(stage_names=("s1", "s2"))
    held = types.Variables(*(stages[:2] for stages in data.teacher))
    data = data.replace(teacher=held)
    found = teacher.logits(task._replace(teacher=part), data, image)
    np.testing.assert_allclose(found, outs[1], rtol=1e-6)
    exit_layer = data.teacher.params[1]["exit"]
    np.testing.assert_array_equal(teacher.class_vectors(data, 4), exit_layer["kernel"])
    hidden = {"first": np.zeros((4, 9)), "last": np.ones((9, 4)), "bias": np.zeros(4)}
    data = data.replace(teacher=types.Variables(({}, hidden), ({}, {})))
    np.testing.assert_array_equal(teacher.class_vectors(data, 4), hidden["last"])


def test_a_teacher_is_in_eval_mode(tmp_path, blobs):
    """Running statistics: its answer to an image is the same in every batch."""
    path = tmp_path / "teacher.npz"
    taught.write(path, "convnet", width=0.05)
    made = build.experiment(**OPTIONS, dataset=blobs, teacher=str(path))
    data = made.data.replace(partition=None)
    image, _ = data.gather(jnp.arange(6))
    whole = teacher.logits(made.task, data, image)
    part = teacher.logits(made.task, data, image[2:3])
    np.testing.assert_allclose(whole[2:3], part, rtol=1e-5)
    assert np.ptp(whole, axis=0).max() > 1e-3


OPTIONS = {
    "algo": "distill",
    "preset": "none",
    "model": "mlp",
    "model_width": 0.1,
    "num_clients": 1,
    "rounds": 2,
    "local_epochs": 1,
    "devices": 1,
}


@pytest.fixture
def path(tmp_path):
    """The file of a teacher."""
    taught.write(tmp_path / "teacher.msgpack")
    return tmp_path / "teacher.msgpack"


def trained(dataset, **given):
    """The server's model of a run, and the run."""
    made = build.experiment(**OPTIONS | {"dataset": dataset} | given)
    made.run(progress=False)
    return jax.tree.map(np.asarray, made.state.server), made


def test_weight_zero_is_fedavg(blobs, path):
    """Bit for bit; with a weight it is another model, and the teacher stays."""
    plainly, _ = trained(blobs, algo="fedavg", train_share=0.5)
    more = {"teacher": str(path), "train_share": 0.5}
    without, _ = trained(blobs, distill_weight=0.0, **more)
    chex.assert_trees_all_equal(without, plainly)
    drawn, made = trained(blobs, **more)
    assert plain.differs(drawn, plainly, 1e-4)
    _, saved = taught.write(path.with_name("same.msgpack"))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, made.data.teacher), saved)


def test_what_a_teacher_says_is_learned(blobs, path):
    """Drawn to it strongly, a model answers as the teacher does."""
    options = {"teacher": str(path), "rounds": 8, "local_epochs": 5, "client_lr": 0.3}
    server, made = trained(blobs, distill_weight=20.0, clip_norm=1.0, **options)
    data = made.data.replace(partition=None)
    rows = jnp.asarray(made.data.partition.train.row[0][:100])
    image, label = data.gather(rows)
    wanted = np.argmax(teacher.logits(made.task, data, image), 1)
    one = jax.tree.map(lambda leaf: leaf[0], server)
    found, _ = made.task.model.forward(*one, image)
    assert (wanted == np.asarray(label)).mean() < 0.5
    assert (np.argmax(found, 1) == wanted).mean() > 0.8


def test_a_run_goes_on_with_its_teacher(blobs, path, tmp_path):
    """The same bits after a stop; another file of the same name is refused."""
    options = {"teacher": str(path), "workdir": str(tmp_path / "run")}
    whole, _ = trained(blobs, teacher=str(path))
    begun = build.experiment(**OPTIONS | {"dataset": blobs} | options)
    begun.run(1, progress=False)
    resumed, _ = trained(blobs, resume=True, **options)
    chex.assert_trees_all_equal(resumed, whole)
    model, variables = taught.write(path)
    moved = jax.tree.map(lambda leaf: leaf * 2, variables)
    model_files.write(path, model, moved, {}, 1.0)
    with pytest.raises(ValueError, match="holds a run with --teacher_sha256"):
        trained(blobs, resume=True, **options)


def test_a_file_says_what_it_holds(blobs, tmp_path, monkeypatch):
    """Model, width and level; for a file that does not, the flags do."""
    monkeypatch.setitem(models.MODELS, "with_exits", toys.with_exits)
    options = {"algo": "depthfl", "model": "with_exits", "level_mix": "1:1:1"}
    options |= {"levels": "fixed", "max_level": 2, "num_clients": 3}
    first = build.experiment(
        **OPTIONS | {"dataset": blobs, "model_width": 0.5, **options}
    )
    for suffix in model_files.SUFFIXES:
        path = first.save_model(tmp_path / f"two{suffix}")
        tree = model_files.read(path)
        assert tree["model"] == ("with_exits", 0.5, 2)
        made = build.experiment(**OPTIONS, dataset=blobs, teacher=str(path))
        assert made.task.teacher.stage_names == first.task.model.stage_names[:2]
        chex.assert_trees_all_equal(
            jax.tree.map(np.asarray, made.data.teacher.params),
            jax.tree.map(np.asarray, first.client_model().variables.params),
        )
    flat = {"/".join(k): v for k, v in _flat({"stages": tree["stages"]})}
    np.savez(tmp_path / "old.npz", **flat)
    old = {"teacher": str(tmp_path / "old.npz")}
    with pytest.raises(ValueError, match="does not say which .*--teacher_model"):
        build.experiment(**OPTIONS, dataset=blobs, **old)
    old |= {"teacher_model": "with_exits", "teacher_width": 0.5, "teacher_level": 2}
    again = build.experiment(**OPTIONS, dataset=blobs, **old)
    assert again.task.teacher is made.task.teacher


def test_a_last_exit_alone_teaches(blobs, tmp_path, monkeypatch):
    """A file of FedAvg on a net with exits: one more stage than the net has."""
    monkeypatch.setitem(models.MODELS, "with_exits", toys.with_exits)
    given = OPTIONS | {"dataset": blobs, "algo": "fedavg", "model": "with_exits"}
    first = build.experiment(**given)
    path = first.save_model(tmp_path / "alone.msgpack")
    assert model_files.read(path)["model"] == ("with_exits", 0.1, 4)
    made = build.experiment(**OPTIONS, dataset=blobs, teacher=str(path))
    assert made.task.teacher == first.task.model
    chex.assert_trees_all_equal(
        made.data.teacher, jax.tree.map(np.asarray, first.client_model().variables)
    )


def _flat(tree, before=()):
    """(path, array) of a nested dictionary."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, (*before, name))
        else:
            yield (*before, name), value


@pytest.mark.parametrize(
    "change, words",
    [
        ({"teacher": ""}, "--distill_target=kd needs --teacher: file of the teacher's"),
        ({"teacher": "nix.npz"}, "--teacher=nix.npz: No such file"),
        ({"teacher_model": "convnet"}, "--teacher_model=convnet: .* says mlp; omit it"),
        ({"teacher_width": 0.5}, "--teacher_width=0.5: .* says 1.0; omit it"),
        ({"teacher_level": 2}, "--teacher_level=2: .* says 3; omit it"),
        ({"image_size": 10}, "holds another model than mlp of width 1 .*10x10x1"),
        ({"rotate_classes": 4}, "holds another model than mlp .* for 16 classes"),
        ({"train_share": 0.0}, "--train_share=0.0: expected more than 0"),
        ({"train_share": 1.5}, "--train_share=1.5: expected at most 1"),
    ],
)
def test_refused(blobs, path, change, words):
    """One line: what came, what was expected, which flag to change."""
    given = OPTIONS | {"dataset": blobs, "teacher": str(path)} | change
    with pytest.raises(ValueError, match=words) as error:
        build.experiment(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, level, words",
    [
        ("own_net", 3, "--teacher=.* holds the model own_net, expected one of mlp"),
        ("mlp", 2, "--teacher_level=2: mlp has 3 stages, expected 3, as it has no"),
        ("depth_convnet", 4, "--teacher_model=depth_convnet does not fit examples"),
        ("depth_convnet", 5, "holds another model than depth_convnet .* 5 stages"),
        ("depth_convnet", 6, "--teacher_level=6: .*expected 1 to 4, or 5 where the l"),
    ],
)
def test_files_of_other_models(blobs, path, name, level, words):
    """What the file says of its model is checked as options are."""
    model, variables = taught.write(path)
    names = tuple(f"s{i}" for i in range(level))
    odd = model._replace(name=name, stage_names=names)
    model_files.write(path, odd, cut(variables, level), {}, 1.0)
    with pytest.raises(ValueError, match=words) as error:
        build.experiment(**OPTIONS, dataset=blobs, teacher=str(path))
    assert "\n" not in str(error.value)


def cut(variables, level):
    """As many stages as a level has, some of them twice."""
    repeated = (tuple(part) * 2 for part in variables)
    return types.Variables(*(part[:level] for part in repeated))


def test_one_client_is_the_papers_setting():
    """`--preset=depthfl` has one client for it, and a hundred for others."""
    made = build.experiment(algo="distill", distill_target="ls", model_width=0.1)
    assert made.config.num_clients == made.config.clients_per_round == 1
