"""Test a user's own model and forward_step: features that our passes would silently skip are refused in one line."""

import copy
import types
import weakref
from functools import partial, wraps

import pytest
import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_vp.errors import UserError
from megatron_vp.mcore.model import preparation
from megatron_vp.mcore.model.model_check import check_model, check_vocabulary_layers
from megatron_vp.mcore.model.split_backward import forward_of
from megatron_vp.mcore.training.capture import capture

CONFIG = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)


class Scaled(GPTModel):
    def _postprocess(self, *args, **kwargs):
        return 2 * super()._postprocess(*args, **kwargs)


class Extended(GPTModel):
    """What a subclass may do: more methods and layers of its own."""

    def extra(self):
        return None


class SoftCapped(ColumnParallelLinear):
    pass


def unbuilt(kind, **attributes):
    """A module of a Megatron class without its constructor, which needs process groups."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Adapted(nn.Module):
    """A layer inside of another, as adapters have it."""


def model(kind=GPTModel, head=ColumnParallelLinear, bias=None, trainable=True):
    words = unbuilt(VocabParallelEmbedding, weight=nn.Parameter(torch.zeros(4, 2), requires_grad=trainable))
    layer = unbuilt(head, weight=nn.Parameter(torch.zeros(4, 2)), bias=bias)
    embedding = unbuilt(nn.Module, word_embeddings=words)
    return unbuilt(kind, config=CONFIG, pre_process=True, post_process=True, embedding=embedding, output_layer=layer)


def hooked():
    built = model()
    built.output_layer.register_forward_hook(lambda layer, inputs, output: output)
    return built


@pytest.mark.parametrize("kind", [GPTModel, Extended])
def test_megatrons_own_vocabulary_layers_and_loss_pass(kind):
    check_model(model(kind))
    check_vocabulary_layers(model(kind))
    check_vocabulary_layers(model(kind, trainable=False))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: model(Scaled), "Scaled has its own _postprocess"),
        (lambda: model(head=SoftCapped), "output_layer is a SoftCapped"),
        (lambda: model(bias=nn.Parameter(torch.zeros(4))), "output_layer has a bias"),
        (hooked, "output_layer has a forward hook"),
        (lambda: model(head=Adapted), "output_layer is a Adapted"),
    ],
)
def test_what_the_cut_would_leave_out_is_named(made, said):
    with pytest.raises(UserError, match=said) as refused:
        check_vocabulary_layers(made())
    assert "\n" not in str(refused.value) and "leave --vocab-parallel out" in str(refused.value)


def wrapped(original):
    """As frameworks replace a method: it calls the original one, of which it has the name and the signature."""

    @wraps(original)
    def method(*args, **kwargs):
        return original(*args, **kwargs)

    return method


@pytest.mark.parametrize("name", ["forward", "_preprocess", "_postprocess", "_scale_logits"])
def test_a_method_that_a_script_replaced_is_named(monkeypatch, name):
    built, original = model(), getattr(GPTModel, name)
    built.__dict__[name] = types.MethodType(wrapped(original), built)
    with pytest.raises(UserError, match=f"GPTModel has its own {name}, parts of which would not run"):
        check_vocabulary_layers(built)
    monkeypatch.setattr(GPTModel, name, wrapped(original))
    with pytest.raises(UserError, match=f"replaced GPTModel.{name}, .*; use Megatron's own {name}, and compute from"):
        check_vocabulary_layers(model())
    monkeypatch.setattr(GPTModel, name, partial(original))
    with pytest.raises(UserError, match=f"replaced GPTModel.{name}"):
        check_vocabulary_layers(model())


def test_other_models_are_refused_whatever_layers_they_have():
    with pytest.raises(UserError, match=r"built a BertModel, .* build a GPTModel or HybridModel"):
        check_model(unbuilt(BertModel, share_embeddings_and_output_weights=True))


@pytest.mark.parametrize(
    "setting",
    [
        "enable_autocast",
        "num_microbatches_with_partial_activation_checkpoints",
        "defer_embedding_wgrad_compute",
    ],
)
def test_settings_of_a_scripts_own_configuration_that_no_schedule_of_ours_reads_are_refused(setting):
    built = model()
    built.config = copy.copy(CONFIG)  # nothing of Megatron's is checked anew
    setattr(built.config, setting, 1)
    with pytest.raises(UserError, match=f"sets {setting}, which only Megatron's own schedules read"):
        check_model(built)


def test_a_chunk_runs_in_passes_only():
    built = object.__new__(preparation.RankModel)
    chunk = nn.Identity()
    chunk.register_forward_pre_hook(built._refuse_outside_of_passes)
    with pytest.raises(UserError, match="runs its Identity outside of forward_step"):
        chunk("input")
    with forward_of(nn.Identity()), pytest.raises(UserError, match="runs its Identity outside of forward_step"):
        chunk("input")
    with forward_of(chunk):
        assert chunk("input") == "input"


def loss_func(output):
    return output.sum(), {}


def forward_step(data_iterator, called, *, change=lambda output: output, in_loss=None, calls=1, **arguments):
    for _ in range(calls):
        output = called(next(data_iterator), None, None, labels=torch.ones(1, 2), **arguments)
    return change(output), partial(loss_func) if in_loss is None else partial(loss_func, in_loss(output))


def captured(**changes):
    return capture(partial(forward_step, **changes), iter([torch.zeros(1, 2)] * 2), model())


def test_a_plain_forward_step_is_captured_with_its_arguments_by_name():
    found = captured()
    assert found.argument("input_ids").tolist() == [[0, 0]] and found.argument("labels").tolist() == [[1, 1]]
    assert found.argument("position_ids") is None and found.loss_func.func is loss_func


def test_an_attention_mask_is_freed_after_the_models_run_though_the_loss_function_keeps_the_model():
    mask = torch.zeros(1, 1, 2, 2)
    lives = weakref.ref(mask)

    def step(data_iterator, called, mask=mask):
        return called(next(data_iterator), None, mask, labels=torch.ones(1, 2)), partial(loss_func, model=called)

    found = capture(step, iter([torch.zeros(1, 2)]), model())
    del mask, step
    assert found.argument("attention_mask") is lives()
    found.keep("labels", "loss_mask")
    assert lives() is None and found.argument("labels") is not None


def test_data_that_a_script_builds_at_the_ends_alone_is_asked_for_in_the_middle():
    with pytest.raises(
        UserError, match=r"built no dataset on that stage: .* make is_dataset_built_on_rank return True on every stage"
    ):
        capture(forward_step, None, model())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"change": lambda output: output * 2}, "computes with the model's output"),
        ({"change": lambda output: output.float()}, "computes with the model's output"),
        ({"in_loss": lambda output: output.mean()}, "computes with the model's output"),
        ({"change": lambda output: torch.zeros(())}, "does not return the model's output unchanged"),
        ({"change": lambda output: (output, None)}, "does not return the model's output unchanged"),
        ({"calls": 2}, "called the model 2 times"),
        ({"decoder_input": torch.zeros(2, 1, 2)}, "decoder_input"),
        ({"output_processor": print}, "output_processor"),
        ({"defer_fp32_logits": True}, "unexpected keyword argument 'defer_fp32_logits'.: leave out the arguments that"),
    ],
)
def test_a_forward_step_that_does_more_than_call_the_model_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        captured(**changes)
