"""What is read from a program as XLA prints it."""

import importlib.util
import os
import types

import jax
import pytest
from jax.experimental import topologies

from launch import build
from launch.machine import target
from launch.run import cost

# Two loops in a loop, a condition and a call; a fusion's computation counts once.
PROGRAM = """HloModule jit_rounds, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %t = f32[8]{0} tanh(%p), backend_config={"estimated_cycles":"1000"}
}

%called (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%cond, body=%small
  ROOT %c = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"5"}
}

%cheap (p: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1"}
}

%dear (p: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"70"}
}

%small (p: f32[8]) -> f32[8] {
  ROOT %f = f32[8]{0} fusion(%p), calls=%fused, backend_config={"estimated_cycles":"20"}
}

%step.1 (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), calls=%fused, backend_config={"estimated_cycles":"300"}
  %g = f32[8]{0} tuple(%f), metadata={op_name="jit(rounds)/transpose(jvp(x))/dot"}
  %w = f32[8]{0} while(%p), condition=%cond, body=%small
  ROOT %b = f32[8]{0} conditional(%i, %f, %f), branch_computations={%cheap, %dear}
}

%cond (p: f32[8]) -> pred[] {
  ROOT %lt = pred[] compare(%p, %p), direction=LT
}

%round (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%cond, body=%step.1
  ROOT %g = f32[8]{0} call(%w), to_apply=%called
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), calls=%fused, backend_config={"estimated_cycles":"4"}
  ROOT %w = f32[8]{0} while(%f), condition=%cond, body=%round
}
"""


def test_cycles_by_loop():
    found = cost.parsed(PROGRAM)
    (round,) = found.loops
    step, small = round.loops
    assert (found.cycles, round.cycles, step.cycles, small.cycles) == (4, 5, 370, 20)
    assert found.total == 4 + 5 + (370 + 20) + 20
    assert list(found.steps()) == [step]


# As a GPU's compiler prints it: a fusion is one kernel, whatever its computation has.
ON_A_GPU = """HloModule jit_rounds, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %c = f32[8]{0} copy(%p)
  ROOT %t = f32[8]{0} tanh(%c), metadata={op_name="jit(rounds)/transpose(jvp(x))/tanh"}
}

%step (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  %d = (f32[8]{0}, s8[64]{0}) custom-call(%f), custom_call_target="__cublas$gemm"
  ROOT %g = f32[8]{0} get-tuple-element(%d), index=0
}

%round (p: f32[8]) -> f32[8] {
  %c = f32[8]{0} copy(%p)
  ROOT %w = f32[8]{0} while(%c), condition=%cond, body=%step
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), body=%round, backend_config={"known_trip_count":{"n":"36"}}
}
"""


def test_kernels_by_loop():
    found = cost.parsed(ON_A_GPU)
    (round,) = found.loops
    (step,) = round.loops
    assert (found.kernels, round.kernels, step.kernels) == (0, 1, 2)
    assert (round.turns, step.turns) == (36, 0)
    assert (found.all_kernels, found.num_loops, found.unknown()) == (3, 2, 1)
    assert list(found.steps()) == [step]


def test_without_the_compiler(unequal):
    """One line says what to install, and which chips there are."""
    folder = jax.config.jax_compilation_cache_dir
    with pytest.raises(ValueError, match="--target=tpu:v1: expected one of tpu:v4"):
        build.experiment(algo="fedavg", dataset=unequal, target="tpu:v1")
    assert jax.config.jax_compilation_cache_dir == folder
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match="needs the TPU's compiler .* pip install"):
            build.experiment(algo="fedavg", dataset=unequal, target="tpu:v5e")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        with pytest.raises(ValueError, match="pip install jax-cuda13-plugin==0"):
            build.experiment(algo="fedavg", dataset=unequal, target="gpu:h100")


def test_a_compiler_without_an_assembler(monkeypatch):
    """jax's plugin for CUDA comes without one from jax 0.11 on."""

    def fails(device):
        raise jax.errors.JaxRuntimeError("No PTX compilation provider.\n - ptxas: ...")

    made = types.SimpleNamespace(devices=jax.devices())
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: made)
    monkeypatch.setattr(target, "_compile_for", fails)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with pytest.raises(ValueError) as caught:
        target.devices("gpu:h100")
    assert str(caught.value) == (
        "--target=gpu:h100 needs a GPU's compiler (No PTX compilation provider. - "
        "ptxas: ...); "
        f"pip install jax-cuda13-plugin=={jax.__version__} nvidia-cuda-nvcc"
    )


def test_figures_need_a_target(unequal):
    made = build.experiment(algo="fedavg", dataset=unequal, model="mlp")
    with pytest.raises(ValueError, match="give a target"):
        made.cost_analysis()
