"""Test unmodified Megatron on CPU processes: the patches of torch, and the runs that need them."""

import os
import sys
from contextlib import ExitStack

import pytest
import torch

from megatron_vp.errors import UserError
from megatron_vp.mcore.platform import flags
from tests.harness import run_ranks, train
from tests.harness.ranks import process_group, run_ranks_to_their_end
from tests.harness.training import tiny_model


def torch_under_the_patches(_rank, _world_size):
    import torch

    from megatron_vp.mcore import patch_table, patches

    before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))
    seen = {}
    with ExitStack() as put_back:
        put_back.callback(patches.undo, patches.apply(patch_table.patches_of("cpu platform")))
        like = torch.ones(2, dtype=torch.bfloat16, device="cuda:0")
        seen["devices"] = {
            str(made.device)
            for made in (
                torch.zeros(2, device=torch.cuda.current_device()),
                torch.full((2,), 1.0, device=torch.device("cuda")),
                torch.tensor([1], device=0),
                torch.empty_like(like, device="cuda"),
                like.cuda(non_blocking=True),
            )
        }
        seen["meta"] = torch.empty(2, device="meta").device.type
        seen["types"] = (like.type(), like.type(torch.float32).dtype == torch.float32)
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        seen["random"] = torch.equal(first, torch.rand(3))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.Event().record(torch.cuda.current_stream())
        seen["available"] = torch.cuda.is_available()
    seen["restored"] = (dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))) == before
    return seen


def unequal_parts(rank, world_size):
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    from megatron_vp.mcore import patch_table, patches

    lengths = [2, 0, 3]
    rows = torch.arange(5.0).reshape(5, 1) * torch.ones(1, 4)
    with process_group(rank, world_size), ExitStack() as put_back:
        put_back.callback(patches.undo, patches.apply(patch_table.patches_of("cpu platform")))
        part = rows.split(lengths)[rank]
        group = dist.group.WORLD
        gathered = mappings.gather_from_sequence_parallel_region(part, True, group, lengths)
        reduced = mappings.reduce_scatter_to_sequence_parallel_region((rank + 1) * rows, group, lengths)
        equal = mappings.gather_from_sequence_parallel_region(torch.full((1, 4), float(rank)), True, group)
    return torch.equal(gathered, rows), torch.equal(reduced, 6 * part), equal[:, 0].tolist() == [0, 1, 2]


def test_ranks_with_unequal_numbers_of_tokens_gather_and_reduce_them():
    assert run_ranks(3, unequal_parts) == [(True, True, True)] * 3


def test_tensors_asked_for_on_cuda_are_on_the_cpu_and_torch_is_restored_afterwards():
    assert run_ranks(1, torch_under_the_patches) == [
        {
            "devices": {"cpu"},
            "meta": "meta",
            "types": ("torch.cuda.BFloat16Tensor", True),
            "random": True,
            "available": False,
            "restored": True,
        }
    ]


def test_what_an_asynchronous_save_writes_is_not_changed_by_the_next_step():
    from megatron_vp.mcore.platform.cpu import copied_tensors

    weight = torch.zeros(3)
    [(file, key, (others, [(item, kept)]))] = copied_tensors([("file", "key", (["bytes"], [("item", weight)]))])
    weight += 1
    assert (file, key, others, item, kept.tolist()) == ("file", "key", ["bytes"], "item", [0.0, 0.0, 0.0])


def environment_of_a_start(_rank, _world_size):
    import torch

    import pretrain_gpt_vp

    sys.argv = ["pretrain_gpt_vp.py", "--cpu", "--bf16"]
    pretrain_gpt_vp.prepare()
    variables = {name: os.environ[name] for name in ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS")}
    return sys.argv, set(variables.values()), torch.cuda.is_available()


def test_a_start_takes_its_own_flag_away_and_sets_the_environment():
    assert run_ranks(1, environment_of_a_start) == [(["pretrain_gpt_vp.py", "--bf16"], {"1"}, False)]


def test_flags_are_chosen_only_where_the_user_left_them_open():
    chosen = flags.platform_arguments([], cpu=True)
    assert chosen[:4] == ["--distributed-backend", "gloo", "--transformer-impl", "local"]
    assert "--no-persist-layer-norm" in chosen and "--no-rope-fusion" in chosen
    given = ["--distributed-backend=gloo", "--no-rope-fusion", "--transformer-impl", "local", "--bf16"]
    left = flags.platform_arguments(given, cpu=True)
    assert not {"--distributed-backend", "--transformer-impl", "--no-rope-fusion"} & set(left)
    assert "--no-bias-gelu-fusion" in left


@pytest.mark.parametrize(
    "given", [["--distributed-backend", "nccl"], ["--bf16", "--transformer-impl=transformer_engine"]]
)
def test_a_flag_that_cannot_work_here_is_refused(given):
    with pytest.raises(UserError, match="cannot work without a CUDA device: use --"):
        flags.platform_arguments(given, cpu=True)


def test_options_for_gpus_are_switched_off_and_named_once(tmp_path):
    options = {
        **{"log_memory_to_tensorboard": True, "tensorboard_dir": str(tmp_path), "record_memory_history": True},
        **{"profile": True, "profile_step_start": 1, "profile_step_end": 2, "log_device_memory_used": True},
        **{"gpu_sniff_test_interval": 1, "cuda_graph_impl": "local", "use_sharp": True, "use_nccl_ub": True},
        **{"nccl_communicator_config_path": "a_file", "init_model_with_meta_device": True},
    }
    words = tiny_model(pipeline_model_parallel_size=2, tensorboard_log_interval=1, **options)
    ends = run_ranks_to_their_end(2, train_a_little, words, timeout=60)
    assert [status for status, _ in ends] == [0, 0], ends
    said = [output.count("on CPUs, these options are switched off: --log-memory-to-tensorboard") for _, output in ends]
    assert said == [1, 0] and "--profile (needs CUDA's profiler), --log-device-memory-used" in ends[0][1]


def train_a_little(_rank, _world_size, words):
    import pretrain_gpt_vp as script

    sys.argv = ["pretrain_gpt_vp.py", *words]
    script.prepare()
    script.main()


def test_sequence_parallel_training_equals_pipeline_training():
    # Only this initialisation draws whole weights and cuts them, so that both start from the same model.
    shared = {"pipeline_model_parallel_size": 2, "train_iters": 2, "use_cpu_initialization": True}
    pipeline = train(2, tiny_model(**shared), same_weights=False)
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    sequence = train(4, tiny_model(**shared, **split), same_weights=False)
    assert sequence.losses == pytest.approx(pipeline.losses, rel=2e-6)
    assert sequence.grad_norms == pytest.approx(pipeline.grad_norms, rel=2e-6)
