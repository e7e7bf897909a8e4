"""Read registers, spills, occupancy, instructions and access widths from the machine code of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property

import triton
from triton.compiler import CompiledKernel

REGISTERS = 65536
"""Of a multiprocessor, at 8.0, 9.0 and 10.0 alike; handed to warps in units of 256."""
WARPS = 64
"""Most that a multiprocessor runs."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?);", re.MULTILINE)
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly: its address, its name with suffixes, and its operands."""

    address: int
    name: str
    operands: str

    @property
    def access(self) -> tuple[str, int] | None:
        """Of a load or store in global memory: LDG or STG, and its bits per thread."""
        kind, *suffixes = self.name.split(".")
        if kind not in ("LDG", "STG"):
            return None
        return kind, next((_WIDTHS[suffix] for suffix in suffixes if suffix in _WIDTHS), 32)


@dataclass(frozen=True)
class Loop:
    """Instructions that a backward branch repeats."""

    body: tuple[Instruction, ...]

    def bits(self, kind: str) -> int:
        """That a thread loads (LDG) or stores (STG) in one turn."""
        return sum(each.access[1] for each in self.body if each.access and each.access[0] == kind)


@dataclass(frozen=True)
class MachineCode:
    """A kernel for one compute capability, from Triton's result."""

    kernel: CompiledKernel

    @property
    def warps(self) -> int:
        """Per program."""
        return self.kernel.metadata.num_warps

    @cached_property
    def resources(self) -> tuple[int, int]:
        """Registers per thread, and bytes per thread that were spilt to memory."""
        said = self._cuobjdump("--dump-resource-usage")
        numbers = re.search(r"REG:(\d+) STACK:(\d+)", said)
        return int(numbers[1]), int(numbers[2])

    @property
    def warps_per_multiprocessor(self) -> int:
        """As many as registers leave room for."""
        per_warp = -(-self.resources[0] * 32 // 256) * 256
        return min(WARPS // self.warps, REGISTERS // (per_warp * self.warps)) * self.warps

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """In order, without what follows the last exit."""
        found = [
            Instruction(int(address, 16), name, operands)
            for address, name, operands in _INSTRUCTION.findall(self._cuobjdump("-sass"))
        ]
        last = max(number for number, each in enumerate(found) if each.name == "EXIT")
        return tuple(found[: last + 1])

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Innermost ones."""
        spans = []
        for each in self.instructions:
            target = re.search(r"0x([0-9a-f]+)\s*$", each.operands)
            if each.name.startswith("BRA") and target and int(target[1], 16) <= each.address:
                spans.append((int(target[1], 16), each.address))
        innermost = [
            (start, end)
            for start, end in spans
            if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans)
        ]
        return tuple(
            Loop(tuple(each for each in self.instructions if start <= each.address <= end)) for start, end in innermost
        )

    def widest(self, kind: str) -> int:
        """Bits per thread of the widest load (LDG) or store (STG)."""
        return max(each.access[1] for each in self.instructions if each.access and each.access[0] == kind)

    def instructions_per_element(self, elements: int, bits: int) -> float:
        """Executed per element of a row of `elements` of so many bits, which one program handles.

        Of a kernel that reads its row twice: the loop that only loads, the one that also stores (of unrolled loops and
        their remainders those that do most in a turn), and everything outside of loops.
        """
        rows = [loop for loop in self.loops if loop.bits("LDG") >= 2 * bits]
        if not rows:
            return len(self.instructions) * 32 * self.warps / elements
        per_element = 0.0
        for stores in (False, True):
            turns = [loop for loop in rows if bool(loop.bits("STG")) == stores]
            most = max(turns, key=lambda loop: loop.bits("LDG"))
            per_element += len(most.body) * bits / most.bits("LDG")
        outside = len(self.instructions) - sum(len(loop.body) for loop in self.loops)
        return per_element + outside * 32 * self.warps / elements

    def _cuobjdump(self, *options: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
