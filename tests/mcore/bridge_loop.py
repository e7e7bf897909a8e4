"""Megatron-Bridge's own training loop on CPU ranks, with stand-ins for imports that nothing here needs.

While a model is built or trained, only two parts are replaced: Bridge's initialisation, which requires CUDA, and the
warm-up of fusions that no layer here uses.

If Megatron-Bridge is not installed, a separate folder on PYTHONPATH is enough, which this command creates:

    pip install --no-deps --target FOLDER megatron-bridge==0.6.2 einops datasets pandas pyarrow dill multiprocess \\
        nvidia-modelopt==0.47.0 scipy pulp==3.3.2 orloge
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from unittest import mock

SEQUENCE, VOCAB, MICROBATCHES, BATCH, LAYERS = 64, 256, 4, 2, 4
MISSING = [name for name in ("einops", "datasets", "modelopt") if importlib.util.find_spec(name) is None]
_STAND_INS = {
    "megatron.bridge.peft.lora_layers": {"transformer_engine": ["pytorch"]},
    "megatron.bridge.training.pretrain": {"nvidia_resiliency_ext": ["inprocess"]},
    "megatron.bridge.data.energon.base_energon_datamodule": {"megatron.energon": []},
}
"""What one module of Bridge imports and the loop of a GPT model does not use: the packages and their modules."""


def missing():
    """Why Bridge cannot be run here; None where it can."""
    try:
        found = importlib.util.find_spec("megatron.bridge")
    except ModuleNotFoundError:
        found = None
    absent = (["megatron-bridge"] if found is None else []) + MISSING
    return f"not installed: {', '.join(absent)}" if absent else None


class _Anything(types.ModuleType):
    """A module of whose attributes each is an empty class or a further module of this kind."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name) if name.islower() else type(name, (), {})


class _Finder(MetaPathFinder):
    """Lets a module that needs a stand-in see it while it is executed, and nobody else."""

    def find_spec(self, name, path, target=None):
        if name not in _STAND_INS:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def with_stand_ins(module):
            modules = {}
            for package, parts in _STAND_INS[name].items():
                modules[package] = _Anything(package)
                for part in parts:
                    modules[f"{package}.{part}"] = _Anything(part)
                    setattr(modules[package], part, modules[f"{package}.{part}"])
            sys.modules.update(modules)
            try:
                execute(module)
            finally:  # what it has imported itself stays
                for stand_in in modules:
                    del sys.modules[stand_in]

        spec.loader.exec_module = with_stand_ins
        return spec


def import_bridge():
    """Import Bridge's loop; afterwards `megatron.bridge.training.pretrain` can be imported as always."""
    importlib.import_module("megatron.core.extensions.transformer_engine")  # settles that it is not installed
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("megatron.bridge.training.pretrain")
    # Megatron has Transformer Engine's classes as None where it is missing, which Bridge takes for classes.
    importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False


@contextlib.contextmanager
def on_cpu():
    """Inside, Bridge initialises without CUDA."""
    import torch
    from megatron.bridge.training import setup

    initialize = setup.initialize_megatron

    def pretending(*args, **kwargs):
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
        ):
            return initialize(*args, **kwargs)

    with (
        mock.patch.object(setup, "initialize_megatron", pretending),
        mock.patch.object(setup, "set_jit_fusion_options", lambda *args: None),
    ):
        yield


def _transformer(ranks, chunks):
    import torch
    from torch.nn.functional import silu

    return {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "pipeline_dtype": torch.float32,
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
    }


def _local_layers(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=getattr(config, "qk_layernorm", False))


def save_hugging_face(folder, family="Llama", tied=False):
    """Write a small random model of `family`, Llama or Qwen3, in Hugging Face's format, with a tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(5)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": SEQUENCE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{family}Config")(**layers, **sizes, **heads)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(index): index for index in range(VOCAB)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def _from_hugging_face(folder, ranks, chunks):
    import torch
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(folder, dtype=torch.float32).to_megatron_provider(load_weights=True)
    return _on_local_layers(provider, ranks, chunks)


def _on_local_layers(provider, ranks, chunks):
    """A provider that was made for a GPU, with Megatron's local layers, in fp32."""
    import torch

    local = {"params_dtype": torch.float32, "bf16": False, "seq_length": SEQUENCE, "cross_entropy_loss_fusion": False}
    sizes = {"hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads"}  # are those of the checkpoint
    transformer = {name: value for name, value in _transformer(ranks, chunks).items() if name not in sizes}
    for name, value in {**transformer, **local, "transformer_layer_spec": _local_layers}.items():
        setattr(provider, name, value)
    return provider


def _model(kind, ranks, chunks, tied):
    if kind.startswith("/"):
        return _from_hugging_face(kind, ranks, chunks)
    common = {
        "share_embeddings_and_output_weights": tied,
        "position_embedding_type": "rope",
        "seq_length": SEQUENCE,
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 128,
        "transformer_layer_spec": _local_layers,
    }
    if kind == "gemma":
        from megatron.bridge.models.gemma.gemma2_provider import Gemma2ModelProvider

        # A cap that flattens the logits of a small model, and no attention of its own, which is not Megatron's.
        cap = {"final_logit_softcapping": 0.3, "layernorm_zero_centered_gamma": False, "window_size": None}
        sizes = _transformer(ranks, chunks) | {"kv_channels": 8}
        return Gemma2ModelProvider(**sizes, **common, **cap, cross_entropy_loss_fusion=False)
    if kind == "provider":
        from megatron.bridge.models.gpt_provider import GPTModelProvider

        return GPTModelProvider(**_transformer(ranks, chunks), **common, cross_entropy_loss_fusion=False)
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
    from megatron.bridge.models.transformer_config import TransformerConfig

    return GPTModelConfig(transformer=TransformerConfig(**_transformer(ranks, chunks)), **common)


def configuration(kind, ranks, chunks=1, tied=False, iterations=3, checkpoint=None, ends=None):
    """Bridge's configuration of a small model: as its recipes have it, but for sizes, fp32 and mock data.

    kind: `config`, `provider`, `gemma`, or the folder of a checkpoint of Hugging Face's.
    """
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        LoggerConfig,
        MockGPTDatasetConfig,
        OptimizerConfig,
        RNGConfig,
        SchedulerConfig,
        TokenizerConfig,
        TrainingConfig,
        ValidationConfig,
    )

    ends = ends or iterations
    return ConfigContainer(
        model=_model(kind, ranks, chunks, tied),
        train=TrainingConfig(train_iters=iterations, micro_batch_size=BATCH, global_batch_size=MICROBATCHES * BATCH),
        validation=ValidationConfig(eval_interval=iterations, eval_iters=1),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, clip_grad=0.0, use_distributed_optimizer=True, weight_decay=0.1
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_decay_iters=ends,
            lr_warmup_iters=0,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            max_steps=ends,
        ),
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            average_in_collective=False,
            use_distributed_optimizer=True,
        ),
        dataset=MockGPTDatasetConfig(
            seq_length=SEQUENCE,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
            skip_getting_attention_mask_from_dataset=False,
        ),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1),
        checkpoint=checkpoint or CheckpointConfig(save=None, load=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
    )


def save_packs(folder):
    """Write packs of several documents, all shorter than the sequence, as Bridge's offline packing does."""
    import numpy as np

    draw = np.random.default_rng(5)
    packs = []
    for _ in range(24):
        starts = np.flatnonzero(np.concatenate([[1], draw.random(SEQUENCE - 30) < 0.1])).tolist()
        ids = draw.integers(0, VOCAB - 1, SEQUENCE - draw.integers(18, 24)).tolist()
        packs.append({"input_ids": ids, "loss_mask": [1] * len(ids), "seq_start_id": starts})
    for part in ("train", "val"):
        np.save(folder / f"{part}.npy", packs, allow_pickle=True)
    (folder / "metadata.jsonl").write_text("[]")


def read_packs(config, folder, padded):
    """Let the job read the packs in `folder`, one a micro batch as Bridge demands.

    padded: to the sequence length; else to the longest of an iteration, whose length Bridge gives the schedule.
    """
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    NullTokenizer.eos_id = VOCAB - 1  # Bridge pads with it
    config.dataset = GPTSFTDatasetConfig(
        seq_length=SEQUENCE,
        dataset_root=folder,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=SEQUENCE,
            packed_train_data_path=folder / "train.npy",
            packed_val_data_path=folder / "val.npy",
            packed_metadata_path=folder / "metadata.jsonl",
        ),
        dataset_kwargs={"pad_to_max_length": padded},
        do_test=False,
        num_workers=0,
    )
    config.train.micro_batch_size, config.train.global_batch_size = 1, MICROBATCHES


def recipe(folder, ranks, chunks=1, accounts=False):
    """Bridge's own recipe of Llama 3.1 405B, shrunk: what is set here is what differs.

    folder: a model of Hugging Face's, of which the configuration takes the place of the published one.
    accounts: the recipe's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` stay on.
    """
    from megatron import bridge
    from megatron.bridge import AutoBridge

    # The package of all recipes imports what those of pictures need.
    recipes = types.ModuleType("megatron.bridge.recipes")
    recipes.__path__ = [os.path.join(*bridge.__path__, "recipes")]
    sys.modules[recipes.__name__] = recipes
    llama3 = importlib.import_module("megatron.bridge.recipes.llama.h100.llama3")
    published = AutoBridge.from_hf_pretrained
    with mock.patch.object(AutoBridge, "from_hf_pretrained", lambda _name: published(folder)):
        config = llama3.llama31_405b_pretrain_256gpu_h100_bf16_config()
    assert config.ddp.overlap_grad_reduce and config.ddp.overlap_param_gather and config.ddp.use_distributed_optimizer
    assert config.model.account_for_embedding_in_pipeline_split and config.model.cross_entropy_loss_fusion
    _on_local_layers(config.model, ranks, chunks)
    config.model.tensor_model_parallel_size = config.model.context_parallel_size = 1
    config.model.sequence_parallel = False
    if not accounts:
        config.model.account_for_embedding_in_pipeline_split = False
        config.model.account_for_loss_in_pipeline_split = False
    config.dataset.seq_length, config.dataset.num_workers = SEQUENCE, 0
    config.tokenizer.vocab_size = VOCAB - 1
    config.train.train_iters, config.train.micro_batch_size = 3, BATCH
    config.train.global_batch_size = MICROBATCHES * BATCH
    config.validation.eval_interval, config.validation.eval_iters = 3, 1
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, 3
    config.checkpoint.save = config.checkpoint.load = config.logger.tensorboard_dir = None
    config.mixed_precision = config.comm_overlap = None  # fp32, and no communication inside of products
    config.dist.distributed_backend, config.dist.use_gloo_process_groups = "gloo", True
    return config


@dataclass
class Trained:
    """What a run leaves on a rank. Losses are where Megatron reports them, on the last pipeline rank."""

    model: list = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """By training iteration."""
    evaluated: list[float] = field(default_factory=list)
    """Of each validation and of the test."""
    gradients: dict = field(default_factory=dict)
    """Of the first iteration, by global name."""


def pretrain(config, at_end=None):
    """Train by `config`; `at_end` is given the trained model, before Bridge ends its process groups."""
    from megatron.bridge.training import pretrain as loop
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step

    trained = Trained()

    def loss(reported):
        return [float(reported["lm loss"])] if reported else []

    class Watch(Callback):
        def on_train_step_end(self, context):
            trained.losses += loss(context.loss_dict)
            trained.model = context.model
            if not trained.gradients:
                trained.gradients = _gradients(context.model)

        def on_eval_end(self, context):
            trained.evaluated += loss(context.total_loss_dict)

        def on_test_end(self, context):
            self.on_eval_end(context)
            if at_end is not None:
                at_end(trained.model)

    with on_cpu(), mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        loop.pretrain(config, forward_step, callbacks=[Watch()])
    return trained


def _gradients(chunks):
    from megatron.core.utils import unwrap_model

    return {
        name: parameter.main_grad.float().numpy().copy()
        for core in unwrap_model(chunks)
        for name, parameter in by_place(core)
        if parameter.requires_grad
    }


def by_place(chunk):
    """The parameters of a chunk by name, with the numbers that its layers have in the whole model."""
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            index, _, rest = name.removeprefix("decoder.layers.").partition(".")
            name = f"{chunk.decoder.layers[int(index)].layer_number - 1}.{rest}"
        yield name, parameter
