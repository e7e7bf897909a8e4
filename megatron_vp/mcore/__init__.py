"""Contains all modules of megatron_vp that import Megatron. Patches replace some of Megatron's functions. `patches.py`
checks and applies the patches, and `patch_table.py` says when each patch is applied.
"""
