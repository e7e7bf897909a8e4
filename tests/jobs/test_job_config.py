"""Test that every command parses a job's arguments into the same values, in any order."""

import pytest

from megatron_vp.errors import UserError
from megatron_vp.jobs.command_line import asks_for_cpu, flag_value, flags_in, split_config
from megatron_vp.jobs.job_config import read_job_config, whole_number


def test_every_spelling_of_a_flag():
    words = ["--switch", "--lr", "-1e-4", "--data-path=0.5", "a", "--lr=2"]
    assert list(flags_in(words)) == [
        ("--switch", []),
        ("--lr", ["-1e-4"]),
        ("--data-path", ["0.5", "a"]),
        ("--lr", ["2"]),
    ]
    assert [flag_value(["script.py", *words], option) for option in ("--switch", "--lr", "--l")] == ["", "2", None]
    with pytest.raises(UserError, match=r"'job.yaml' is not a flag"):
        list(flags_in(["job.yaml", "--switch"]))


def test_configuration_files_stand_anywhere_among_the_words():
    assert split_config(["--lr", "1", "--config", "a.yaml", "--config=-b.yaml", "--bf16"]) == (
        ["a.yaml", "-b.yaml"],
        ["--lr", "1", "--bf16"],
    )
    for words in (["--config"], ["--config", "--bf16"], ["--config", "-a.yaml"]):
        with pytest.raises(UserError, match=r"argument --config: expected one argument; .* give it as \./-NAME"):
            split_config(words)


def test_flags_win_over_files_and_say_where_they_stand(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("a: {num_layers: 4, lr: null, hidden_size: two}\nb: {seq_length: 8}")
    config = read_job_config([path], ["--num-layers", "6", "--bf16", "--window-size", "1", "2"])
    assert config == {
        **{"num_layers": 6, "lr": None, "hidden_size": "two", "seq_length": 8},
        **{"bf16": True, "window_size": [1, 2]},
    }
    assert [whole_number(config, name, 3) for name in ("num_layers", "lr", "absent")] == [6, 3, 3]
    for name, value in (("hidden-size", "two"), ("bf16", "True")):
        with pytest.raises(UserError, match=f"--{name} {value} is not an integer"):
            whole_number(config, name.replace("-", "_"), 1)


def test_the_processor_is_asked_for_by_a_flag_or_a_variable(monkeypatch):
    monkeypatch.delenv("MEGATRON_VP_CPU", raising=False)
    assert asks_for_cpu(["--cpu"]) and not asks_for_cpu(["--cpu-offload"])
    monkeypatch.setenv("MEGATRON_VP_CPU", "1")
    assert asks_for_cpu([])
