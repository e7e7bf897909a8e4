"""Test passes, placements, costs and files: written data is read back, and invalid data is refused with a reason."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vp.errors import UserError
from megatron_vp.schedule import (
    FAMILIES,
    Pass,
    PassCosts,
    PassKind,
    Placement,
    ScheduleRequest,
    VocabMethod,
    evaluation,
    family,
    from_csv,
    from_json,
    generate,
    to_csv,
    to_json,
)


@given(st.sampled_from(list(PassKind)), st.integers(0, 10**6), st.integers(0, 64))
def test_a_pass_prints_and_parses_back(kind, microbatch, chunk):
    step = Pass(kind, microbatch, chunk)
    assert Pass.parse(str(step)) == step


@pytest.mark.parametrize("text", ["", "X1", "F", "F-1", "F1.", "F1.2.3", "f1"])
def test_other_text_is_not_a_pass(text):
    with pytest.raises(ValueError, match="is not a pass"):
        Pass.parse(text)


def test_placements_read_in_both_directions():
    v_shape = Placement.v_shape(3)
    assert v_shape.stage_of == ((0, 5), (1, 4), (2, 3))
    assert (v_shape.first_rank, v_shape.last_rank, v_shape.stages) == (0, 0, 6)
    assert [v_shape.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert Placement.round_robin(2, 3).stage_of == ((0, 2, 4), (1, 3, 5))
    assert Placement.round_robin(4).last_rank == 3


@pytest.mark.parametrize("table", [((0, 1), (2,)), ((0,), (2,)), ((0, 1), (1, 2)), ((),)])
def test_a_placement_names_every_stage_once(table):
    with pytest.raises(ValueError, match="placement"):
        Placement(table)


def test_costs_parse_and_keep_defaults():
    assert PassCosts.parse("F=2, W=0,comm=1e-3") == PassCosts(F=2.0, W=0.0, comm=1e-3)
    assert PassCosts.parse("") == PassCosts()


@pytest.mark.parametrize("text", ["G=1", "F", "F=x", "F=1,F=2", "F=-1", "F=nan", "B=inf", "F=1e308", "comm=1e16"])
def test_bad_costs_are_refused_with_the_item(text):
    with pytest.raises(UserError, match="cost"):
        PassCosts.parse(text)


def test_an_unsplit_backward_takes_both_gradients_and_chunks_share_a_rank():
    costs = PassCosts(F=2, B=3, W=4)
    whole, chunked = generate("1f1b", 2, 1), generate("v-half", 2, 1)
    assert costs.duration(whole, 0, Pass(PassKind.B, 0)) == 7
    assert costs.duration(chunked, 0, Pass(PassKind.B, 0)) == 1.5
    assert costs.duration(chunked, 0, Pass(PassKind.F, 0)) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_csv_of_every_family_and_method_reads_back_in_pytorchs_form(name):
    for method in FAMILIES[name].methods:
        schedule = generate(name, 3, 5, vocab=method)
        for each in (schedule, evaluation(schedule)):
            lines = [line for line in to_csv(each).splitlines() if not line.startswith("#")]
            assert len(lines) == 3 and all(re.fullmatch(r"\d+[A-Z]+\d+", cell) for cell in ",".join(lines).split(","))
            assert from_csv(to_csv(each)) == replace(each, name="pytorch", shape="")
    assert "0S3" in to_csv(generate("1f1b", 3, 5, vocab="vocab-2")) and "1S3" not in to_csv(generate("1f1b", 1, 5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("ranks"), "ranks"),
        (lambda d: d.update(vocab="vocab-3"), "vocab-3"),
        (lambda d: d.update(pipeline_size=7), "sets 'pipeline_size' to 7"),
        (lambda d: d.update(placement=[[0], [0]]), "placement"),
        (lambda d: d["ranks"][0][0].update({"pass": "Q"}), "'Q' is not a pass; passes are IF, F, S, T, V, B, W, BW"),
        (lambda d: d["ranks"][0][1].update(microbatch="one"), "pass 1 of rank 0: 'one' is not a whole number"),
        (lambda d: d.update(ranks=3), "JSON format"),
        (lambda d: d.update(microbatches=0), "has 0 microbatches, .* give at least 1"),
        (lambda d: d.update(microbatches=10**12), "no rank lists more than 2 passes"),
    ],
)
def test_a_file_that_is_not_a_schedule_is_refused(change, words):
    document = json.loads(to_json(generate("1f1b", 2, 1)))
    change(document)
    with pytest.raises(UserError, match=words):
        from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "no json", "[1]", '"x"', '{"a":' * 100_000])
def test_no_json_object_is_refused(text):
    with pytest.raises(UserError, match="JSON format"):
        from_json(text)


OLD = "# schedule=1f1b vocab=none microbatches=1\nrank,pass,chunk,microbatch,stage\n0,F,0,0,0\n0,B,0,0,0\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: OLD, "line 1: .* is not a pass such as 2F0 or 0S3: write the schedule as JSON"),
        (lambda text: text.replace("0F0", "0Sx0"), "line 1: '0Sx0' is not a pass"),
        (lambda text: text.replace("1F1", "1F"), "line 2: '1F' is not a pass"),
        (lambda text: text.replace("1F1", "1SEND_F1"), "line 2: '1SEND_F1' is not a pass .* format='compute_only'"),
        (lambda text: text + "# vocab=3\n", "CSV format: vocab method '3' is unknown"),
        (lambda text: text.replace("0F", "1F"), "placement must have each virtual stage"),
        (lambda text: text.replace("1F", "1B"), "equally many, at least 1"),
        (lambda text: text.replace("0B0", "1B0"), "rank 0 has passes of stage 1, but no forward of this stage"),
        (lambda text: text.replace("0B1", "0B900"), "the schedule has 901 microbatches, but no rank lists more than 4"),
        (lambda text: "", "and equally many, at least 1, on every rank"),
    ],
)
def test_a_damaged_csv_is_refused(damage, words):
    with pytest.raises(UserError, match=words):
        from_csv(damage(to_csv(generate("1f1b", 2, 2))))


TWO = VocabMethod.VOCAB_2


def test_what_is_left_open_is_what_could_have_been_said():
    v_half, interlaced = FAMILIES["v-half"], FAMILIES["interlaced"]
    said = ScheduleRequest.of(
        v_half, 4, 6, method=TWO, chunks=2, costs=PassCosts(), vocab_ranks=(3, 1, 0, 2), forward_only=False
    )
    assert ScheduleRequest.of(v_half, 4, 6, method=TWO) == said and said.vocab_ranks == (0, 1, 2, 3)
    assert ScheduleRequest.of(interlaced, 4, 6).method is VocabMethod.INTERLACED
    assert ScheduleRequest.of(v_half, 4, 6).vocab_ranks == ()


def test_a_file_that_was_written_again_is_another_request(tmp_path):
    path, requests = tmp_path / "mine.json", []
    for microbatches in (3, 4):
        path.write_text(to_json(generate("1f1b", 2, microbatches)))
        record = family(str(path))
        requests.append(ScheduleRequest.of(replace(record, placement=len), 2, 3))
    assert requests[0] != requests[1] and hash(requests[0]) == hash(requests[1])


def test_a_file_evaluates_any_number_of_microbatches_and_trains_its_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(generate("1f1b", 2, 3)))
    request = ScheduleRequest.of(family(str(path)), 2, 3)
    assert replace(request, microbatches=2).schedule().microbatches == 2
    assert replace(request, microbatches=7, forward_only=True).schedule().microbatches == 7
    with pytest.raises(UserError, match="has 2 ranks and 3 microbatches, but 2 and 7 are requested"):
        replace(request, microbatches=7)
