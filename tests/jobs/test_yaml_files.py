"""Test YAML configuration files: how each kind of value is converted, which values win, and what is refused."""

import argparse
import os
import stat

import pytest
import yaml

from megatron_vp.errors import UserError
from megatron_vp.jobs.config_words import arguments_from_config
from megatron_vp.jobs.job_config import read_job_config
from megatron_vp.jobs.resolved import write_resolved
from megatron_vp.jobs.yaml_files import read_leaves


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--num-layers", type=int)
    p.add_argument("--lr", type=float, default=0.5)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    p.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--data-path", nargs="*")
    p.add_argument("--window", nargs=2, type=int)
    p.add_argument("--activation", choices=["gelu", "relu"], default="gelu")
    p.add_argument("--save-interval", "--persistent-save-interval", type=int)
    p.add_argument("--override-opt_param-scheduler", "--override-opt-param-scheduler", action="store_true")
    return p


def parse(tmp_path, text: str, *flags: str) -> argparse.Namespace:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return parser().parse_args([*arguments_from_config([path], parser()), *flags])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("num_layers: 4", "num_layers", 4),
        ("a: {b: {c: {num_layers: 4}}}", "num_layers", 4),
        ("lr: 1e-4", "lr", 1e-4),
        ("lr: null", "lr", 0.5),
        ("bf16: false", "bf16", False),
        ("no_rope_fusion: true", "rope_fusion", False),
        ("no_rope_fusion: false", "rope_fusion", True),
        ("prefix_caching: false", "prefix_caching", False),
        ("no_prefix_caching: false", "prefix_caching", True),
        ("data_path: [0.3, a, 0.7, b]", "data_path", ["0.3", "a", "0.7", "b"]),
        ("data_path: []", "data_path", []),
        ("window: [1, -2]", "window", [1, -2]),
        ("persistent_save_interval: 5", "save_interval", 5),
        ("override_opt_param_scheduler: true", "override_opt_param_scheduler", True),
        ("x: {num_layers: 6}\ny: {window: ['${x.num_layers}', 1]}", "window", [6, 1]),
    ],
)
def test_leaf(tmp_path, text, name, value):
    assert getattr(parse(tmp_path, text), name) == value


def test_command_line_wins(tmp_path):
    text = "lr: 1\nbf16: false\ndata_path: [a, b]\nprefix_caching: true"
    args = parse(tmp_path, text, "--bf16", "--lr", "2", "--data-path", "c", "--no-prefix-caching")
    assert (args.lr, args.bf16, args.data_path, args.prefix_caching) == (2.0, True, ["c"], False)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {size: {num_layer: 4}}", ["job.yaml", "num_layer", "model.size", "nearest", "'num_layers'"]),
        ("rope_fusion: false", ["rope_fusion", "top level", "'no_rope_fusion'"]),
        ("help: true", ["help"]),
        ("num_layers: four", ["num_layers", "invalid int value: 'four'"]),
        ("num_layers: true", ["num_layers", "cannot be True"]),
        ("num_layers: [1, 2]", ["must be 1, not 2"]),
        ("lr: high", ["lr", "invalid float value"]),
        ("bf16: 1", ["bf16", "true or false"]),
        ("activation: tanh", ["activation", "(choose from 'gelu', 'relu')"]),
        ("window: [1]", ["window", "must be 2, not 1"]),
        ("a: {lr: 1}\nb: {lr: 2}", ["'lr' in section 'b'", "section 'a'"]),
        ("save_interval: 1\npersistent_save_interval: 2", ["persistent_save_interval", "also set in"]),
        ("lr: 1\nlr: 2", ["not valid YAML", "duplicate"]),
        ("- lr", ["mapping"]),
        ("lr: ${nowhere}", ["nowhere"]),
        ("lr: ${oc.env:NOT_SET_ANYWHERE}", ["NOT_SET_ANYWHERE", "'lr'"]),
        ("null: 1", ["key", "'argument_name: value' lines"]),
        ("lr: " + "[" * 2000 + "]" * 2000, ["recursion"]),
        ("base: job.yaml", ["base", "itself"]),
        ("base: other.yaml", ["cannot read", "other.yaml"]),
        ("base: 3", ["base", "comes with megatron_vp", "not 3"]),
        ("base: llama4_8b", ["base", "comes with megatron_vp", "'llama4_8b'"]),
        ("num_layers: " + "9" * 5000, ["not valid YAML", "5000 digits"]),
        ("lr: !!timestamp 2001-99-99", ["not valid YAML", "month"]),
        ("model:\n- num_layers: 4", ["section 'model' is a list", "without dashes"]),
    ],
)
def test_refused_with_one_clear_line(tmp_path, text, parts):
    with pytest.raises(UserError) as error:
        parse(tmp_path, text)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_base_is_overlaid(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "base.yaml").write_text("m: {num_layers: 4, lr: 1}\nd: {bf16: true, data_path: [a, b]}")
    args = parse(tmp_path, "base: deep/base.yaml\nm: {lr: 2}\nd: {bf16: false, data_path: [c]}")
    assert (args.num_layers, args.lr, args.bf16, args.data_path) == (4, 2.0, False, ["c"])


def overlaid(tmp_path, *texts):
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_a_later_file_wins_from_any_section(tmp_path):
    files = overlaid(
        tmp_path,
        "m: {num_layers: 4, lr: 1}\nd: {window: ['${m.num_layers}', 1], data_path: [a, b], bf16: true}",
        "num_layers: 6\nother: {lr: 2, bf16: null, window: ['${num_layers}', 2]}",
        "m: {deep: {lr: 3}}\nsave_interval: 5",
        "x: {save_interval: 6}",
    )
    args = parser().parse_args(arguments_from_config(files, parser()))
    assert (args.num_layers, args.lr, args.window, args.bf16, args.save_interval) == (6, 3.0, [6, 2], False, 6)
    assert {leaf.key: str(leaf) for leaf in read_leaves(files)} == {
        "num_layers": f"{files[1]}: 'num_layers' in the top level",
        "lr": f"{files[2]}: 'lr' in section 'm.deep'",
        "window": f"{files[1]}: 'window' in section 'other'",
        "data_path": f"{files[0]}: 'data_path' in section 'd'",
        "bf16": f"{files[1]}: 'bf16' in section 'other'",
        "save_interval": f"{files[3]}: 'save_interval' in section 'x'",
    }
    files[1].write_text("other: {lr: 2}\nmore: {lr: 3}")
    with pytest.raises(UserError, match=r"'lr' in section '.*' is also set in section '"):
        arguments_from_config(files[:2], parser())


def test_a_shipped_configuration_is_a_base_and_is_overridden_by_a_flat_file(tmp_path):
    (path,) = overlaid(tmp_path, "base: llama3_8b\nglobal_batch_size: 64")
    job = read_job_config([path], [])
    assert job["global_batch_size"] == 64 and job["num_layers"] == 32


def test_errors_name_the_file_whose_value_stands(tmp_path):
    first, second, third = overlaid(tmp_path, "m: {lr: 1}", "base: 0.yaml\nm: {lrr: 1}", "m: {lr: high}")
    with pytest.raises(UserError, match=f"^{second}: 'lrr' in section 'm'"):
        arguments_from_config([second], parser())
    with pytest.raises(UserError, match=f"^{third}: 'lr' in section 'm': invalid float value: 'high'"):
        arguments_from_config([first, third], parser())
    assert [leaf.file for leaf in read_leaves([third, first])] == [first]


def test_write_resolved_is_plain_sorted_yaml(tmp_path):
    def function(): ...

    args = argparse.Namespace(b=(1, 2), a={"x": None}, kind=type("Kind", (), {}), f=function, _private=1, text="yes")
    path = tmp_path / "new" / "resolved.yaml"
    write_resolved(args, path)
    loaded = yaml.safe_load(path.read_text())
    assert list(loaded) == ["a", "b", "f", "kind", "text"]
    assert loaded["b"] == [1, 2] and loaded["a"] == {"x": None} and loaded["text"] == "yes"
    assert [p.name for p in path.parent.iterdir()] == ["resolved.yaml"]


PLANTED = "PLANTED-bc7d1"


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"activation: x${{oc.env:{name}}}"
            for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "my_pwd")
        ),
        "activation: ${oc.env:GITHUB_PAT,none}",
        "a: {activation: '${oc.decode:${oc.env:DB_PASSWORD}}'}",
        "data_path: [a, '${ oc.env: DB_PASSWORD }']",
    ],
)
def test_a_secret_of_the_environment_does_not_become_an_argument(tmp_path, monkeypatch, text):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "my_pwd", "GITHUB_PAT", "DB_PASSWORD"):
        monkeypatch.setenv(name, PLANTED)
    with pytest.raises(UserError, match="files and logs") as refused:
        parse(tmp_path, text)
    assert PLANTED not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["TOKENIZER", "TRAIN_TOKENS", "PWD", "SSH_KEY_FILE", "SCRATCH", "SLURM_JOB_ID"])
def test_other_variables_become_arguments(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "17")
    monkeypatch.setenv("WANDB_API_KEY", "18")
    assert parse(tmp_path, f"# ${{oc.env:WANDB_API_KEY}}\nnum_layers: ${{oc.env:{name}}}").num_layers == 17


def test_only_owner_and_group_read_the_arguments_of_a_run(tmp_path):
    before = os.umask(0o022)
    try:
        write_resolved(argparse.Namespace(a=1), tmp_path / "resolved.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "resolved.yaml").stat().st_mode) == 0o640
