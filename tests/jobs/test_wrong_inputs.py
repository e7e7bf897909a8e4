"""Test typical mistakes of new users: every command reports them in one line and exits with status 2."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_vp.cli.app import main
from megatron_vp.schedule import generate, to_json
from tests.harness.ranks import ROOT

LLAMA = "configs/llama3_8b.yaml"
FILES = {
    "list.yaml": "- num_layers\n",
    "empty.yaml": "",
    "section_list.yaml": "base: BASE\nmodel:\n- num_layers: 4\n",
    "typo.yaml": "base: BASE\nmodel: {num_layer: 4}\n",
    "no_keys.json": '{"schedule": "1f1b"}',
}
"""Written into a folder; BASE is a model's configuration."""

# The command line, of which {} is that folder, and a part of the line that it must say.
OF_SIZES = [
    (
        "plan",
        "hidden_size, num_attention_heads, seq_length, micro_batch_size, num_layers, vocab_size are missing",
    ),
    ("plan nowhere.yaml", "cannot read configuration file nowhere.yaml: No such file or directory"),
    (
        "plan llama4_8b",
        "llama4_8b is neither a file nor a configuration that comes with megatron_vp; use one of gemma2_9b, gpt_10b,",
    ),
    ("plan gpt_4b.yaml", "there is no file gpt_4b.yaml here; for the one that comes with megatron_vp, write gpt_4b"),
    ("plan configs", "cannot read configuration file configs: Is a directory"),
    ("simulate {}/list.yaml", "list.yaml does not contain a mapping"),
    (
        "simulate {}/empty.yaml",
        "hidden_size, num_attention_heads, seq_length, micro_batch_size, num_layers, vocab_size",
    ),
    ("simulate {}/section_list.yaml", "section 'model' is a list"),
    ("simulate {}/typo.yaml", "the nearest known argument is 'num_layers'"),
    ("plan LLAMA --hardware h1000", "nearest name is 'h100'"),
    ("plan LLAMA --tp 8", "the nearest known option is --tensor-model-parallel-size"),
    ("plan LLAMA --nodes 0", "Invalid value for '--nodes'"),
    ("plan LLAMA --nodes 3 --pipeline-model-parallel-size 16", "24 ranks cannot be divided into replicas of 16"),
    ("plan LLAMA --memory 80GB", "Invalid value for '--memory'"),
    ("plan LLAMA -o {}/plan.json --format table", "contradict each other"),
    ("plan LLAMA -o {}/no/plan.json", "create it first"),
    ("plan LLAMA -o {}", "it is a folder"),
    ("plan LLAMA --vocab-size -5", "--vocab-size -5 is not a whole number from 1 to 268435456"),
    ("plan LLAMA --num-layers 3", "3 layers cannot fill 8 pipeline ranks"),
    ("plan LLAMA --hidden-size 4097", "hidden size 4097 cannot be divided equally among 32 attention heads"),
    ("plan LLAMA --micro-batch-size 3", "is not a multiple of --micro-batch-size 3 times the data-parallel size 1"),
    ("plan LLAMA --pipeline-model-parallel-size 1", "no plan fits into 79.1 GiB per rank"),
    ("plan LLAMA --tensor-model-parallel-size 3", "tensor parallel size 3 must divide the number of heads (32)"),
    ("plan LLAMA --vocab-parallel-algorithm vocab-1", "has no effect without --vocab-parallel"),
    ("plan LLAMA LLAMA", "'configs/llama3_8b.yaml' is not a flag or a flag's value"),
    ("plan LLAMA -p 4", "'-p' is not a flag or a flag's value"),
    ("plan LLAMA --config", "requires an argument"),
    ("simulate LLAMA --vocab-parallel-algorithm vocab-2", "has no effect without --vocab-parallel"),
    ("simulate LLAMA --vocab-parallel=yes", "--vocab-parallel: ignored explicit argument 'yes'"),
    ("simulate LLAMA --pipeline-schedule gpipe", "unknown schedule 'gpipe'"),
    ("simulate LLAMA --pipeline-schedule {}/four_ranks.json", "has 4 ranks and"),
    (
        "simulate LLAMA --pipeline-schedule {}/no_keys.json",
        "JSON format: it lacks the key 'microbatches'",
    ),
    ("simulate LLAMA --pipeline-schedule interlaced", "add --vocab-parallel"),
    ("simulate LLAMA --pipeline-schedule interleaved", "needs at least two chunks per rank"),
    ("simulate LLAMA --pipeline-model-parallel-layout Et*4", "does not match 32 layers on 8 stages"),
    ("simulate LLAMA --global-batch-size 999999", "simulate accepts at most"),
    ("simulate LLAMA --fp16", "bf16 and fp16 are both on"),
    ("simulate LLAMA --padded-vocab-size 1000", "padded_vocab_size 1000 is smaller than vocab_size 128256"),
    ("simulate LLAMA --fp8-format hybrid --fp8-recipe mxfp8", "tensor cores cannot scale blocks of 32"),
    ("simulate LLAMA --num-experts 8 --moe-router-topk 9", "a token cannot be routed to 9 of 8 experts"),
]
OF_ARGUMENTS = [
    ("check", "Missing option '--ranks'"),
    ("check MOCK --ranks 0", "Invalid value for '--ranks'"),
    ("check MOCK --ranks 12", "world size (12) is not divisible by total_model_size"),
    ("check nowhere.yaml --ranks 8", "cannot read configuration file nowhere.yaml"),
    ("check MOCK --ranks 8 --hardware h100", "unrecognized arguments: --hardware h100"),
    ("check LLAMA --ranks 8", "data/llama3_tokenizer"),
    ("sbatch", "the job has no configuration file"),
    ("sbatch MOCK --dry-run --nodes four", "Invalid value for '--nodes'"),
    ("sbatch LLAMA", "data/llama3_tokenizer"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The wrong files."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text.replace("BASE", str(ROOT / LLAMA)))
    (folder / "four_ranks.json").write_text(to_json(generate("1f1b", 4, 8)))
    return folder


def words_of(line: str, folder: Path) -> list[str]:
    """A command line as words."""
    text = line.replace("{}", str(folder)).replace("MOCK", "LLAMA --config configs/data/mock.yaml")
    return shlex.split(text.replace("LLAMA", LLAMA))


@pytest.mark.parametrize(("line", "said"), [pytest.param(*each, id=each[0]) for each in (*OF_SIZES, *OF_ARGUMENTS)])
def test_it_is_refused_in_one_line(folder, line, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main(words_of(line, folder))
    output, errors = capsys.readouterr()
    assert stopped.value.code == 2 and output == ""
    assert errors.startswith("megatron-vp: error: ") and errors.count("\n") == 1 and errors.endswith("\n"), errors
    assert said in errors
