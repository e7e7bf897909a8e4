"""The only rooms that know Megatron.

`patches.py`, which all share, checks and applies what is replaced in Megatron; `patch_table.py` says when.
"""
