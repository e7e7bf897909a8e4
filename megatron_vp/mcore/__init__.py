"""The only rooms that know Megatron.

All share `patches.py`, which checks and applies replacements in Megatron; `patch_table.py` says when.
"""
