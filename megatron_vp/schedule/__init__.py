"""What runs when: schedules as data, generated, proven, timed, drawn and lowered to programs. Imports no torch."""

from megatron_vp.schedule.costs import Costs, PassCosts, StageCosts
from megatron_vp.schedule.formats import from_csv, from_json, to_csv, to_json
from megatron_vp.schedule.generators import GENERATORS, V_SHAPED_SCHEDULES, generate
from megatron_vp.schedule.instructions import (
    Channel,
    Collective,
    CollectiveKind,
    Instruction,
    Loss,
    Message,
    Operation,
    Post,
    Program,
    Run,
    Wait,
)
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.passes import Pass, PassKind, Schedule, ScheduleError, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.program_formats import programs_to_json
from megatron_vp.schedule.squeeze import evaluation
from megatron_vp.schedule.timeline import Player, Timeline, simulate
from megatron_vp.schedule.unfold import unfold
from megatron_vp.schedule.validate import validate, validate_programs

__all__ = [
    "GENERATORS",
    "V_SHAPED_SCHEDULES",
    "Channel",
    "Collective",
    "CollectiveKind",
    "Costs",
    "Instruction",
    "Loss",
    "Message",
    "Operation",
    "Pass",
    "PassCosts",
    "PassKind",
    "Placement",
    "Player",
    "Post",
    "Program",
    "Run",
    "Schedule",
    "ScheduleError",
    "StageCosts",
    "Timeline",
    "VocabMethod",
    "Wait",
    "evaluation",
    "from_csv",
    "from_json",
    "generate",
    "lower",
    "programs_to_json",
    "simulate",
    "to_csv",
    "to_json",
    "unfold",
    "validate",
    "validate_programs",
]
