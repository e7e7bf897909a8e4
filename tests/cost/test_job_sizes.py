"""Test that sizes read from a configuration file equal those that Megatron derives from the same file."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vp.cost.layers.job_sizes import job_of
from megatron_vp.cost.layers.layer_types import stage_layers
from megatron_vp.cost.layers.shapes import Fp8Recipe, Job, ModelShape
from megatron_vp.cost.planning.layer_division import divided
from megatron_vp.jobs.layer_kind import LayerKind
from megatron_vp.jobs.layout_text import layers_in, stages_behind_mtp
from megatron_vp.jobs.virtual_stages import ENDS, chunks_asked
from megatron_vp.jobs.yaml_files import read_leaves
from megatron_vp.mcore.start.preflight import check_job
from megatron_vp.schedule import Placement

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "quickstart")
TINY = {
    **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 500, "seq_length": 32},
    **{"micro_batch_size": 2},
}
EXPERT_GEGLU = {"swiglu": False, "quick_geglu": True, "num_experts": 4}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_defaults_are_megatrons(path):
    leaves = {leaf.key: leaf.value for leaf in read_leaves([path])}
    written = job_of(leaves)
    args = check_job([f"--config={path}", f"--config={CONFIGS / 'data' / 'mock.yaml'}"], written.gpus).args
    # Which layers run here depends on what is installed.
    found = replace(
        job_of(vars(args), written.gpus), layers=written.layers, glu_intermediates=written.glu_intermediates
    )
    assert found == written
    assert job_of(leaves, 4 * written.gpus).data == 4 * written.data


def test_the_cross_entropy_is_the_flags():
    fused = {**TINY, "cross_entropy_loss_fusion": True}
    found = [job_of(each).cross_entropy for each in (TINY, fused, {**fused, "cross_entropy_fusion_impl": "te"})]
    assert found == ["eager", "native", "te"]


def test_a_vocabulary_is_padded_as_megatron_pads():
    assert job_of(TINY).model.vocab == 512
    assert job_of({**TINY, "tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 64}).model.vocab == 512
    assert job_of({**TINY, "tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 300}).model.vocab == 600


@pytest.mark.parametrize(
    ("changes", "kind", "tensors"),
    [
        ({}, LayerKind.ENGINE, 0),
        ({"transformer_impl": "transformer_engine", "core_attention": "megatron"}, LayerKind.ENGINE, 0),
        ({"no_bias_swiglu_fusion": True}, LayerKind.ENGINE, 2),
        ({"core_attention": "sdpa"}, LayerKind.LOCAL_SDPA, 2),
        ({"transformer_impl": "local"}, LayerKind.LOCAL, 2),
        ({"transformer_impl": "local", "swiglu": False}, LayerKind.LOCAL, 0),
        ({"swiglu": False, "quick_geglu": True}, LayerKind.ENGINE, 3),
        (EXPERT_GEGLU, LayerKind.ENGINE, 0),
        ({**EXPERT_GEGLU, "activation_func_clamp_value": 7.0}, LayerKind.ENGINE, 2),
        ({**EXPERT_GEGLU, "disable_bias_linear": True}, LayerKind.ENGINE, 3),
        ({**EXPERT_GEGLU, "add_bias_linear": False}, LayerKind.ENGINE, 3),
        ({**EXPERT_GEGLU, "no_bias_gelu_fusion": True}, LayerKind.ENGINE, 3),
        ({**EXPERT_GEGLU, "transformer_impl": "local"}, LayerKind.LOCAL, 3),
    ],
)
def test_the_layers_are_the_flags(changes, kind, tensors):
    found = job_of({**TINY, "swiglu": True, **changes})
    assert (found.layers, found.glu_intermediates) == (kind, tensors)


@pytest.mark.parametrize(
    ("changes", "window", "windowed"),
    [
        ({}, 0, 0.0),
        ({"window_size": "127,0"}, 128, 1.0),
        ({"window_size": [127, 0], "window_attn_skip_freq": 2}, 128, 0.5),
        ({"window_size": "(511, 0)", "window_attn_skip_freq": "4"}, 512, 0.75),
        ({"window_size": "127,0", "window_attn_skip_freq": "([1]*3+[0])*2"}, 128, 0.0),
        ({"window_size": "-1,0"}, 0, 0.0),
        ({"window_attn_skip_freq": 2}, 0, 0.0),
    ],
)
def test_windows_are_the_flags(changes, window, windowed):
    model = job_of({**TINY, **changes}).model
    assert (model.window, model.windowed) == (window, windowed)


def test_kernels_and_dispatchers_are_the_flags():
    older = {**TINY, "attention_backend": "flash", "moe_token_dispatcher_type": "flex"}
    found = [(job_of(each).flash_attention_2, job_of(each).dispatcher) for each in (TINY, older)]
    assert found == [(0, ""), (1, "flex")]
    assert job_of({**TINY, "moe_token_dispatcher_type": "alltoall"}).dispatcher == "alltoall"
    clamped = job_of({**TINY, "activation_func_clamp_value": 7.0, "disable_bias_linear": True}).model
    assert clamped.clamped and not clamped.expert_biases and job_of(TINY).model.expert_biases


def test_delayed_scaling_leaves_the_age_of_the_attention_open_unless_its_backend_is_said():
    found = [job_of({**TINY, **fp8}).flash_attention_2 for fp8 in (DELAYED, SCALED, {"fp8_format": "hybrid"})]
    assert found == [0.5, 0, 0.5]
    named = [{**TINY, **DELAYED, "attention_backend": name} for name in ("fused", "flash", "auto")]
    assert [job_of(each).flash_attention_2 for each in named] == [0, 1, 0.5]


NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
DELAYED, SCALED = ({"fp8_format": "hybrid", "fp8_recipe": recipe} for recipe in ("delayed", "tensorwise"))


@pytest.mark.parametrize(
    ("changes", "kept", "takes_gradients"),
    [
        ({"bf16": True}, 4 + 4 + 2, True),
        ({"bf16": True, **NARROW}, 2 + 1 + 2, True),
        ({"bf16": True, "main_params_dtype": "fp16"}, 4 + 4 + 2, True),
        ({"bf16": True, **SCALED}, 4 + 4 + 4, False),
        ({"bf16": True, **SCALED, "main_params_dtype": "fp16"}, 4 + 4 + 2, True),
        ({"bf16": True, **DELAYED}, 4 + 4 + 2, True),
        ({"bf16": True, **DELAYED, "fp8_param_gather": True}, 4 + 4 + 4, True),
        ({"fp16": True, **NARROW}, 2 + 1 + 4, True),
        ({}, 4 + 4, True),
    ],
)
def test_what_an_optimizer_keeps_is_the_flags(changes, kept, takes_gradients):
    """As Megatron's `OptimizerConfig` and Transformer Engine's FusedAdam with `store_param_remainders` decide."""
    job = job_of({**TINY, "use_precision_aware_optimizer": True, **changes})
    assert (job.state_bytes, job.takes_gradients) == (kept, takes_gradients)
    plain = job_of({**TINY, **changes})
    assert not plain.kept_states and plain.state_bytes == (12 if changes else 8)


def test_gradients_are_as_wide_as_the_flags_say():
    bf16 = {**TINY, "bf16": True}
    narrow = [{"grad_reduce_in_bf16": True}, {"main_grads_dtype": "bf16"}, {"main_grads_dtype": "torch.bfloat16"}]
    assert [job_of(bf16 | each).wide_gradients for each in ({}, *narrow)] == [True, False, False, False]
    assert not job_of(TINY | {"fp16": True}).wide_gradients


MODEL = ModelShape(layers=6, hidden=64, heads=4, ffn=256, vocab=512)
JOB = Job(MODEL, sequence=64, micro_batch=1, microbatches=4, pipeline=3)


@pytest.mark.parametrize(
    ("placement", "layers", "may_be_empty", "extra", "found"),
    [
        (Placement.round_robin(4), 7, (), None, (1, 2, 2, 2)),
        (Placement.round_robin(4, 2), 12, (), None, (2, 1, 2, 1, 1, 2, 1, 2)),
        (Placement.v_shape(2), 6, (), None, (2, 1, 2, 1)),
        (Placement.round_robin(2, 2), 6, (0, 3), None, (1, 2, 2, 1)),
        (Placement.round_robin(3), 7, (0, 2), [0.5, 0.0, 2.2], (3, 3, 1)),
    ],
)
def test_layers_that_do_not_divide_are_shared_out(placement, layers, may_be_empty, extra, found):
    assert divided([1.0] * layers, placement, extra, may_be_empty) == found


def test_heads_are_no_layers_of_a_stage_but_of_the_model():
    layout = "Ett|tt|m|L"
    assert layers_in(layout) == (2, 2, 0, 0) and stages_behind_mtp(layout) == 1
    model = replace(MODEL, mtp_heads=("t",), behind_mtp=1)
    assert sum(stage_layers(replace(JOB, model=model), (2, 2, 2)), Counter()) == {"t": 7, "m": 1}
    found = stage_layers(replace(JOB, model=model), (2, 2, 2))
    assert [stage["t"] for stage in found] == [2, 3, 2]


def test_layers_in_16_bits_are_counted_from_the_ends_of_the_model():
    job = replace(JOB, fp8=Fp8Recipe.TENSORWISE, bf16_at_start=1, bf16_at_end=3)
    assert [stage["t'"] for stage in stage_layers(job, (2, 2, 2))] == [1, 1, 2]


def test_vocabulary_layers_that_count_as_layers_count_for_the_number_of_chunks():
    job = {"num_layers": 14, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}
    assert chunks_asked(job) == 1 and chunks_asked(job | dict.fromkeys(ENDS, True)) == 2
