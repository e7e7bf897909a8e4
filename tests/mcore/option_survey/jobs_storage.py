"""Jobs of the option survey about replicas, data and checkpoints."""

from __future__ import annotations

from tests.mcore.case_parts import BOTH, CONTEXT, DISTRIBUTED, MOE, SEQUENCE, TIED
from tests.mcore.moves import ASYNCHRONOUS, RESHARDABLE
from tests.mcore.option_survey.job import FEWER_CHUNKS, HALF, LOCAL_INIT, MANY_WAYS, ONE_CHUNK, Job

DATA = {"mock_data": None, "data_cache_path": "{folder}/cache", "null_tokenizer_eod_id": 499}
ONE_FILE = {**DATA, "data_path": ["{data}/a"], "split": "80,10,10"}
EVERYTHING = {**BOTH, **RESHARDABLE}
FALLING = {"lr_decay_style": "linear", "lr_decay_iters": 10, "min_lr": 1e-4}

REPLICAS = (
    Job(
        "everything overlapped, gathered without alignment",
        {**EVERYTHING, "no_align_param_gather": True},
        ranks=4,
        but=("params-norm", "params norm"),
        why="norms differ while weights are being gathered",
    ),
    Job(
        "gradients in a number of buckets",
        {**EVERYTHING, "ddp_num_buckets": 3},
        ranks=4,
        but=("params-norm", "params norm"),
        why="norms differ while weights are being gathered",
    ),
    Job(
        "buckets padded",
        {**DISTRIBUTED, "ddp_pad_buckets_for_high_nccl_busbw": True},
        ranks=4,
        by_name=True,
        why="plain Megatron cannot save this optimizer state here",
    ),
    Job(
        "gradients averaged by the collective",
        {**DISTRIBUTED, **RESHARDABLE, "ddp_average_in_collective": True},
        ranks=4,
    ),
    Job(
        "gradients not aligned, tensor and sequence parallelism, losses averaged over tokens",
        {**SEQUENCE, "overlap_grad_reduce": True, "no_align_grad_reduce": True, "calculate_per_token_loss": True},
        ranks=4,
        size=2,
    ),
    Job(
        "weights gathered with the optimizer's step",
        {**EVERYTHING, "ckpt_format": "torch", "overlap_param_gather_with_optimizer_step": True},
        ("interleaved/none", "interleaved/vocab-2"),
        ranks=4,
        plain={"num_virtual_stages_per_pipeline_rank": 2},
        by_name=True,
        but=("params-norm", "params norm"),
        why="it needs virtual stages; norms differ while weights are being gathered",
    ),
    Job(
        "replicas that start apart",
        {"data_parallel_random_init": True, "no_gradient_reduce_div_fusion": True},
        LOCAL_INIT,
        ranks=4,
        why="each replica draws its own weights",
    ),
    Job("replicas compared", {"check_weight_hash_across_dp_replicas_interval": 2}, ranks=4),
    Job("ranks in another order", {"use_tp_pp_dp_mapping": True}, ranks=4),
    Job("context parallelism", CONTEXT, ranks=4),
    Job(
        "no gloo groups, timeouts after the start",
        {"disable_gloo_process_groups": True} | {"distributed_timeout_seconds_after_init": 90},
        ranks=4,
    ),
    Job(
        "everything overlapped, evaluation in other sizes, p = 3",
        {**EVERYTHING, "eval_global_batch_size": 4, "eval_micro_batch_size": 1},
        ranks=6,
        size=3,
        but=("params-norm", "params norm"),
        why="norms differ while weights are being gathered",
    ),
)

DATASETS = (
    Job("data from a file", {**ONE_FILE, "num_workers": 1}, MANY_WAYS),
    Job(
        "data in rounds",
        {**ONE_FILE, "dataloader_type": "cyclic"},
        by_name=True,
        why="a resumed run starts a new round",
    ),
    Job(
        "a blend, documents, evaluation in other sizes",
        {**DATA, "data_path": [0.7, "{data}/a", 0.3, "{data}/b"], "split": "80,10,10", "reset_position_ids": True}
        | {"eod_mask_loss": True, "eval_global_batch_size": 4, "no_mmap_bin_files": True},
    ),
    Job(
        "a blend, masks of documents, rows by position",
        {**ONE_FILE, "reset_attention_mask": True},
        ONE_CHUNK,
        why="only the first and the last stage get masks",
    ),
    Job(
        "three sets of data, no masks from the loader",
        {**DATA, "train_data_path": ["{data}/a"], "valid_data_path": ["{data}/b"], "test_data_path": ["{data}/c"]}
        | {"no_create_attention_mask_in_dataloader": True, "num_dataset_builder_threads": 2},
    ),
    Job(
        "data in phases",
        {**ONE_FILE, "train_iters": None, "train_samples": 40, "phase_transition_iterations": "3"},
        by_name=True,
        why="iteration 2, whose checkpoint is loaded, is not the end of a phase",
    ),
    Job(
        "a surplus of data, pads that may be tokens",
        {**ONE_FILE, "mid_level_dataset_surplus": 0.1} | {"allow_ambiguous_pad_tokens": True},
    ),
    Job("data in a file of arguments", {**DATA, "data_args_path": "{data}/arguments", "split": "80,10,10"}),
    Job(
        "data in a file of arguments for each set",
        {**DATA, "per_split_data_args_path": "{data}/sets.json"},
        ranks=3,
        size=3,
    ),
)

CHECKPOINTS = (
    Job("resumed", FALLING, then={"train_iters": 8, "override_opt_param_scheduler": True}),
    Job(
        "resumed, p = 3",
        {**FALLING, **TIED},
        then={"train_iters": 8, "override_opt_param_scheduler": True},
        ranks=3,
        size=3,
    ),
    Job("finetuned with another seed and rate", {}, then={"finetune": True, "seed": 77, "lr": 5e-4}),
    Job(
        "resumed without the optimizer, under another iteration",
        {},
        then={"no_load_optim": True, "no_load_rng": True, "override_ckpt_iteration": 3},
    ),
    Job(
        "saved without the optimizer",
        {"no_save_optim": True, "no_save_rng": True},
        FEWER_CHUNKS,
        then={"train_iters": 8, "no_load_optim": True},
    ),
    Job(
        "main weights loaded, bf16",
        {"bf16": True},
        bound=HALF,
        but=("num-zeros", "num zeros"),
        why="16-bit values have rounding errors of 4e-3",
        then={"no_load_optim": True, "load_main_params_from_ckpt": True, "train_iters": 8},
    ),
    Job(
        "saved and loaded in parallel",
        {**EVERYTHING, "ckpt_fully_parallel_load": True, "dist_ckpt_workers": 2, "save_interval": 2},
        then={
            "train_iters": 8,
            "override_opt_param_scheduler": True,
            "ckpt_fully_parallel_load_exchange_algo": "gather_rounds",
        },
        ranks=4,
        but=("params-norm", "params norm"),
        why="norms differ while weights are being gathered",
    ),
    Job(
        "saved by one rank each, structure kept",
        {"no_ckpt_fully_parallel_save": True, "save_interval": 1} | {"ckpt_assume_constant_structure": True},
        then={"train_iters": 8, "override_opt_param_scheduler": True},
    ),
    Job(
        "saved asynchronously",
        {**ASYNCHRONOUS, "save_interval": 2},
        then={"train_iters": 8, "override_opt_param_scheduler": True},
    ),
    Job(
        "contents verified",
        {"verify_integrity": True},
        then={"train_iters": 8, "override_opt_param_scheduler": True},
    ),
    Job(
        "a non-persistent checkpoint",
        {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 3}
        | {"save_interval": 2, "non_persistent_global_ckpt_dir": "{folder}/fleeting"},
        then={"ckpt_step": 2},
    ),
    Job(
        "sizes of the model from the checkpoint",
        {"num_layers": 8},
        FEWER_CHUNKS,
        then={"num_layers": None, "hidden_size": None, "use_checkpoint_args": True, "train_iters": 8}
        | {"override_opt_param_scheduler": True},
    ),
    Job(
        "sizes of the layout from the checkpoint",
        {},
        ONE_CHUNK,
        then={"use_mp_args_from_checkpoint_args": True} | {"train_iters": 8, "override_opt_param_scheduler": True},
    ),
    Job("a pretrained checkpoint", {}, then={"load": None, "pretrained_checkpoint": "{folder}/saved", "lr": 5e-4}),
    Job(
        "Megatron's older format",
        {"ckpt_format": "torch"},
        ("zb-h1/none", "interleaved/none"),
        then={"train_iters": 8, "override_opt_param_scheduler": True},
        why="with other ways, ranks hold layers that no plain rank holds",
    ),
    Job(
        "a format that is detected",
        {"auto_detect_ckpt_format": True},
        then={"train_iters": 8} | {"override_opt_param_scheduler": True},
    ),
    Job(
        "another rate",
        FALLING,
        MANY_WAYS,
        default=("1f1b/vocab-2",),
        then={"train_iters": 8, "lr": 5e-4, "min_lr": 5e-5, "override_opt_param_scheduler": True},
    ),
    Job(
        "another rate, the checkpoint's kept",
        FALLING,
        then={"train_iters": 8, "lr": 5e-4, "use_checkpoint_opt_param_scheduler": True, "lr_decay_iters": 12},
    ),
    Job(
        "other rates, decoupled",
        {**FALLING, "decoupled_lr": 2e-3},
        then={"train_iters": 8, "lr": 5e-4, "decoupled_lr": 1e-4, "override_opt_param_scheduler": True},
    ),
    Job(
        "another rate, the distributed optimizer",
        {**FALLING, **DISTRIBUTED},
        ranks=4,
        then={"train_iters": 8, "lr": 5e-4, "override_opt_param_scheduler": True},
    ),
    Job(
        "another rate, experts, p = 3",
        {**FALLING, **MOE, "num_layers": 6},
        ranks=3,
        size=3,
        then={"train_iters": 8, "lr": 5e-4, "override_opt_param_scheduler": True},
    ),
    Job(
        "weights and weight gradients saved",
        {"save_params_interval": 2, "save_wgrads_interval": 2, "save": "{folder}/kept", "save_interval": 1000},
        by_name=True,
    ),
)
