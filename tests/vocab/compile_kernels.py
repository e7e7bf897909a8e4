"""Compile every kernel for the GPUs that people train on, without one; prints a line and a size in bytes for each."""

from __future__ import annotations

import os
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_vp.vocab.kernels import rows, softmax

CAPABILITIES = (80, 90, 100)
ROW = {"stride": "i32", "tokens": "i32", "columns": "i32"}
# Kernel, its integer arguments, its compile-time constants, warps.
KERNELS = [
    (softmax._exponentiate, ROW, {"BLOCK": 32768, "WHOLE_ROW": True}, 32),
    (softmax._exponentiate, ROW, {"BLOCK": 4096, "WHOLE_ROW": False}, 4),
    (rows._rescale, {"hidden": "i32"}, {"BLOCK": rows.BLOCK}, 4),
    (rows._weigh, {"hidden": "i32"}, {"BLOCK": rows.BLOCK}, 4),
    (rows._add_rows, {"count": "i32", "hidden": "i32"}, {"BLOCK": rows.BLOCK, "WEIGHED": True}, 4),
]
POINTERS = {
    **dict.fromkeys(("logits", "product", "weight", "rows", "result", "source"), "*bf16"),
    **dict.fromkeys(("statistics", "scale", "entry", "factor", "matrix"), "*fp32"),
    **dict.fromkeys(("target", "row", "order"), "*i64"),
}


def main() -> None:
    """Compile all, freshly."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for kernel, integers, constants, warps in KERNELS:
            types = {**POINTERS, **integers, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constexprs=constants)
            for capability in CAPABILITIES:
                target = GPUTarget("cuda", capability, 32)
                code = triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]
                print(kernel.__name__, constants, capability, len(code))


if __name__ == "__main__":
    main()
