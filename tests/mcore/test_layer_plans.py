"""Test the order in which a forward and a backward run as one, with layers of plain functions."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_vp.schedule import generate
from megatron_vp.schedule.passes import PassKind

NODES = {"pre_dispatch_computation": "comp", "moe_dispatch": "comm", "mlp": "comp", "moe_combine": "comm"}
PAIR = [
    "combine.B@comm",
    "pre_dispatch.F@comp",
    "mlp.B@comp",
    "dispatch.F@comm",
    "W",
    "dispatch.B@comm",
    "mlp.F@comp",
    "combine.F@comm",
    "pre_dispatch.B@comp",
]
"""What a layer's forward and another layer's backward issue: as Megatron's `TransformerLayerSchedulePlan.run`."""


@pytest.fixture(autouse=True)
def device():
    """Streams and events that do nothing."""
    from megatron.core.pipeline_parallel import utils

    def done(*_args, **_kwargs):
        return SimpleNamespace(wait=lambda stream: None, record=lambda stream: None)

    streams = {"Stream": done, "Event": done, "current_stream": done, "stream": lambda stream: nullcontext()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **streams))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        stack.enter_context(mock.patch.object(utils, "_COMM_STREAM", None))
        yield


class Chunk:
    """As many layers as `experts` has elements, each x -> 3 x in four nodes, of which a dense layer has two."""

    def __init__(self, log: list[str], experts: list[bool], norm: torch.nn.Module | None = None) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.log, self.experts = log, experts
        self.config = SimpleNamespace(high_priority_a2a_comm_stream=False, ep_overlap_early_attn_memory_release=False)
        mlps = [MoELayer.__new__(MoELayer) if each else None for each in experts]
        self.decoder = SimpleNamespace(final_layernorm=norm, layers=[SimpleNamespace(mlp=each) for each in mlps])

    def build_schedule_plan(self, leaf: torch.Tensor) -> object:
        from megatron.core.models.common import model_chunk_schedule_plan as megatron
        from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode, get_comm_stream

        plan = megatron.TransformerModelChunkSchedulePlan.__new__(megatron.TransformerModelChunkSchedulePlan)
        plan._event, plan.post_process, plan.vp_stage = torch.cuda.Event(), None, 0
        plan._model_chunk_state = SimpleNamespace()

        def node(name: str) -> ScheduleNode:
            made = ScheduleNode(lambda x: x * (3 if name == "mlp" else 1), torch.cuda.current_stream, plan._event)

            def log_it(way: str, run):
                def ran(*args):
                    stream = made.stream() if callable(made.stream) else made.stream
                    where = "comm" if stream is get_comm_stream() else "comp"
                    short = name.removeprefix("moe_").removesuffix("_computation")
                    self.log.append(f"{short}.{way}@{where}")
                    return run(*args)

                return ran

            if NODES.get(name) == "comm":
                made.stream = get_comm_stream
            if name in NODES:
                made.forward, made.backward = log_it("F", made.forward), log_it("B", made.backward)
            made.backward_dw = lambda: self.log.append("W of Megatron")
            return made

        plan.pre_process = ScheduleNode(lambda: leaf, torch.cuda.current_stream, plan._event)
        plan._transformer_layers = []
        for experts in self.experts:
            layer = megatron.TransformerLayerSchedulePlan.__new__(megatron.TransformerLayerSchedulePlan)
            layer.config, layer.mtp_post_process = self.config, NoopScheduleNode()
            layer.get_low_precision_context = layer.get_fp8_context = nullcontext
            for name, stream in NODES.items():
                setattr(layer, name, node(name) if experts or stream == "comp" else NoopScheduleNode())
            plan._transformer_layers.append(layer)
        return plan


def _leaf() -> torch.Tensor:
    return torch.full((2,), 5.0, requires_grad=True)


def test_a_pair_issues_nodes_in_megatrons_order_and_leaves_the_last_weight_gradient_to_w():
    from megatron_vp.mcore.model.layer_plans import plan_of, run_plans

    log: list[str] = []
    chunk, leaf = Chunk(log, [True, True]), _leaf()
    before = plan_of(chunk, leaf)
    assert run_plans(before).tolist() == [45, 45]
    log.clear()
    output = run_plans(plan_of(chunk, _leaf()), before, torch.ones(2), lambda: log.append("W"))
    assert output.tolist() == [45, 45] and leaf.grad.tolist() == [9, 9]
    assert log == [*PAIR, "W", *PAIR]


def test_without_pass_w_megatron_computes_the_weight_gradients():
    from megatron_vp.mcore.model.layer_plans import plan_of, run_plans

    log: list[str] = []
    plan = plan_of(Chunk(log, [True]), _leaf())
    run_plans(plan)
    log.clear()
    run_plans(None, plan, torch.ones(2))
    assert log == [each.replace("W", "W of Megatron") for each in PAIR if ".F" not in each] + ["W of Megatron"]


@pytest.mark.parametrize("experts", [[True, False], []])
def test_the_final_norm_follows_a_dense_layer_and_no_layer(experts):
    from megatron_vp.mcore.model.layer_plans import plan_of, run_plans

    norm = torch.nn.LayerNorm(2)
    torch.nn.init.constant_(norm.bias, 7)
    leaf = _leaf()
    plan = plan_of(Chunk([], experts, norm), leaf)
    assert run_plans(plan).tolist() == [7, 7]
    run_plans(None, plan, torch.ones(2))
    assert norm.bias.grad.tolist() == [1, 1] and leaf.grad is not None


def test_the_last_backward_of_a_chunk_opens_gradient_synchronisation_in_a_pair_too():
    from megatron_vp.mcore.training.megatron_model import MegatronModel

    log: list[object] = []
    chunk = SimpleNamespace(backwards=1, delaying=(), held=ExitStack())
    chunk.held.callback(log.append, "synchronised from here on")
    model = MegatronModel.__new__(MegatronModel)
    model._chunks, model._synchronises_inside, model._plans = [chunk], True, {(0, 1): "plan"}
    model._schedule = SimpleNamespace(microbatches=2, split_backward=False)
    with mock.patch.object(model, "_forward", lambda *given: log.append(given)):
        model.forward_and_backward((0, 2, "input", None), (0, 1, "output", "gradient"))
    assert log == ["synchronised from here on", (0, 2, "input", None, "plan", "gradient", None)]
    assert not model._plans


@pytest.mark.parametrize("weights", [True, False])
def test_graphs_of_layers_are_captured_in_the_order_in_which_plans_replay_them(weights):
    """Chunks of one and of three layers, of which one has no graph."""
    from megatron_vp.mcore.model.layer_plans import plan_of, run_plans
    from megatron_vp.mcore.training.forward_backward import layer_order

    graphed, replayed = [[True], [True, False, True]], []
    schedule = generate("interleaved", 2, 4, vocab="vocab-2", chunks=2, overlapped=True)
    for rank, passes in enumerate(schedule.ranks):
        replayed.clear()
        plans, pending = {}, {}

        def planned(step, plans=plans):
            plan = plan_of(Chunk([], graphed[step.chunk]), _leaf())
            for layer, has_graph in enumerate(graphed[step.chunk]):
                if has_graph:
                    number = sum(map(sum, graphed[: step.chunk])) + sum(graphed[step.chunk][: layer + 1])
                    node = plan.get_layer(layer).pre_dispatch_computation
                    node.forward = _logged(node.forward, replayed, number)
                    node.backward = _logged(node.backward, replayed, -number)
                    node.backward_dw = _logged(node.backward_dw, replayed, -number - 0.5)
            return plans.setdefault(step, plan)

        for step in passes:
            match schedule.partners.get((rank, step)), step.kind:
                case None, PassKind.F:
                    run_plans(planned(step))
                case other, PassKind.F:
                    pending[other] = planned(step)
                case _, PassKind.B:
                    before = plans.pop(step._replace(kind=PassKind.F))
                    run_plans(pending.get(step), before, torch.ones(2))
        assert pending and len(pending) < 8
        order, where = layer_order(schedule, rank, graphed, weights)
        assert order == [each for each in replayed if weights or each == int(each)]
        assert where == [{1: [0, 0], 2: [1, 0], 3: [1, 1]}.get(each) for each in order]


def _logged(run, log, number):
    return lambda *given: (log.append(number), run(*given))[1]
