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
        "80 jobs of random schedules, sizes and options: what meets in them is left to chance",
        "mcore/test_random_jobs.py::test_every_step_equals_plain_megatron",
    ),
    Proof("tied and untied; learned and rotary positions; loss masks", _PARITY),
    Proof(
        "vocabulary shards of any size (`--vocab-shards`), ranks without rows included: six schedules with vocab-1 and "
        "vocab-2, tied and untied, tensor and sequence parallelism, the distributed optimizer; 48 runs are random",
        "mcore/test_assigned_shards.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "shards and layers that `--vocab-shards balanced` chooses: layers that p does not divide",
        "mcore/test_resolved_shards.py::test_a_balanced_run_trains_as_plain_megatron_and_writes_what_it_chose",
    ),
    Proof("a vocabulary that p does not divide; empty stages", _PARITY),
    Proof("gradient clipping, Adam; evaluation between training steps", _PARITY),
    Proof(
        "bf16 and fp16: as close to fp32 as plain Megatron is",
        "mcore/test_parity.py::test_half_precision_is_as_close_to_fp32_as_plain_megatron",
    ),
    Proof(
        "initial weights, bit for bit, and the first loss of a fresh run: every schedule",
        "mcore/test_initial_weights.py::test_weights_and_first_loss_are_plain_megatrons",
    ),
    Proof(
        "a run resumed at its own layout, bit for bit: every schedule, further heads, hybrid models, experts, half "
        "precision, an asynchronous save, the distributed optimizer's default form",
        "mcore/test_checkpoints.py::test_resuming_at_the_same_layout_gives_the_same_bits",
    ),
    Proof(
        "two runs give the same bits, losses, gradients and weights, also under `--deterministic-mode`",
        "mcore/test_determinism.py::test_two_runs_give_the_same_bits",
    ),
    Proof(
        "ranks that were given different jobs: status 2 and one line that names the difference",
        "mcore/test_same_job.py::test_ranks_of_different_jobs_end_with_one_line",
    ),
    Proof(
        "a rank that is killed or stopped in a pass: the others end, also where they are told to, and name it, the "
        "pass and the microbatch",
        "mcore/test_faults.py::test_the_others_end_and_name_the_rank_that_is_lost",
    ),
    Proof(
        "ranks started again by `torchrun --max-restarts` go on with the same losses, bit for bit",
        "mcore/test_faults.py::test_ranks_that_a_launcher_starts_again_go_on_with_the_same_losses",
    ),
    Proof("data that does not come", "mcore/test_faults.py::test_a_rank_whose_data_hangs_says_so"),
    Proof("an exception in a pass", "mcore/test_faults.py::test_a_defect_keeps_its_traceback_and_ends_all_ranks"),
    Proof("SIGTERM", "mcore/test_faults.py::test_a_rank_that_is_told_to_end_says_where_it_was"),
    Proof(
        "SIGTERM under `--exit-signal-handler`: saved after the iteration, status 0, the same losses after it",
        "mcore/test_faults.py::test_sigterm_saves_after_the_iteration_and_the_run_goes_on_from_there",
    ),
    Proof(
        "a rank that dies in a save, synchronous or asynchronous (`--async-strategy mcore`): the run goes on from the "
        "checkpoint before, bit for bit",
        "mcore/test_save_faults.py::test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_and_the_run_goes_on_from_it",
    ),
    Proof(
        "a full disk in a save: status 1 and one line on every rank, the checkpoint before untouched and the last one",
        "mcore/test_save_faults.py::test_a_disk_that_is_full_leaves_the_checkpoint_before",
    ),
    Proof(
        "two runs with one `--save`: the second is refused and the first goes on; folders of runs that were killed are "
        "taken over, those of live runs never",
        "mcore/test_save_folder.py::test_a_second_run_is_refused_and_leaves_the_folder_of_the_first_as_it_is",
    ),
    Proof(
        "a rank that dies while it writes which checkpoint is the last",
        "mcore/test_save_faults.py::test_a_rank_that_dies_while_it_names_the_last_checkpoint_leaves_the_name_before",
    ),
    Proof(
        "a checkpoint that is missing, damaged or does not fit; a directory that takes no files",
        "mcore/test_checkpoints.py::test_what_is_no_checkpoint_or_does_not_fit_is_refused_before_anything_starts",
    ),
    Proof(
        "NaN or infinity in a loss, named with rank and microbatch, and the pass that made it",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_is_named_with_rank_and_microbatch_and_so_is_where_it_was_born",
    ),
    Proof(
        "after such a loss the run ends as plain Megatron does",
        "mcore/test_bad_numbers.py::test_a_loss_that_is_no_number_ends_a_run_where_it_ends_plain_megatron",
    ),
    Proof(
        "overflows under dynamic loss scaling: the steps are skipped that plain Megatron skips",
        "mcore/test_bad_numbers.py::test_an_overflow_under_dynamic_loss_scaling_skips_the_step_that_plain_megatron_skips",
    ),
    Proof(
        "checks of losses and gradients are made at the end of an iteration: nothing in a schedule waits for them",
        "mcore/test_deferred_checks.py::test_no_number_is_read_within_a_schedule_and_all_are_at_its_end",
    ),
    Proof(
        "token ids and labels outside the vocabulary",
        "mcore/test_bad_numbers.py::test_an_id_outside_the_vocabulary_is_named",
    ),
    Proof(
        "files of data that are cut short; a vocabulary smaller than the tokenizer's",
        "mcore/test_inputs.py::test_what_does_not_fit_is_refused_in_one_line",
    ),
    Proof(
        "data made with a larger vocabulary",
        "mcore/test_inputs.py::test_data_made_with_a_larger_vocabulary_is_named_by_its_first_id_outside",
    ),
    Proof(
        "data shorter than the run: several epochs, as in plain Megatron",
        "mcore/test_inputs.py::test_data_shorter_than_the_run_starts_over_as_in_plain_megatron",
    ),
    Proof(
        "a script with its own `model_provider`",
        "mcore/test_launch.py::test_somebodys_own_script_trains_unchanged_with_and_without_vocabulary_parallelism",
    ),
    Proof(
        "a HybridModel of attention and MLP layers (`megatron_vp.mcore.hybrid_stack`), cut by the "
        "bars of its pattern, two segments per rank in interleaved and V-shaped schedules",
        "mcore/test_hybrid.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "multi-token prediction (`--mtp-num-layers`), tied and untied; V shapes, too",
        "mcore/test_multi_token.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "packed sequences (`--dataloader-inter-document-masking`) under every kind of schedule, with latent attention, "
        "experts, multi-token prediction, tensor and sequence parallelism, micro batches of one and more",
        "mcore/test_packed.py::test_every_step_equals_plain_megatron",
    ),
    Proof(
        "conversations (`--sft`) through Megatron's `SFTDataset`, with context parallelism too, over a stand-in for "
        "Transformer Engine's cut of documents",
        "mcore/test_packed.py::test_conversations_train_as_in_plain_megatron",
    ),
    Proof(
        "Megatron-Bridge's offline packing in its own loop, packs as long as the sequence or as the longest of an "
        "iteration",
        "mcore/test_bridge.py::test_packs_train_as_without_the_plug_in",
    ),
    Proof(
        "packed sequences: initial weights in a V; checkpoints of other sizes and of plain Megatron",
        "mcore/test_packed.py::test_training_goes_on_from_checkpoints_of_other_sizes_and_of_plain_megatron",
    ),
    Proof(
        "label smoothing and z-loss, against an eager loss inside plain Megatron, which has neither",
        "mcore/test_losses.py::test_losses_and_gradients",
    ),
    Proof(
        "Transformer Engine's layers, with latent attention too, under `1f1b`, `zb-h1`, `zb-v`, `v-half` and `v-min`, "
        "and their checkpoints moved to plain Megatron and back, PyTorch in the place of what it compiles "
        "([how](../evidence/on_gpu.md#transformer-engine-and-fp8))",
        "mcore/test_transformer_engine.py::test_every_step_equals_plain_megatron_with_the_same_layers",
    ),
    Proof(
        "experts in Transformer Engine's layers under the same schedules, in turn and in one call "
        "(`--moe-grouped-gemm`): biases, shared experts, experts without tokens, expert parallelism by all-to-all",
        "mcore/test_engine_experts.py::test_every_step_equals_plain_megatron_with_the_same_experts",
    ),
    Proof(
        "the flex token dispatcher under DeepSeek-V3's layers, PyTorch's all-to-all in the place of DeepEP's kernels",
        "mcore/test_flex_dispatcher.py::test_every_step_equals_plain_megatron_with_the_same_dispatcher",
    ),
    Proof(
        "Transformer Engine's and local layers, each with and without Apex, fused and unfused accumulation of weight "
        "gradients",
        "mcore/test_engine_combinations.py::test_every_combination_trains_as_plain_megatron",
    ),
    Proof(
        "`--defer-embedding-wgrad-compute`: the gradients of plain Megatron with it",
        "mcore/test_engine_combinations.py::test_what_megatron_puts_off_for_its_own_schedule_is_computed_in_ours",
    ),
    Proof(
        "the layers in fp8 (`--fp8-recipe tensorwise`, `delayed`), evaluations in between: the losses of plain "
        "Megatron bit for bit without vocabulary passes",
        "mcore/test_engine_fp8.py::test_without_vocabulary_passes_every_bit_is_plain_megatrons",
    ),
    Proof(
        "weights in fp8 (`--fp8-param-gather`): master weights start from what plain Megatron drew, in a V, too",
        "mcore/test_engine_fp8.py::test_master_weights_start_from_what_plain_megatron_drew",
    ),
    Proof(
        "frozen layers: both vocabulary layers or one, tied and untied, every other layer, all but attention's "
        "projection with the distributed optimizer overlapped; low-rank adapters (LoRA) between frozen layers; "
        "multi-token prediction, experts, tensor and sequence parallelism, full recomputation",
        "mcore/test_frozen.py::test_what_is_trained_is_trained_as_in_plain_megatron",
    ),
    Proof(
        "a frozen vocabulary: no gradients, no optimizer state, no launch in T of vocab-2 and in IB",
        "mcore/test_frozen.py::test_a_frozen_vocabulary_takes_no_gradients_no_state_and_no_time",
    ),
    Proof(
        "checkpoints of partly frozen models: resumed bit for bit, moved to plain Megatron and to other shards",
        "mcore/test_frozen.py::test_checkpoints_resume_exactly_and_move_to_plain_megatron_and_other_sizes",
    ),
    Proof("`--pipeline-trace`, `--rank-report`", "mcore/test_trace.py::test_the_command_reads_what_training_recorded"),
)

NOT_YET = (
    "CUDA, NCCL, several nodes",
    "what Transformer Engine compiles; the Mamba, gated delta net and latent attention layers of hybrid models",
    "Transformer Engine's attention under `--context-parallel-size`, and over packed sequences",
    "`--tp-comm-overlap` under 1f1b: Transformer Engine's buffers need a device",
    "the capture of CUDA graphs (`--cuda-graph-impl transformer_engine` and `local`): the order of buffers, and what "
    "outlives a replay, are tested with stand-ins",
    "the kernels of the flex token dispatcher, which need a device, and its backends HybridEP and NCCL EP",
)
"""Neither tested nor refused."""
