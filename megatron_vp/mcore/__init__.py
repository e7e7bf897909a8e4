"""The only packages that import Megatron. They replace functions of Megatron through `patches.py`, which checks and
applies the patches; `patch_table.py` says when each patch is applied.
"""
