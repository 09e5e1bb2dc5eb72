"""A fixed teacher: a trained model from a file, which answers and does not learn.

`launch` reads the file. `task.teacher` is its model and `data.teacher` its variables,
so that two teachers of one kind have the same programs.
"""

import dataclasses

import jax

from fedjax_pfl import options, types

option = options.option
# The values of `--distill_target` that need a teacher
_ASKED = {"distill_target": ("kd", "pt", "sim", "pt_sim")}


@dataclasses.dataclass(frozen=True)
class Taught:
    """Options of algorithms with a teacher."""

    teacher: str = option(
        "", "file of the teacher's model (launch.export)", needs=_ASKED, is_needed=True
    )
    teacher_model: str = option(
        "", "the teacher's --model, for a file that does not name it", needs=_ASKED
    )
    teacher_width: float = option(
        0.0,
        "the teacher's --model_width, for a file that does not say it; 0 = 1",
        minimum=0,
        maximum=1000,
        needs=_ASKED,
        is_static=True,
    )
    teacher_level: int = option(
        0,
        "how many stages the teacher has, likewise; 0 = all of its model",
        minimum=0,
        needs=_ASKED,
    )


def logits(task: types.Task, data: types.Data, image: jax.Array) -> jax.Array:
    """The teacher's logits f32[B, Y] in eval mode, those of its last exit.

    `image` f32[B, ...] is normalised, and `data` has the teacher's variables.
    """
    out, _ = task.teacher.forward(*data.teacher, image)
    return jax.lax.stop_gradient(out[-1] if task.teacher.has_exits else out)


def class_vectors(data: types.Data, num_classes: int) -> jax.Array:
    """The kernel f32[D, Y] of the teacher's last layer, a vector for each class.

    Raises ValueError if its last stage has no such layer, or several.
    """
    kernels = [
        leaf
        for leaf in jax.tree.leaves(data.teacher.params[-1])
        if leaf.ndim == 2 and leaf.shape[1] == num_classes
    ]
    if len(kernels) != 1:
        raise ValueError(
            f"--teacher: its last stage has {len(kernels)} kernels [D, {num_classes}], "
            "expected one dense layer; take another teacher or --distill_target"
        )
    return kernels[0]
