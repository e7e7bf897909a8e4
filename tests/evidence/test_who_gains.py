"""Test the table of who gains with a small search."""

import json

from evidence import who_gains


def test_a_model_gets_a_row_for_each_limit_that_it_fits(monkeypatch, capsys):
    small = who_gains.Case("nemotron3_8b", "h100", 4, 2048, 8, 1, 4)
    found = [*who_gains.rows([small], budget=4)]
    assert [round(row["limit_gib"]) for row in found] in ([79, 40], [79])
    for row in found:
        without, ours = row["without"], row["with"]
        assert row["answer"] in ("faster", "smaller", "not worth it")
        assert without["method"] in ("plain", "redistributed") and ours["method"] in ("plain", "vocab-1", "vocab-2")
        assert row["speedup"] == without["iteration_seconds"] / ours["iteration_seconds"]
    table = who_gains.to_markdown(found).splitlines()
    assert len(table) == 2 + len(found) and {line.count("|") for line in table} == {5}
    monkeypatch.setattr(who_gains, "rows", lambda cases: iter([{"model": case.name} for case in cases]))
    who_gains.main(["--models", "deepseek_v3", "--format", "json"])
    assert [row["model"] for row in json.loads(capsys.readouterr().out)] == ["deepseek_v3, without MTP", "deepseek_v3"]


def test_every_case_is_a_job_that_fits_its_gpus():
    for case in who_gains.CASES:
        flags = case.flags()
        assert ("--mtp-num-layers" in flags) == (case.model == "deepseek_v3" and not case.without_mtp)
        assert case.gpus % (case.pipeline * max(case.tensor, case.expert)) == 0
