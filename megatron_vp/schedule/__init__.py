"""Generates, validates, simulates, draws and lowers schedules, which are plain data. Does not import torch."""

from megatron_vp.schedule.costs import Costs, PassCosts, StageCosts
from megatron_vp.schedule.families import DEFAULT_SCHEDULE, FAMILIES, family, generate, megatrons_own
from megatron_vp.schedule.family import Family
from megatron_vp.schedule.formats import from_csv, from_json, from_text, programs_to_json, to_csv, to_json
from megatron_vp.schedule.instructions import Instruction, Load, Loss, Post, Program, Run, RunPair, Wait
from megatron_vp.schedule.interlaced import expand_interlaced
from megatron_vp.schedule.lowering import lower
from megatron_vp.schedule.pass_kinds import Held, PassKind
from megatron_vp.schedule.passes import Pass, Schedule, ScheduleError, VocabMethod
from megatron_vp.schedule.placement import Placement
from megatron_vp.schedule.reorder import evaluation
from megatron_vp.schedule.request import ScheduleRequest
from megatron_vp.schedule.timeline import Simulator, Timeline, simulate
from megatron_vp.schedule.transfers import Channel, Collective, CollectiveKind, Copy, Message, Operation
from megatron_vp.schedule.validate import validate, validate_programs
