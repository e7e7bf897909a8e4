"""Tests outside the table of cases, and features neither tested nor refused, as rows of the compatibility page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """A row of the page whose cases live in another test: what it says, and `file::function` under tests/."""

    name: str
    test: str


_PARITY = "mcore/test_parity.py::test_parity"
PROOFS = (
    Proof(
        "every schedule with vocab-1 and vocab-2, and without `--vocab-parallel`; p = 2, 3, 4, 8; any number of "
        "microbatches",
        _PARITY,
    ),
    Proof(
        "80 jobs with random combinations of schedules, sizes and options",
        "mcore/test_random_jobs.py::test_every_step_equals_plain_megatron",
    ),
    Proof("tied and untied; learned and rotary positions; loss masks", _PARITY),
    Proof(
        "vocabulary shards of any size (`--vocab-shards`), also ranks without rows: six schedules with vocab-1 and "
        "vocab-2, tied and untied, tensor and sequence parallelism, the distributed optimizer; 48 runs are random",
        "mcore/test_assigned_shards.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "shards and layers chosen by `--vocab-shards balanced`, if the number of layers is not a multiple of p",
        "mcore/test_resolved_shards.py::test_a_balanced_run_trains_as_plain_megatron_and_writes_what_it_chose",
    ),
    Proof("a vocabulary whose size is not a multiple of p; empty stages", _PARITY),
    Proof("gradient clipping, Adam; evaluation between training steps", _PARITY),
    Proof(
        "bf16 and fp16: as close to fp32 as plain Megatron",
        "mcore/test_parity.py::test_half_precision_is_as_close_to_fp32_as_plain_megatron",
    ),
    Proof(
        "initial weights, bit for bit, and the first loss of a new run, under every schedule",
        "mcore/test_initial_weights.py::test_weights_and_first_loss_are_plain_megatrons",
    ),
    Proof(
        "a run resumed with the same layout, bit for bit: every schedule, multi-token prediction, hybrid models, "
        "experts, half precision, an asynchronous save, the distributed optimizer's default format",
        "mcore/test_checkpoints.py::test_resuming_at_the_same_layout_gives_the_same_bits",
    ),
    Proof(
        "losses, gradients and weights of two runs, bit for bit, also with `--deterministic-mode`",
        "mcore/test_determinism.py::test_two_runs_give_the_same_bits",
    ),
    Proof(
        "ranks with different jobs: exit status 2 and one line that names the difference",
        "mcore/test_same_job.py::test_ranks_of_different_jobs_end_with_one_line",
    ),
    Proof(
        "a rank that is killed or stopped in a pass: the other ranks exit, also on SIGTERM, and name the rank, the "
        "pass and the microbatch",
        "mcore/test_faults.py::test_the_others_end_and_name_the_rank_that_is_lost",
    ),
    Proof(
        "ranks restarted by `torchrun --max-restarts` continue with the same losses, bit for bit",
        "mcore/test_faults.py::test_ranks_that_a_launcher_starts_again_go_on_with_the_same_losses",
    ),
    Proof("a data loader that hangs", "mcore/test_faults.py::test_a_rank_whose_data_hangs_says_so"),
    Proof("an exception in a pass", "mcore/test_faults.py::test_a_defect_keeps_its_traceback_and_ends_all_ranks"),
    Proof("SIGTERM", "mcore/test_faults.py::test_a_rank_that_is_told_to_end_says_where_it_was"),
    Proof(
        "SIGTERM with `--exit-signal-handler`: a checkpoint after the iteration, exit status 0, and the same losses "
        "after resuming",
        "mcore/test_faults.py::test_sigterm_saves_after_the_iteration_and_the_run_goes_on_from_there",
    ),
    Proof(
        "a rank that dies during a save, synchronous or asynchronous (`--async-strategy mcore`): the run continues "
        "from the previous checkpoint, bit for bit",
        "mcore/test_save_faults.py::test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_and_the_run_goes_on_from_it",
    ),
    Proof(
        "a full disk during a save: exit status 1 and one line on every rank; the previous checkpoint stays intact "
        "and remains the latest",
        "mcore/test_save_faults.py::test_a_disk_that_is_full_leaves_the_checkpoint_before",
    ),
    Proof(
        "two runs with the same `--save` folder: the second is refused and the first continues; a run takes over the "
        "folder of a killed run, but never of a live one",
        "mcore/test_save_folder.py::test_a_second_run_is_refused_and_leaves_the_folder_of_the_first_as_it_is",
    ),
    Proof(
        "a rank that dies while it writes the name of the latest checkpoint",
        "mcore/test_save_faults.py::test_a_rank_that_dies_while_it_names_the_last_checkpoint_leaves_the_name_before",
    ),
    Proof(
        "a checkpoint that is missing, damaged or unsuitable; a directory that cannot be written to",
        "mcore/test_checkpoints.py::test_what_is_no_checkpoint_or_does_not_fit_is_refused_before_anything_starts",
    ),
    Proof(
        "NaN or infinity in a loss: the report names rank, microbatch and the pass where it first appears",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_is_named_with_rank_and_microbatch_and_so_is_where_it_was_born",
    ),
    Proof(
        "after such a loss, the run ends as in plain Megatron",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_ends_a_run_where_it_ends_plain_megatron",
    ),
    Proof(
        "overflows with dynamic loss scaling: the same steps are skipped as in plain Megatron",
        "mcore/test_bad_numbers.py::test_an_overflow_under_dynamic_loss_scaling_skips_the_step_that_plain_megatron_skips",
    ),
    Proof(
        "checks of losses and gradients at the end of an iteration, so that no pass waits for them",
        "mcore/test_deferred_checks.py::test_no_number_is_read_within_a_schedule_and_all_are_at_its_end",
    ),
    Proof(
        "token ids and labels outside the vocabulary",
        "mcore/test_bad_numbers.py::test_an_id_outside_the_vocabulary_is_named",
    ),
    Proof(
        "a vocabulary smaller than the tokenizer's",
        "mcore/test_inputs.py::test_a_vocabulary_that_does_not_fit_is_refused_in_one_line",
    ),
    Proof(
        "truncated data files, missing tokenizers and other input that Megatron's constructors refuse",
        "mcore/test_rehearsed_starts.py::test_a_check_says_what_the_start_says",
    ),
    Proof(
        "data made with a larger vocabulary",
        "mcore/test_inputs.py::test_data_made_with_a_larger_vocabulary_is_named_by_its_first_id_outside",
    ),
    Proof(
        "a dataset shorter than the run: several epochs, as in plain Megatron",
        "mcore/test_inputs.py::test_data_shorter_than_the_run_starts_over_as_in_plain_megatron",
    ),
    Proof(
        "a script with its own `model_provider`",
        "mcore/test_launch.py::test_somebodys_own_script_trains_unchanged_with_and_without_vocabulary_parallelism",
    ),
    Proof(
        "a HybridModel of attention and MLP layers (`megatron_vp.mcore.hybrid_stack`), cut at the bars of its "
        "pattern, with two segments per rank in interleaved and V-shaped schedules",
        "mcore/test_hybrid.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "multi-token prediction (`--mtp-num-layers`), tied and untied, also in V shapes and on a stage of its own",
        "mcore/test_multi_token.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "packed sequences (`--dataloader-inter-document-masking`) under every kind of schedule, with latent attention, "
        "experts, multi-token prediction, tensor and sequence parallelism, micro batches of one and more",
        "mcore/test_packed.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "conversations (`--sft`) with Megatron's `SFTDataset`, also with context parallelism, and with a stand-in for "
        "the kernel with which Transformer Engine splits documents",
        "mcore/test_packed.py::test_conversations_train_as_in_plain_megatron",
    ),
    Proof(
        "Megatron-Bridge's offline packing in its own loop, with packs padded to the sequence length or to the "
        "longest pack of an iteration",
        "mcore/test_bridge.py::test_packs_train_as_without_the_plug_in",
    ),
    Proof(
        "packed sequences: initial weights in a V shape; checkpoints of other parallel sizes and of plain Megatron",
        "mcore/test_packed.py::test_training_goes_on_from_checkpoints_of_other_sizes_and_of_plain_megatron",
    ),
    Proof(
        "label smoothing and z-loss, against an eager loss in plain Megatron, which has neither option",
        "mcore/test_losses.py::test_losses_and_gradients",
    ),
    Proof(
        "Transformer Engine's layers, also with latent attention, under `1f1b`, `zb-h1`, `zb-v`, `v-half` and "
        "`v-min`; their checkpoints, moved to plain Megatron and back; PyTorch replaces the compiled kernels "
        "([how](../evidence/on_gpu.md#transformer-engine-and-fp8))",
        "mcore/test_transformer_engine.py::test_every_step_equals_plain_megatron_with_the_same_layers",
    ),
    Proof(
        "experts in Transformer Engine's layers under the same schedules, one after the other or in one call "
        "(`--moe-grouped-gemm`): biases, shared experts, experts without tokens, expert parallelism with all-to-all",
        "mcore/test_engine_experts.py::test_every_step_equals_plain_megatron_with_the_same_experts",
    ),
    Proof(
        "the flex token dispatcher with DeepSeek-V3's layers; PyTorch's all-to-all replaces DeepEP's kernels",
        "mcore/test_flex_dispatcher.py::test_every_step_equals_plain_megatron_with_the_same_dispatcher",
    ),
    Proof(
        "Transformer Engine's layers and local layers, each with and without Apex, with fused and unfused "
        "accumulation of weight gradients",
        "mcore/test_engine_combinations.py::test_every_combination_trains_as_plain_megatron",
    ),
    Proof(
        "`--defer-embedding-wgrad-compute`: the same gradients as plain Megatron with this flag",
        "mcore/test_engine_combinations.py::test_what_megatron_puts_off_for_its_own_schedule_is_computed_in_ours",
    ),
    Proof(
        "layers in fp8 (`--fp8-recipe tensorwise`, `delayed`), with evaluations between iterations: without "
        "vocabulary passes, the losses equal plain Megatron's bit for bit",
        "mcore/test_engine_fp8.py::test_without_vocabulary_passes_every_bit_is_plain_megatrons",
    ),
    Proof(
        "weights in fp8 (`--fp8-param-gather`): master weights start from the same values as in plain Megatron, also "
        "in a V shape",
        "mcore/test_engine_fp8.py::test_master_weights_start_from_what_plain_megatron_drew",
    ),
    Proof(
        "frozen layers: one or both vocabulary layers, tied and untied; all other layers; everything but attention's "
        "projection, with an overlapped distributed optimizer; adapters (LoRA) between frozen layers; multi-token "
        "prediction, experts, tensor and sequence parallelism, full recomputation",
        "mcore/test_frozen.py::test_what_is_trained_is_trained_as_in_plain_megatron",
    ),
    Proof(
        "frozen vocabulary layers: no gradients, no optimizer state, and no kernel launch in T of vocab-2 and in IB",
        "mcore/test_frozen.py::test_a_frozen_vocabulary_takes_no_gradients_no_state_and_no_time",
    ),
    Proof(
        "checkpoints of partly frozen models, resumed bit for bit, and moved to plain Megatron and to other shards",
        "mcore/test_frozen.py::test_checkpoints_resume_exactly_and_move_to_plain_megatron_and_other_sizes",
    ),
    Proof("`--pipeline-trace`, `--rank-report`", "mcore/test_trace.py::test_the_command_reads_what_training_recorded"),
)

NOT_YET = (
    "CUDA, NCCL, several nodes",
    "Transformer Engine's compiled kernels; the Mamba, gated delta net and latent attention layers of hybrid models",
    "Transformer Engine's attention with `--context-parallel-size`, and with packed sequences",
    "`--tp-comm-overlap` with 1f1b, because Transformer Engine's buffers need a device",
    "the capture of CUDA graphs (`--cuda-graph-impl transformer_engine` and `local`); the order of buffers, and "
    "tensors that outlive a replay, are tested with stand-ins",
    "the kernels of the flex token dispatcher, which need a device, and its backends HybridEP and NCCL EP",
)
"""Neither tested nor refused."""
