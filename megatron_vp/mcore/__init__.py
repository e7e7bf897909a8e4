"""The only packages that import Megatron. They replace functions of Megatron with patches: `patches.py` checks and
applies them, and `patch_table.py` says when each is applied.
"""
