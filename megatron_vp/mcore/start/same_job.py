"""Checks before training that every rank runs the same job, to find nodes whose configuration or software differs.

Ranks with different numbers of microbatches would wait for each other forever, and different learning rates or versions
of this package would silently produce a different model. So all arguments are compared, except those that may differ
between machines.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch

import megatron_vp
from megatron_vp.jobs.command_line import option_of
from megatron_vp.jobs.vocab_shards import ShardChoice
from megatron_vp.mcore.options.arguments import write_resolved_configuration
from megatron_vp.mcore.patches import Patch, installed_version
from megatron_vp.mcore.platform.installed import installed
from megatron_vp.mcore.settled import current, settle
from megatron_vp.mcore.start.meeting import compare
from megatron_vp.mcore.storage.save_folder import agreed, claim, saves_to

OF_A_RANK = {
    "rank": "each process has its own rank",
    "local_rank": "each process has its own local rank",
    "node_rank": "each machine has its own node rank",
    "config": "the options in the configuration files are compared instead of the files' names",
}
"""Arguments that are not compared between ranks, and the reasons."""

_PLACES = {
    "data, which machines may keep in different folders": (
        "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path "
        "per_dataset_sequences_path data_cache_path object_storage_cache_path titles_data_path evidence_data_path "
        "block_data_path embedding_path"
    ),
    "the tokenizer's files, whose vocabulary sizes are compared instead": (
        "vocab_file merge_file tokenizer_model metadata_path"
    ),
    "checkpoints, whose paths may differ between machines": (
        "save load pretrained_checkpoint ckpt_convert_save non_persistent_global_ckpt_dir "
        "non_persistent_local_ckpt_dir ict_load bert_load logits_save_dir logits_load_dir ckpt_pg_tensors_cache_path "
        "rl_rollout_bank_dir"
    ),
    "logs and dumps": (
        "tensorboard_dir wandb_save_dir rank_report pipeline_trace config_logger_dir rl_profile_dir "
        "memory_snapshot_path flight_recorder_dump_path result_rejected_tracker_filename "
        "dump_param_to_param_group_map moe_routing_trace_path"
    ),
    "log names, which only one rank uses and which may contain the time or the machine's name": (
        "wandb_project wandb_exp_name wandb_entity one_logger_project one_logger_run_name app_tag_run_name "
        "app_tag_run_version"
    ),
    "further configuration files": (
        "nccl_communicator_config_path tp_comm_overlap_cfg te_precision_config_file langrl_env_config "
        "heterogeneous_layers_config_path yaml_cfg"
    ),
}
PLACES = {name: reason for reason, names in _PLACES.items() for name in names.split()}
"""Arguments that name a file, a folder or another resource, each mapped to what the resource contains. Ranks compare
only whether these arguments are given. If an argument is a list, ranks also compare its length and the numbers in it,
such as the weights of datasets.
"""


def facts(
    arguments: Mapping[str, Any], parts: Mapping[str, str] | None = None, given: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Return a rank's description of its job: a dictionary with the keys "alike" and "given".

    "alike" maps names to texts that must be equal on all ranks. It contains the versions of packages, a fingerprint of
    our code, and the job's arguments, including those that Megatron and this plug-in derive. "given" is a copy of the
    argument `given`.

    Args:
        arguments: values by name; names that begin with an underscore are left out.
        parts: the implementation of each part of the job.
        given: the options that the run was given, by argument name.
    """
    alike = {
        name: _place(value) if name in PLACES else _text(value)
        for name, value in arguments.items()
        if name not in OF_A_RANK and not name.startswith("_")
    }
    if ShardChoice.parse(arguments.get("vocab_shards")).folder is not None:
        alike["vocab_shards"] = "measured:DIR"  # Instead of the folders, the `vocab_rows` read from them are compared.
    packages = {
        "megatron_vp": megatron_vp.__version__,
        "megatron-core": installed_version(),
        "torch": torch.__version__,
        "Transformer Engine": installed().engine,
    }
    parts = {f"the implementation of the {part}": who for part, who in (parts or {}).items()}
    versions = {f"the version of {package}": str(found) for package, found in packages.items()}
    ours = {"the code of megatron_vp": code(Path(megatron_vp.__file__).parent)}
    return {"alike": alike | parts | versions | ours, "given": dict(given or {})}


def _place(value: Any) -> str:
    """Return the text that ranks compare instead of the value of an argument in PLACES."""
    if value is None:
        return "not given"
    return _text([_number(word) or "PATH" for word in value]) if isinstance(value, list) else "given"


def _number(word: Any) -> str | None:
    """The number that `word` stands for, in one notation, or None if it is not a number."""
    try:
        return str(float(word))
    except (TypeError, ValueError):
        return None


def _text(value: Any) -> str:
    """Format a value identically in every process: without memory addresses, and with sets and mappings in sorted
    order.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(each)}' for key, each in value.items()))}}}"
    if isinstance(value, functools.partial):
        return f"{_text(value.func)}({_text(value.args)}, {_text(value.keywords)})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, Enum | Path) and hasattr(value, "__dict__"):
        return f"{type(value).__qualname__}{_text(vars(value))}"
    return str(value)


def code(package: Path) -> str:
    """Return a fingerprint of a package's sources, which may differ between checkouts with the same version number."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def difference(ranks: list[dict[str, dict[str, str]]]) -> str:
    """Describe the first argument in which `ranks` differ: its name, and each value with its ranks. Returns "" if all
    arguments are equal, as when only one rank states a default. Options that were given are compared first, because
    arguments derived from them may differ as well.
    """
    given: dict[str, str] = {}
    for each in ranks:
        given |= each["given"]
    alike = [each["alike"] for each in ranks]
    names = dict.fromkeys([*given, *(name for each in alike for name in each)])
    name = next((name for name in names if len({each.get(name) for each in alike}) > 1), None)
    if name is None:
        return ""
    values: dict[str | None, list[int]] = {}
    for rank, each in enumerate(alike):
        values.setdefault(each.get(name), []).append(rank)
    option = given.get(name, name)
    called = option if option in (name, option_of(name)) else f"{name} ({option})"
    return f"{called} is " + ", ".join(f"{value} on {_counted(found)}" for value, found in values.items())


def _counted(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks (the first is rank {ranks[0]})"


def _with_the_same_job(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize_distributed(*args: Any, **kwargs: Any) -> None:
        job = current()
        arguments = job.args
        if arguments.fake_process_group:
            return original(*args, **kwargs)
        # Compare the ranks' jobs before process groups exist, because ranks that create different groups have no common
        # communicator.
        patience = timedelta(minutes=arguments.distributed_timeout_minutes)
        require_same_job(facts(vars(arguments), job.parts, job.words.options), patience)
        original(*args, **kwargs)
        order = [job.order]  # All ranks use rank 0's costs, because costs depend on the device.
        torch.distributed.broadcast_object_list(order, src=0)
        settle(replace(job, order=order[0]))
        if (folder := saves_to(arguments)) is not None:
            claim(*folder)
        agreed(functools.partial(write_resolved_configuration, arguments))
        if arguments.rank == 0:
            # Imported here, because the banner imports the cost model, which other ranks do not need.
            from megatron_vp.mcore.start.banner import print_banner

            print_banner(current())
        return None

    return initialize_distributed


def require_same_job(own: dict[str, dict[str, str]], patience: timedelta) -> None:
    """Compare `own`, the result of `facts`, between all ranks. Raises UserError on every rank if arguments differ."""

    def verdict(everyone: list[dict[str, dict[str, str]]]) -> str:
        said = difference(everyone)
        way = "start every rank with the same configuration files, flags and package versions"
        return said and f"the ranks did not get the same job: {said}; {way}"

    compare(own, verdict, patience)


PATCHES = (
    Patch(
        "megatron.training.initialize:_initialize_distributed",
        _with_the_same_job,
        "compares the ranks' arguments and package versions, because differences would hang the job or silently "
        "produce a different model; then makes all ranks use the pass times that rank 0 predicts, claims the folder "
        "that this run saves to, writes the resolved configuration, and prints the banner",
    ),
)
